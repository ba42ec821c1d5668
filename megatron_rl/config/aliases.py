"""Finds the key that an unknown name means: a misspelt key, or a key of another system.

Used where a configuration is loaded, and by `megatron-rl config explain`.
"""

import difflib
from collections.abc import Sequence

ALIASES = {
    # docs/moving.md has the same names, system by system.
    "model.path": "model_name_or_path model_path hf_checkpoint model.name ref_load model",
    "train.steps": "total_training_steps num_rollout max_steps num_steps",
    "train.epochs": "total_epochs num_epoch num_epochs num_train_epochs",
    "train.prompts_per_batch": "batch_size train_batch_size rollout_batch_size "
    "generation_batch_size global_batch_size",
    "train.group_size": "n rollout.n n_samples_per_prompt num_generations rollouts_per_prompt "
    "rollouts_per_example num_samples",
    "train.minibatches": "ppo_mini_batch_size num_steps_per_rollout ppo_epochs num_iterations",
    "train.microbatch_tokens": "ppo_max_token_len_per_gpu max_tokens_per_gpu seq_len "
    "micro_batch_size ppo_micro_batch_size_per_gpu per_device_train_batch_size",
    "train.router_replay": "use_rollout_routing_replay enable_router_replay",
    "sampling.max_new_tokens": "max_response_length rollout_max_response_len max_completion_length "
    "max_completion_tokens max_tokens response_length",
    "sampling.temperature": "rollout_temperature temp",
    "sampling.top_p": "rollout_top_p",
    "sampling.top_k": "rollout_top_k",
    "sampling.stop": "rollout_stop stop_strings stop_sequences",
    "optimizer.lr": "learning_rate lr optim.lr",
    "optimizer.warmup_steps": "lr_warmup_steps lr_warmup_iters num_warmup_steps warmup",
    "optimizer.clip_grad_norm": "grad_clip clip_grad max_norm max_grad_norm",
    "optimizer.lr_schedule": "lr_scheduler_type lr_decay_style scheduler",
    "optimizer.offload": "optimizer_offload optimizer_cpu_offload optim_cpu_offload",
    "queue.max_staleness": "staleness_threshold max_off_policy_steps max_async_level",
    "generator.context_tokens": "max_model_len max_prompt_length max_seq_len context_length",
    "generator.kv_tokens": "gpu_memory_utilization mem_fraction_static",
    "generator.max_running": "max_num_seqs max_running_requests",
    "generator.colocate": "hybrid_engine",
    "generator.extra_args": "engine_kwargs vllm_extra",
    "generator.replicas": "num_engines rollout_num_engines",
    "run.seed": "seed data.seed rollout_seed random_seed",
    "run.dir": "output_dir default_local_dir save_dir run_dir",
    "parallel.tensor": "tp tp_size tensor_model_parallel_size tensor_parallel_size tensor_parallel",
    "parallel.pipeline": "pp pp_size pipeline_model_parallel_size pipeline_parallel_size",
    "parallel.context": "cp cp_size context_parallel_size",
    "parallel.data": "dp dp_size data_parallel_size num_train_gpus",
    "parallel.expert": "ep ep_size expert_model_parallel_size expert_parallel_size",
    "model.recompute": "enable_gradient_checkpointing gradient_checkpointing "
    "recompute_granularity activation_checkpointing",
    "prompts.path": "train_files prompt_data train_dataset dataset data_path",
    "eval.sets": "val_files eval_prompt_data eval_dataset",
    "eval.every_steps": "test_freq eval_interval eval_steps",
    "eval.samples": "val_kwargs.n n_samples_per_eval_prompt num_generations_eval",
    "reward.tasks": "custom_reward_function rm_type custom_rm_path reward_funcs reward_model",
    "render.system_prompt": "system_prompt",
    "render.chat_template": "custom_chat_template chat_template_path",
    "render.chat_template_kwargs": "apply_chat_template_kwargs enable_thinking thinking_mode",
    "algorithm.preset": "adv_estimator advantage_estimator loss_type",
    "algorithm.kl.coefficient": "kl_coef kl_loss_coef beta kl_coeff kl_penalty use_kl_loss",
    "algorithm.entropy.coefficient": "entropy_coeff entropy_coef",
    "algorithm.policy_loss.eps_low": "clip_ratio_low eps_clip epsilon clip_ratio clip_eps",
    "algorithm.policy_loss.eps_high": "clip_ratio_high eps_clip_high epsilon_high",
    "algorithm.policy_loss.dual_clip": "clip_ratio_c eps_clip_c",
    "algorithm.correction.name": "rollout_correction use_tis tis",
    "algorithm.zero_variance_groups": "filter_groups dynamic_sampling",
    "checkpoint.every_steps": "save_freq save_interval save_steps",
    "checkpoint.keep_last": "max_actor_ckpt_to_keep save_total_limit",
    "checkpoint.resume": "resume_mode resume_from_checkpoint resume_step",
    "checkpoint.export_every_steps": "save_hf",
    "generator": "rollout inference vllm sglang engine",
    "optimizer": "optim",
    "train": "trainer actor training",
    "prompts": "data datasets",
    "metrics.wandb": "use_wandb report_to logger",
    "metrics.wandb_project": "project_name wandb_project",
    "metrics.wandb_name": "experiment_name run_name wandb_run_name",
}  # fmt: skip
"""Key -> its names in verl, TRL, slime and prime-rl; a name with dots must match all its parts."""
_CLOSE, _VERY_CLOSE = 0.6, 0.8


def nearest(given: str, known: Sequence[str], count: int = 1) -> list[str]:
    """The likeliest keys first; [] if none is near.

    given: as written, also with numbers of tables. known: all keys and sections, without numbers.
    """
    plain = ".".join(part for part in given.lower().split(".") if not part.isdigit())
    section, _, name = plain.rpartition(".")
    beside = [key for key in known if key.rpartition(".")[0] == section]
    found = []
    for key in _aliased(plain):
        own = f"{section}.{key.rpartition('.')[2]}"
        found.append(own if own in known else key)
    found += difflib.get_close_matches(plain, beside, n=count, cutoff=_VERY_CLOSE)
    lasts = {key: key.rpartition(".")[2] for key in known}
    near = set(difflib.get_close_matches(name, set(lasts.values()), n=3, cutoff=_VERY_CLOSE))
    elsewhere = [key for key, last in lasts.items() if last in near]
    elsewhere.sort(key=lambda key: -difflib.SequenceMatcher(None, plain, key).ratio())
    found += elsewhere
    found += difflib.get_close_matches(plain, known, n=count, cutoff=_CLOSE)
    return list(dict.fromkeys(key for key in found if key in known))[:count]


def meant(given: str, known: Sequence[str]) -> list[str]:
    """Keys that a name stands for: a name of another system, or the last part of a key.

    known: all keys. Misspelt names stand for nothing, see `nearest`.
    """
    plain = given.lower()
    same_end = [key for key in known if key.rpartition(".")[2] == plain]
    return [key for key in dict.fromkeys([*_aliased(plain), *same_end]) if key in known]


def _aliased(plain: str) -> list[str]:
    """Keys with an alias that is the end of the given name; the longest alias first."""
    parts = plain.replace("-", "_").split(".")
    suffixes = [".".join(parts[start:]) for start in range(len(parts))]
    return [key for suffix in suffixes for key, names in ALIASES.items() if suffix in names.split()]
