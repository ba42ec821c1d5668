"""Keys of verl (trainer.main_ppo)."""

from collections.abc import Callable
from typing import Any

from megatron_rl.config.foreign.rules import (
    LORA,
    MEMORY,
    NOTHING,
    SCHEDULE,
    SCHEDULES,
    SPEED,
    NoCounterpart,
    Rule,
    Values,
    choice,
    each,
    loggers,
    offload,
    only,
    positive,
    product,
    ratio,
    set_name,
    to,
)

_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_M = f"{_A}.megatron"


def _context(_: Any, values: Values) -> dict[str, Any]:
    return {
        "sampling.max_new_tokens": values["data.max_response_length"],
        "generator.context_tokens": values["data.max_prompt_length"]
        + values["data.max_response_length"],
    }


def _prompt(value: Any, values: Values) -> dict[str, Any]:
    return {"generator.context_tokens": value + values["data.max_response_length"]}


def _sources(value: Any, values: Values) -> dict[str, Any]:
    paths = value if isinstance(value, list) else [value]
    # The prompts of val_files are held out instead.
    share = {"held_out_share": 0.0} if values.get("data.val_files") else {}
    return {"prompts": [{"path": str(path), **share} for path in paths]}


def _prompt_key(value: Any, values: Values) -> dict[str, Any]:
    if value == "prompt":
        return NOTHING
    files = values["data.train_files"]
    count = len(files) if isinstance(files, list) else 1
    return {"prompts": [{"columns": {"question": value}}] * count}


def _sets(value: Any, _: Values) -> dict[str, Any]:
    paths = [str(path) for path in (value if isinstance(value, list) else [value])]
    return {"eval.sets": [{"name": set_name(p), "prompts": {"path": p}} for p in paths]}


def _estimator(value: Any, values: Values) -> dict[str, Any]:
    advantages = {"grpo": "group_mean", "rloo": "leave_one_out",
                  "reinforce_plus_plus_baseline": "group_mean"}  # fmt: skip
    if value not in advantages:
        raise NoCounterpart("`megatron-rl algorithms` lists estimators; there is no critic here")
    scale = {"grpo": "group" if values["algorithm.norm_adv_by_std_in_grpo"] else "none",
             "rloo": "none", "reinforce_plus_plus_baseline": "minibatch"}  # fmt: skip
    return {
        "algorithm.preset": "grpo",
        "algorithm.advantage_estimator.name": advantages[value],
        "algorithm.normalization.name": scale[value],
    }


def _kl(_: Any, values: Values) -> dict[str, Any]:
    if values[f"{_A}.use_kl_loss"]:
        if values[f"{_A}.kl_loss_type"] not in ("low_var_kl", "k3"):
            raise NoCounterpart("in the loss choose algorithm.kl.estimator k2, forward_kl or exact")
        return {"algorithm.kl.placement": "loss", "algorithm.kl.estimator": "forward_kl",
                "algorithm.kl.coefficient": values[f"{_A}.kl_loss_coef"]}  # fmt: skip
    if values["algorithm.use_kl_in_reward"]:
        return {"algorithm.kl.placement": "reward", "algorithm.kl.estimator": "k1",
                "algorithm.kl.coefficient": values["algorithm.kl_ctrl.kl_coef"]}  # fmt: skip
    return {"algorithm.kl.placement": "none", "algorithm.reference.policy": "none"}


def _used_kl(key: str) -> Rule:
    def rule(value: Any, values: Values) -> dict[str, Any]:
        if not values[key]:
            raise NoCounterpart(f"no effect without {key}")
        return _kl(value, values)

    return rule


def _clip(value: Any, values: Values) -> dict[str, Any]:
    low, high = (values.get(f"{_A}.clip_ratio_{side}") for side in ("low", "high"))
    if low is not None and high is not None:
        raise NoCounterpart("no effect with clip_ratio_low and clip_ratio_high")
    sides = {"eps_low": low, "eps_high": high}
    return {f"algorithm.policy_loss.{k}": value for k, given in sides.items() if given is None}


