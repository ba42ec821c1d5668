"""Keys of verl (trainer.main_ppo)."""

from collections.abc import Container
from typing import Any

from megatron_rl.config.foreign import verl_objective as objective
from megatron_rl.config.foreign import verl_values as ours
from megatron_rl.config.foreign.rules import (
    ENVIRONMENT,
    LORA,
    MEMORY,
    NOTHING,
    SCHEDULE,
    SCHEDULES,
    SPEED,
    Convert,
    NoCounterpart,
    Rule,
    Values,
    choice,
    each,
    joined,
    loggers,
    needs,
    offload,
    only,
    positive,
    to,
    truncated,
)

_A, _R, _M, _CORRECTION = ours.ACTOR, ours.ROLLOUT, ours.MEGATRON, objective.CORRECTION
_STARTS = ("ppo_trainer", "ppo_megatron_trainer")
OWN_FILES = (
    *_STARTS, "actor/*_actor", "critic/*_critic", "ref/*_ref",
    "data/legacy_data", "model/hf_model", "rollout/rollout", "reward/*", "reward_model/*",
    "algorithm/rollout_correction", "*profile*/*", "legacy_reward_impl", "model_engine/*",
)  # fmt: skip
"""Files of Hydra in verl itself; DEFAULTS has their values that matter here."""

_YAML = "the YAML has not been read: name it too, `config import run.sh NAME.yaml`"
_ENGINE = "an option of the engine there; generator.extra_args takes SGLang's"
_TESTS = "a reward there; here [reward.tasks] and [[reward.extra]], see docs/extending.md"
_LOADER = "a setting of their loader; `megatron-rl data show` shows what ours reads"
_PROCESS = "a setting of their trainer process; docs/run-folder.md names what a run leaves"
_LONG = "prompts that do not fit generator.context_tokens are counted and left out here"
_SYNC = "weights are synced after every batch here"
_FULL = to("model.recompute", lambda value: "full" if value else "none")


def _sampled(rule: Convert) -> Convert:
    """A key of evaluations, which are greedy unless they sample."""
    return needs(f"{_R}.val_kwargs.do_sample", rule, ": evaluation is greedy")


def _of_yaml(value: str, values: Values) -> dict[str, Any]:
    """A file of verl itself, whose folder is called config, or one that has to be named."""
    name = values.get("--config-name", values.get("-cn", ""))
    if name.removesuffix(".yaml") not in _STARTS or value not in (name, "config", "./config"):
        raise NoCounterpart(_YAML)
    return NOTHING