def _minibatches(value: int, values: Values) -> dict[str, Any]:
    batch = values["data.train_batch_size"]
    # verl cuts a minibatch that exceeds the batch.
    return {"train.minibatches": ratio(batch, min(value, batch), "train.minibatches")}


def _micro(value: int, values: Values) -> dict[str, Any]:
    if values.get(f"{_A}.use_dynamic_bsz"):
        raise NoCounterpart("no effect with use_dynamic_bsz: ppo_max_token_len_per_gpu counts")
    longest = values["data.max_prompt_length"] + values["data.max_response_length"]
    return {"train.microbatch_tokens": product(value, longest)}


def _tokens(value: int, values: Values) -> dict[str, Any]:
    if not values.get(f"{_A}.use_dynamic_bsz"):
        raise NoCounterpart("no effect without use_dynamic_bsz")
    return {"train.microbatch_tokens": value}


def _warmup(value: float, values: Values) -> dict[str, Any]:
    if not value:
        return NOTHING
    steps = values.get("trainer.total_training_steps")
    if not steps or values[f"{_A}.optim.lr_warmup_steps"] > 0:
        raise NoCounterpart("a share of total_training_steps: set optimizer.warmup_steps")
    batch = values["data.train_batch_size"]
    updates = steps * ratio(batch, min(values[f"{_A}.ppo_mini_batch_size"], batch), "minibatches")
    return {"optimizer.warmup_steps": int(value * updates)}


def _overlong(prefix: str) -> dict[str, Rule]:
    """The penalty of long completions, whose keys have moved from release to release."""
    enable, length = f"{prefix}.enable", f"{prefix}.len"

    def rule(_: Any, values: Values) -> dict[str, Any]:
        if not values.get(enable):
            raise NoCounterpart(f"no effect without {enable}")
        return {"reward.length_margin_tokens": values[length]}

    return {
        length: rule,
        enable: lambda value, values: rule(value, values) if value else NOTHING,
        f"{prefix}.*": "reward.length is the largest penalty here, 0.1 by default",
    }


def _gpus(_: Any, values: Values) -> dict[str, Any]:
    """verl's engines run on the trainer's GPUs."""
    gpus = product(values["trainer.n_gpus_per_node"], values["trainer.nnodes"])
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    ranks = product(*(values.get(f"{_M}.{size}") or 1 for size in sizes))
    engine = values[f"{_R}.tensor_model_parallel_size"]
    data = ratio(gpus, ranks, "parallel.data")
    replicas = ratio(gpus, engine, "generator.replicas")
    # Engines free their memory while the trainer works (free_cache_engine).
    shared = {
        "generator.colocate": True, "generator.release_memory": True,
        "weights.method": "host", "weights.kv_cache": "recompute",
    }  # fmt: skip
    return {"parallel.data": data, "generator.replicas": replicas, **shared}


def _epochs(value: int, values: Values) -> dict[str, Any]:
    if values.get("trainer.total_training_steps"):
        raise NoCounterpart("no effect with total_training_steps")
    return {"train.epochs": value}


def _greedy(value: Any, values: Values) -> dict[str, Any]:
    return {"eval.temperature": values[f"{_R}.val_kwargs.temperature"] if value else 0.0}


def _eval(key: str, convert: Callable[[Any], Any] | None = None) -> Rule:
    def rule(value: Any, values: Values) -> dict[str, Any]:
        if not values[f"{_R}.val_kwargs.do_sample"]:
            raise NoCounterpart("no effect without do_sample: evaluation is greedy")
        return {key: convert(value) if convert else value}

    return rule


_ENGINE = "an option of the engine there; generator.extra_args takes SGLang's"
_TESTS = "a reward there; here [reward.tasks] and [[reward.extra]], see docs/extending.md"
_LOADER = "a setting of their loader; `megatron-rl data show` shows what ours reads"
_PROCESS = "a setting of their trainer process; docs/run-folder.md names what a run leaves"
_LONG = "prompts that do not fit generator.context_tokens are counted and left out here"
_FULL = to("model.recompute", lambda value: "full" if value else "none")