RULES: dict[str, Rule] = {
    "algorithm.adv_estimator": objective.estimator,
    "algorithm.norm_adv_by_std_in_grpo": lambda value, values: objective.estimator(
        values["algorithm.adv_estimator"], values
    ),
    "algorithm.use_kl_in_reward": objective.reward_kl,
    "algorithm.kl_ctrl.kl_coef": needs("algorithm.use_kl_in_reward", objective.reward_kl),
    "algorithm.kl_ctrl.type": only("fixed", "the coefficient is fixed here"),
    "algorithm.kl_ctrl.*": "the coefficient is fixed here",
    "algorithm.kl_penalty": needs("algorithm.use_kl_in_reward", objective.reward_kl),
    "algorithm.gamma": only(1.0, "tokens are not discounted here"),
    "algorithm.lam": "a critic's; there is none here",
    "algorithm.filter_groups.enable": choice(
        "algorithm.zero_variance_groups", {True: "drop", False: "keep"}, "true or false"
    ),
    "algorithm.filter_groups.*": "the queue fills the batch with further groups by itself",
    "data.train_files": ours.sources,
    "data.val_files": ours.sets,
    "data.train_batch_size": ours.batch,
    "data.max_prompt_length": ours.prompt,
    "data.max_response_length": ours.context,
    "data.seed": to("run.seed"),
    "data.prompt_key": ours.prompt_key,
    "data.apply_chat_template_kwargs.*": ours.template_kwargs,
    "data.filter_overlong_prompts*": _LONG,
    "data.truncation": _LONG,
    "data.shuffle": only(True, "prompts are always shuffled here"),
    "data.reward_fn_key": "reward.tasks decides by the task of a prompt",
    **each("data.", "tokenizer use_shm val_batch_size train_max_samples val_max_samples image_key "
        "return_raw_input_ids return_raw_chat return_full_prompt video_key trust_remote_code "
        "dataloader_num_workers balance_dp_token sampler.* custom_cls.* validation_shuffle "
        "datagen.* gen_batch_size return_multi_modal_inputs tool_config_path", _LOADER),
    "actor_rollout_ref.hybrid_engine": only(True, "generator.colocate says where engines run"),
    "actor_rollout_ref.model.path": to("model.path"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": _FULL,
    **dict.fromkeys(
        ("actor_rollout_ref.model.custom_chat_template", "data.custom_chat_template"),
        to("render.chat_template"),
    ),
    "actor_rollout_ref.model.use_remove_padding": only(True, "sequences are always packed here"),
    "actor_rollout_ref.model.lora_rank": only(0, LORA),
    "actor_rollout_ref.model.lora*": LORA,
    **each("actor_rollout_ref.model.", "use_shm external_lib override_config.* trust_remote_code "
        "enable_activation_offload use_liger use_fused_kernels fused_kernel_options.* "
        "target_modules exclude_modules", SPEED),
    f"{_A}.optim.lr": to("optimizer.lr"),
    f"{_A}.optim.lr_warmup_steps": ours.warmup_steps,
    f"{_A}.optim.lr_warmup_steps_ratio": ours.warmup,
    f"{_A}.optim.weight_decay": to("optimizer.weight_decay"),
    f"{_A}.optim.betas": lambda value, _: dict(
        zip(("optimizer.beta1", "optimizer.beta2"), value, strict=True)
    ),
    f"{_A}.optim.min_lr": lambda value, values: {
        "optimizer.min_lr_ratio": value / values[f"{_A}.optim.lr"]
    },
    f"{_A}.optim.min_lr_ratio": to("optimizer.min_lr_ratio"),
    f"{_A}.optim.clip_grad": objective.clip_norm,
    f"{_A}.grad_clip": objective.clip_norm,
    **dict.fromkeys(
        (f"{_A}.optim.{n}" for n in ("lr_scheduler_type", "warmup_style", "lr_decay_style")),
        choice("optimizer.lr_schedule", SCHEDULES, SCHEDULE),
    ),
    f"{_A}.optim.*": "a setting of their optimizer; [optimizer] is AdamW",
    f"{_A}.use_kl_loss": objective.kl,
    f"{_A}.kl_loss_coef": needs(f"{_A}.use_kl_loss", objective.kl),
    f"{_A}.kl_loss_type": needs(f"{_A}.use_kl_loss", objective.kl),
    f"{_A}.clip_ratio": objective.clip,
    f"{_A}.clip_ratio_low": objective.clip_low,
    f"{_A}.clip_ratio_high": objective.clip_high,
    f"{_A}.clip_ratio_c": objective.dual_clip,
    f"{_A}.entropy_coeff": to("algorithm.entropy.coefficient"),
    objective.WEIGHTS: objective.weights,
    f"{_A}.loss_scale_factor": "optimizer.clip_grad_norm has it, with seq-mean-token-sum-norm",
    f"{_A}.use_token_level_loss": choice(
        "algorithm.aggregation.name", {True: "batch_tokens"}, "loss_agg_mode names theirs today"
    ),
    objective.LOSS: objective.loss,
    f"{_A}.use_rollout_log_probs": objective.old_logprobs,
    f"{_A}.ppo_mini_batch_size": ours.minibatches,
    f"{_A}.ppo_epochs": only(1, "each group is trained on once; replay.buffer_groups repeats them"),
    f"{_A}.use_dynamic_bsz": only(True, "microbatches are always packed by tokens here"),
    f"{_A}.ppo_max_token_len_per_gpu": needs(f"{_A}.use_dynamic_bsz", ours.tokens),
    f"{_A}.ppo_micro_batch_size_per_gpu": ours.micro,
    f"{_M}.tensor_model_parallel_size": to("parallel.tensor"),
    f"{_M}.pipeline_model_parallel_size": to("parallel.pipeline"),
    f"{_M}.virtual_pipeline_model_parallel_size": to("parallel.virtual_stages"),
    f"{_M}.context_parallel_size": to("parallel.context"),
    f"{_M}.expert_model_parallel_size": to("parallel.expert"),
    f"{_M}.expert_tensor_parallel_size": to("parallel.expert_tensor"),
    f"{_M}.sequence_parallel": to("parallel.sequence"),
    f"{_M}.seed": "run.seed seeds everything here",
    **dict.fromkeys(
        (f"{_M}.optimizer_offload", f"{_A}.fsdp_config.optimizer_offload"), offload
    ),
    f"{_A}.strategy": "Megatron trains here: [parallel] divides the model, not FSDP",
    f"{_A}.ulysses_sequence_parallel_size": to("parallel.context"),
    f"{_A}.tis_imp_ratio_cap": lambda value, _: truncated(value) if value > 0 else NOTHING,
    **each(f"{_A}.", "ppo_micro_batch_size fsdp_config.* megatron.* checkpoint.* use_torch_compile "
        "shuffle data_loader_seed profiler.* use_fused_kernels entropy_checkpointing load_weight "
        "entropy_from_logits_with_chunking use_remove_padding freeze_vision_tower", SPEED),
    "actor_rollout_ref.ref.*": "the trainer computes the reference with the policy's settings",
    f"{_R}.n": to("train.group_size"),
    f"{_R}.temperature": to("sampling.temperature"),
    f"{_R}.top_p": to("sampling.top_p"),
    f"{_R}.top_k": to("sampling.top_k", positive),
    f"{_R}.name": only("sglang", "SGLang generates here"),
    f"{_R}.tensor_model_parallel_size": to("generator.tensor_parallel"),
    f"{_R}.max_num_seqs": to("generator.max_running"),
    f"{_R}.gpu_memory_utilization": MEMORY,
    f"{_R}.val_kwargs.n": to("eval.samples"),
    f"{_R}.val_kwargs.do_sample": ours.greedy,
    f"{_R}.val_kwargs.temperature": _sampled(to("eval.temperature")),
    f"{_R}.val_kwargs.top_p": _sampled(to("eval.top_p")),
    f"{_R}.val_kwargs.top_k": _sampled(to("eval.top_k", positive)),
    **each(f"{_R}.", "dtype enforce_eager free_cache_engine load_format max_model_len mode "
        "max_num_batched_tokens enable_chunked_prefill log_prob_* disable_log_stats do_sample "
        "engine_kwargs.* "
        "ignore_eos prompt_length response_length layered_summon_param val_kwargs.* trace.* "
        "skip_* update_weights_bucket_megabytes layer_name_map prometheus.* "
        "enable_prefix_caching data_parallel_size expert_parallel_size over_sample_rate "
        "pipeline_model_parallel_size", _ENGINE),
    f"{_R}.multi_turn.enable": only(False, ENVIRONMENT),
    f"{_R}.calculate_log_probs": only(True, "engines always give the logprobs here"),
    **each(f"{_R}.", "multi_turn.* agent.*", ENVIRONMENT),
    "trainer.total_epochs": ours.epochs,
    "trainer.total_training_steps": to("train.steps"),
    "trainer.save_freq": to("checkpoint.every_steps", positive),
    "trainer.test_freq": ours.eval_every,
    "trainer.max_actor_ckpt_to_keep": to("checkpoint.keep_last"),
    "trainer.n_gpus_per_node": ours.gpus,
    "trainer.nnodes": ours.gpus,
    "rollout.n_gpus_per_node": ours.gpus,
    "rollout.nnodes": ours.gpus,
    ours.PROMPTS: ours.steps,
    "rollout.total_epochs": ours.epochs,
    "rollout.test_freq": ours.eval_every,
    "rollout.*": "settings of its engines; [generator], [sampling] and [train] have ours",
    "async_training.require_batches": ours.minibatches,
    "async_training.trigger_parameter_sync_step": only(1, _SYNC),
    "async_training.partial_rollout": only(True, "no weight sync ends a completion here"),
    "async_training.use_rollout_log_probs": objective.old_logprobs,
    "async_training.*": "queue.max_staleness counts policy versions; 2 generates ahead",
    "trainer.default_local_dir": to("run.dir"),
    "trainer.project_name": to("metrics.wandb_project"),
    "trainer.experiment_name": to("metrics.wandb_name"),
    "trainer.logger": loggers,
    "trainer.resume_mode": choice(
        "checkpoint.resume", {"auto": "auto"}, "checkpoint.resume: auto, or a checkpoint's path"
    ),
    "trainer.val_before_train": only(True, "a run evaluates before it trains"),
    "trainer.critic_warmup": "a critic's; there is none here",
    **each("trainer.", "balance_batch device log_val_generations rollout_data_dir "
        "validation_data_dir resume_from_path del_local_ckpt_after_load max_critic_ckpt_to_keep "
        "default_hdfs_dir remove_previous_ckpt_in_save ray_wait_register_center_timeout "
        "use_legacy_worker_impl esi_redundant_time", _PROCESS),
    "trainer.val_only": only(False, "`megatron-rl eval` evaluates without training"),
    f"{_CORRECTION}.rollout_is": objective.correction,
    f"{_CORRECTION}.rollout_is_threshold": objective.correction,
    **each("algorithm.", "rollout_correction* rollout_is*", "[algorithm.correction] is ours"),
    "critic.*": "a critic's; there is none here",
    **ours.overlong("reward_model.overlong_buffer"),
    **ours.overlong("reward_model.reward_kwargs.overlong_buffer_cfg"),
    **ours.overlong("custom_reward_function.overlong_buffer"),
    "reward_model.*": _TESTS,
    "reward.*": _TESTS,
    "custom_reward_function.*": _TESTS,
    "ray_*": "there is no Ray here; `megatron-rl node` and Slurm start further nodes",
    "global_profiler.*": "train.profile_steps records steps here",
    "defaults.*": "name that file too, else the values here are verl's defaults where it has some",
    **dict.fromkeys(("--config-name", "-cn", "--config-path", "-cp"), _of_yaml),
    "-*": "an option of Hydra",
}  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.filter_groups.enable": False,
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{_A}.optim.lr": 1e-6,
    f"{_A}.optim.lr_warmup_steps": -1,
    f"{_A}.optim.weight_decay": 0.01,
    f"{_A}.optim.betas": [0.9, 0.999],
    f"{_A}.optim.min_lr_ratio": 0.0,
    f"{_A}.use_kl_loss": False,
    f"{_A}.kl_loss_coef": 0.001,
    f"{_A}.kl_loss_type": "low_var_kl",
    f"{_A}.clip_ratio": 0.2,
    f"{_A}.clip_ratio_c": 3.0,
    f"{_A}.grad_clip": 1.0,
    objective.LOSS: "vanilla",
    objective.WEIGHTS: "token-mean",
    f"{_A}.ppo_mini_batch_size": 256,
    f"{_R}.n": 1,
    f"{_R}.tensor_model_parallel_size": 2,
    f"{_R}.val_kwargs.n": 1,
    f"{_R}.val_kwargs.do_sample": False,
    f"{_R}.val_kwargs.temperature": 0.0,
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
    "trainer.total_epochs": 30,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
}


def defaults(values: Values) -> dict[str, Any]:
    """verl's values for keys that are not given."""
    is_async = any(key.startswith("async_training.") for key in values)
    return DEFAULTS | ({"data.train_batch_size": 0} if is_async else {})


def checks(values: Values, given: Container[str]) -> list[str]:
    """What a reader of our file must decide. given: our keys that it gives."""
    found = [
        "reward.tasks: verl chooses a reward by data_source; `megatron-rl data show` tells ours"
    ]
    files = values.get("data.train_files")
    if isinstance(files, list) and len(files) > 1:
        found.append(joined("verl"))
    if "algorithm.policy_loss.old_logprobs" not in given and values.get(objective.LOSS) != "gpg":
        found.append(
            "algorithm.policy_loss.old_logprobs: verl recomputes them; the default takes the "
            "engine's"
        )
    if any(key.endswith(".penalty_factor") for key in values):
        found.append(
            "reward.length: rewards of verl's dapo are 1 and -1, and 1 and 0 here: half of "
            "penalty_factor is the same share"
        )
    advantages = str(values.get("algorithm.adv_estimator")).removesuffix("_vectorized")
    if advantages not in objective.ADVANTAGES:
        why = "needs a critic, and there is none here" if advantages == "gae" else "is not here"
        found.append(
            f"algorithm.preset: verl's {advantages} {why}; the preset is the default, magistral, "
            "and `megatron-rl algorithms` lists others"
        )
    if values.get(f"{_R}.multi_turn.enable"):
        found.append(
            f"reward.tasks: without an environment a completion has one turn: {ENVIRONMENT}"
        )
    if (syncs := values.get("async_training.trigger_parameter_sync_step") or 1) > 1:
        found.append(
            f"train.prompts_per_batch: verl syncs weights every {syncs} batches, and here a batch "
            f"ends with a weight sync: {syncs} times prompts_per_batch and minibatches sync as "
            f"rarely, with steps and eval.every_steps over {syncs}"
        )
    return found