RULES: dict[str, Rule] = {
    "algorithm.adv_estimator": _estimator,
    "algorithm.norm_adv_by_std_in_grpo": lambda value, values: _estimator(
        values["algorithm.adv_estimator"], values
    ),
    "algorithm.use_kl_in_reward": _kl,
    "algorithm.kl_ctrl.kl_coef": _used_kl("algorithm.use_kl_in_reward"),
    "algorithm.kl_ctrl.*": "the coefficient is fixed here",
    "algorithm.gamma": only(1.0, "tokens are not discounted here"),
    "algorithm.lam": "a critic's; there is none here",
    "algorithm.filter_groups.enable": choice(
        "algorithm.zero_variance_groups", {True: "drop", False: "keep"}, "true or false"
    ),
    "algorithm.filter_groups.*": "the queue fills the batch with further groups by itself",
    "data.train_files": _sources,
    "data.val_files": _sets,
    "data.train_batch_size": to("train.prompts_per_batch"),
    "data.max_prompt_length": _prompt,
    "data.max_response_length": _context,
    "data.seed": to("run.seed"),
    "data.prompt_key": _prompt_key,
    "data.apply_chat_template_kwargs.*": "give render.chat_template_kwargs",
    "data.filter_overlong_prompts*": _LONG,
    "data.truncation": _LONG,
    "data.shuffle": only(True, "prompts are always shuffled here"),
    "data.reward_fn_key": "reward.tasks decides by the task of a prompt",
    **each("data.", "tokenizer use_shm val_batch_size train_max_samples val_max_samples image_key "
        "return_raw_input_ids return_raw_chat return_full_prompt video_key trust_remote_code "
        "dataloader_num_workers sampler.* custom_cls.* validation_shuffle datagen.* gen_batch_size "
        "return_multi_modal_inputs tool_config_path truncation", _LOADER),
    "actor_rollout_ref.hybrid_engine": only(True, "generator.colocate says where engines run"),
    "actor_rollout_ref.model.path": to("model.path"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": _FULL,
    "actor_rollout_ref.model.custom_chat_template": to("render.chat_template"),
    "actor_rollout_ref.model.use_remove_padding": only(True, "sequences are always packed here"),
    "actor_rollout_ref.model.lora*": LORA,
    **each("actor_rollout_ref.model.", "use_shm external_lib override_config.* trust_remote_code "
        "enable_activation_offload use_liger use_fused_kernels fused_kernel_options.* "
        "target_modules exclude_modules", SPEED),
    f"{_A}.optim.lr": to("optimizer.lr"),
    f"{_A}.optim.lr_warmup_steps": to("optimizer.warmup_steps", positive),
    f"{_A}.optim.lr_warmup_steps_ratio": _warmup,
    f"{_A}.optim.weight_decay": to("optimizer.weight_decay"),
    f"{_A}.optim.betas": lambda value, _: dict(
        zip(("optimizer.beta1", "optimizer.beta2"), value, strict=True)
    ),
    f"{_A}.optim.min_lr_ratio": to("optimizer.min_lr_ratio"),
    f"{_A}.optim.clip_grad": to("optimizer.clip_grad_norm"),
    f"{_A}.grad_clip": to("optimizer.clip_grad_norm"),
    **dict.fromkeys(
        (f"{_A}.optim.{n}" for n in ("lr_scheduler_type", "warmup_style", "lr_decay_style")),
        choice("optimizer.lr_schedule", SCHEDULES, SCHEDULE),
    ),
    f"{_A}.optim.*": "a setting of their optimizer; [optimizer] is AdamW",
    f"{_A}.use_kl_loss": _kl,
    f"{_A}.kl_loss_coef": _used_kl(f"{_A}.use_kl_loss"),
    f"{_A}.kl_loss_type": _used_kl(f"{_A}.use_kl_loss"),
    f"{_A}.clip_ratio": _clip,
    f"{_A}.clip_ratio_low": to("algorithm.policy_loss.eps_low"),
    f"{_A}.clip_ratio_high": to("algorithm.policy_loss.eps_high"),
    f"{_A}.clip_ratio_c": to("algorithm.policy_loss.dual_clip"),
    f"{_A}.entropy_coeff": to("algorithm.entropy.coefficient"),
    f"{_A}.loss_agg_mode": choice(
        "algorithm.aggregation.name",
        {"token-mean": "batch_tokens", "seq-mean-token-mean": "sequence_mean",
         "seq-mean-token-sum": "sequence_sum"},
        "algorithm.aggregation sequence_sum is the same except for a constant factor",
    ),
    f"{_A}.policy_loss.loss_mode": choice(
        "algorithm.policy_loss.level", {"vanilla": "token", "gspo": "sequence"},
        "`megatron-rl algorithms` lists the policy losses",
    ),
    f"{_A}.ppo_mini_batch_size": _minibatches,
    f"{_A}.ppo_epochs": only(1, "each group is trained on once; replay.buffer_groups repeats them"),
    f"{_A}.use_dynamic_bsz": only(True, "microbatches are always packed by tokens here"),
    f"{_A}.ppo_max_token_len_per_gpu": _tokens,
    f"{_A}.ppo_micro_batch_size_per_gpu": _micro,
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
    f"{_A}.tis_imp_ratio_cap": lambda value, _: (
        {"algorithm.correction.name": "truncated", "algorithm.correction.high": value}
        if value > 0
        else NOTHING
    ),
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
    f"{_R}.val_kwargs.do_sample": _greedy,
    f"{_R}.val_kwargs.temperature": _eval("eval.temperature"),
    f"{_R}.val_kwargs.top_p": _eval("eval.top_p"),
    f"{_R}.val_kwargs.top_k": _eval("eval.top_k", positive),
    **each(f"{_R}.", "dtype enforce_eager free_cache_engine load_format max_model_len mode "
        "max_num_batched_tokens enable_chunked_prefill log_prob_* disable_log_stats do_sample "
        "engine_kwargs.* "
        "ignore_eos prompt_length response_length layered_summon_param val_kwargs.* trace.* "
        "calculate_log_probs skip_* update_weights_bucket_megabytes layer_name_map prometheus.* "
        "enable_prefix_caching data_parallel_size expert_parallel_size over_sample_rate "
        "pipeline_model_parallel_size", _ENGINE),
    **each(f"{_R}.", "multi_turn.* agent.*", "completions have one turn here"),
    "trainer.total_epochs": _epochs,
    "trainer.total_training_steps": to("train.steps"),
    "trainer.save_freq": to("checkpoint.every_steps", positive),
    "trainer.test_freq": to("eval.every_steps", positive),
    "trainer.max_actor_ckpt_to_keep": to("checkpoint.keep_last"),
    "trainer.n_gpus_per_node": _gpus,
    "trainer.nnodes": _gpus,
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
    **each("algorithm.", "rollout_correction* rollout_is*", "[algorithm.correction] is ours"),
    "critic.*": "a critic's; there is none here",
    **_overlong("reward_model.overlong_buffer"),
    **_overlong("reward_model.reward_kwargs.overlong_buffer_cfg"),
    **_overlong("custom_reward_function.overlong_buffer"),
    "reward_model.*": _TESTS,
    "reward.*": _TESTS,
    "custom_reward_function.*": _TESTS,
    "ray_*": "there is no Ray here; `megatron-rl node` and Slurm start further nodes",
    "global_profiler.*": "train.profile_steps records steps here",
    "--*": "give the values of that file; only arguments of the command line are read",
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
    f"{_A}.use_kl_loss": False,
    f"{_A}.kl_loss_coef": 0.001,
    f"{_A}.kl_loss_type": "low_var_kl",
    f"{_A}.clip_ratio": 0.2,
    f"{_A}.clip_ratio_c": 3.0,
    f"{_A}.loss_agg_mode": "token-mean",
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


def checks(values: Values) -> list[str]:
    """What a reader of our file must decide."""
    return [
        "reward.tasks: verl chooses a reward by data_source; `megatron-rl data show` tells ours",
        "algorithm.policy_loss.old_logprobs: verl recomputes them; the default takes the engine's",
    ]
