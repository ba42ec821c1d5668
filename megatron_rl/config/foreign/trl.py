"""Keys of TRL (GRPOConfig, GRPOTrainer, load_dataset; YAML of `trl grpo`)."""

import math
from collections.abc import Container
from typing import Any

from megatron_rl.config.foreign import trl_batches, trl_data
from megatron_rl.config.foreign.rules import (
    ENVIRONMENT,
    LORA,
    MEMORY,
    NOTHING,
    SCHEDULE,
    SCHEDULES,
    SPEED,
    Convert,
    Nearest,
    NoCounterpart,
    Rule,
    Values,
    choice,
    clip,
    each,
    kl_penalty,
    lengths,
    loggers,
    only,
    positive,
    refuse,
    times,
    to,
    undivided,
    unknown_warmup,
)


def _warmup(value: float, values: Values) -> dict[str, Any]:
    if not value or values["warmup_steps"]:
        return NOTHING
    steps = values.get("max_steps", -1)
    if steps <= 0:
        return unknown_warmup(value)
    return {"optimizer.warmup_steps": math.ceil(value * steps)}


def _warmup_steps(value: float, values: Values) -> dict[str, Any]:
    """Optimizer steps, or below 1 a share of all of them."""
    if 0 < value < 1:
        return _warmup(value, dict(values) | {"warmup_steps": 0})
    return {"optimizer.warmup_steps": value} if value or not values.get("warmup_ratio") else NOTHING


def _system_prompt(value: str, _: Values) -> dict[str, Any]:
    """A prompt that asks for the form of our format checks."""
    if "boxed" not in value:
        raise NoCounterpart(
            r"asks for another form than the format check, \boxed{}: ours asks for that; to keep "
            "theirs set render.system_prompt, and format_check in [reward.tasks]"
        )
    return {"render.system_prompt": value}


def _sampled(name: str) -> Convert:
    """A key of sampling, which evaluations share."""

    def rule(value: Any, _: Values) -> dict[str, Any]:
        value = positive(value) if name == "top_k" else value
        return {f"{section}.{name}": value for section in ("sampling", "eval")}

    return rule


def _least(value: dict[str, Any], values: Values) -> dict[str, Any]:
    """The share of the peak at which linear and cosine schedules end: 0 unless they say more."""
    if others := set(value) - {"min_lr_rate", "min_lr"}:
        raise NoCounterpart(f"{', '.join(sorted(others))}: {SCHEDULE}")
    least = value.get("min_lr", 0.0) / values["learning_rate"]
    return {"optimizer.min_lr_ratio": value.get("min_lr_rate", least)}


def _correction(_: Any, values: Values) -> dict[str, Any]:
    """The weights of the trainer's logprobs over vLLM's, by token."""
    names = {"token_truncate": "truncated", "token_mask": "masked"}
    mode = values.get("vllm_importance_sampling_mode", "token_truncate")
    if not values.get("vllm_importance_sampling_correction", True):
        return {"algorithm.correction.name": "none"}
    if mode not in names:
        raise NoCounterpart("the product of a sequence's ratios; algorithm.correction has a mean")
    # masked: there no small ratio is masked.
    return {
        "algorithm.correction.name": names[mode],
        **({"algorithm.correction.low": 0.0} if mode == "token_mask" else {}),
    }


def _overlong(value: int, values: Values) -> dict[str, Any]:
    """Tokens of the penalty of long completions, as in DAPO."""
    if "soft_overlong_punishment" not in str(values.get("reward_funcs")):
        raise NoCounterpart("no effect without the reward soft_overlong_punishment")
    return {"reward.length_margin_tokens": value}


def _epochs(value: float, values: Values) -> dict[str, Any]:
    if values.get("max_steps", -1) > 0:
        raise NoCounterpart("no effect with max_steps")
    if value != int(value):
        raise NoCounterpart("train.epochs is a whole number: set train.steps")
    return {"train.epochs": int(value)}


def _context(_: Any, values: Values) -> dict[str, Any]:
    prompt, context = values.get("max_prompt_length"), values.get("vllm_max_model_length")
    return lengths(values["max_completion_length"], prompt, context)


def _loss(value: Any, values: Values) -> dict[str, Any]:
    names = {"dapo": "batch_tokens", "grpo": "sequence_mean", "bnpo": "batch_tokens",
             "dr_grpo": "sequence_sum", "cispo": "batch_tokens"}  # fmt: skip
    if value not in names:
        refuse("loss_type", value, names, "dapo")
    if value == "dr_grpo":
        divided = undivided(_divisor(values), "max_completion_length")
        return Nearest({"algorithm.preset": "grpo", **divided}, divided.differs)
    ours = {
        "algorithm.preset": "cispo" if value == "cispo" else "grpo",
        "algorithm.aggregation.name": names[value],
    }
    if value == "bnpo":
        differs = "the mean over tokens of a microbatch there, of a minibatch here"
        return Nearest(ours, f"algorithm.aggregation: {differs}")
    return ours


def _divisor(values: Values) -> Any:
    """The number that TRL divides the loss by, beyond our weights of tokens; None: none."""
    return values.get("max_completion_length") if values["loss_type"] == "dr_grpo" else None


def _clip(_: Any, values: Values) -> dict[str, Any]:
    low, high = values["epsilon"], values.get("epsilon_high")
    if values["loss_type"] != "cispo":
        return clip(low, high)
    # The bound of the ratio itself, and from above only.
    bound = low if high is None else high
    if bound <= 1:
        refuse("epsilon_high", bound, ["above 1 with loss_type cispo: it bounds the ratio"], "5.0")
    return {"algorithm.policy_loss.eps_low": 1.0, "algorithm.policy_loss.eps_high": bound - 1}


def _scale(value: Any, _: Values) -> dict[str, Any]:
    names = {True: "group", "group": "group", False: "none", "none": "none", "batch": "minibatch"}
    if value not in names:
        refuse("scale_rewards", value, ("group", "batch", "none"), "group")
    ours = {"algorithm.normalization.name": names[value]}
    if value != "batch":
        return ours
    return Nearest(
        ours,
        "algorithm.normalization: TRL divides by the standard deviation of the rewards of the "
        "generation batch; minibatch divides by that of the advantages (rewards minus the mean of "
        "their group) of a minibatch, which is smaller, so advantages are larger here",
    )


def _level(value: Any, _: Values) -> dict[str, Any]:
    if value not in ("token", "sequence"):
        refuse("importance_sampling_level", value, ("token", "sequence"), "token")
    return {"algorithm.policy_loss.level": value}


_ENGINE = "vLLM there; SGLang generates here: generator.extra_args takes its options"
_REWARD = "functions there; here [reward.tasks] and [[reward.extra]], see docs/extending.md"
_SCRIPT = "a setting of their script"
_HUB = "`megatron-rl convert` and RUN/final hold models of Hugging Face's form"

RULES: dict[str, Rule] = {
    "model": to("model.path"),
    "model_name_or_path": to("model.path"),
    "model_revision": to("model.revision"),
    **trl_data.RULES,
    "num_generations": to("train.group_size"),
    "per_device_train_batch_size": trl_batches.batch,
    "gradient_accumulation_steps": trl_batches.batch,
    "generation_batch_size": trl_batches.minibatches,
    "steps_per_generation": trl_batches.minibatches,
    "num_iterations": only(1, "each group is trained on once; replay.buffer_groups repeats them"),
    "max_steps": trl_batches.steps,
    "num_train_epochs": _epochs,
    "max_completion_length": _context,
    "max_prompt_length": _context,
    "vllm_max_model_length": _context,
    **{name: _sampled(name) for name in ("temperature", "top_p", "top_k", "min_p")},
    "repetition_penalty": only(1.0, "it would change the logprobs of completions"),
    "beta": lambda value, _: kl_penalty("loss" if value else "none", value),
    "epsilon": _clip,
    "epsilon_high": lambda value, values: (
        _clip(value, values)
        if values["loss_type"] == "cispo"
        else {"algorithm.policy_loss.eps_high": value}
    ),
    "delta": lambda value, values: (
        NOTHING if values["loss_type"] == "cispo" else {"algorithm.policy_loss.dual_clip": value}
    ),
    "loss_type": _loss,
    "scale_rewards": _scale,
    "importance_sampling_level": _level,
    "mask_truncated_completions": only(False, "completions at the limit count, with their reward"),
    "vllm_importance_sampling_correction": _correction,
    "vllm_importance_sampling_mode": _correction,
    "vllm_importance_sampling_cap": to("algorithm.correction.high"),
    "learning_rate": to("optimizer.lr"),
    "lr_scheduler_type": choice(
        "optimizer.lr_schedule",
        SCHEDULES | {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"},
        SCHEDULE,
    ),
    "lr_scheduler_kwargs": _least,
    "warmup_steps": _warmup_steps,
    "warmup_ratio": _warmup,
    "weight_decay": to("optimizer.weight_decay"),
    "adam_beta1": to("optimizer.beta1"),
    "adam_beta2": to("optimizer.beta2"),
    "max_grad_norm": lambda value, values: times(value, _divisor(values)),
    "optim": "AdamW with float32 masters trains here",
    "bf16": choice("model.dtype", {True: "bfloat16", False: "float32"}, "model.dtype is a dtype"),
    "fp16": only(False, "model.dtype is bfloat16, or float32"),
    "torch_dtype": to("model.dtype"),
    "dtype": to("model.dtype"),
    "gradient_checkpointing": to("model.recompute", lambda value: "full" if value else "none"),
    "seed": to("run.seed"),
    "output_dir": to("run.dir"),
    "run_name": to("metrics.wandb_name"),
    "report_to": loggers,
    "save_steps": trl_batches.every("checkpoint.every_steps", "save_strategy", "steps"),
    "save_total_limit": to("checkpoint.keep_last"),
    "save_strategy": choice(
        "checkpoint.every_steps", {"no": 0, "steps": None}, "checkpoint.every_steps is in steps"
    ),
    "save_*": "checkpoint.every_steps and checkpoint.keep_last say when and how many",
    "eval_steps": trl_batches.every("eval.every_steps", "eval_strategy", "no"),
    "eval_strategy": choice(
        "eval.prompts", {"no": 0, "steps": None}, "eval.every_steps is a number of steps"
    ),
    "num_generations_eval": to("eval.samples"),
    "resume_from_checkpoint": "a run resumes by itself; checkpoint.resume chooses",
    "chat_template_kwargs": to("render.chat_template_kwargs"),
    "chat_template_path": to("render.chat_template"),
    "chat_template": to("render.chat_template"),
    "system_prompt": _system_prompt,
    "vllm_mode": lambda value, _: (
        {"generator.colocate": True, "weights.method": "folder"} if value == "colocate" else NOTHING
    ),
    "vllm_tensor_parallel_size": to("generator.tensor_parallel"),
    "vllm_gpu_memory_utilization": MEMORY,
    "vllm_*": _ENGINE,
    "use_vllm": _ENGINE,
    "generation_kwargs": "[sampling] has the settings; sampling.stop the texts that end it",
    "args": "the command line has the settings: name the script that starts it too, as run.sh",
    "config": "the YAML has not been read: name it too, `config import run.sh NAME.yaml`",
    "reward_funcs": _REWARD,
    "reward_weights": "reward.extra.weight",
    "soft_punish_cache": _overlong,
    "max_completion_len": "the penalty begins below sampling.max_new_tokens here",
    "multi_objective_aggregation": only("sum_then_normalize", "rewards are added here"),
    "top_entropy_quantile": only(1.0, "every token of a completion counts here"),
    "use_bias_correction_kl": only(False, "[algorithm.kl] has ours"),
    "num_processes": to("parallel.data"),
    "cast_lm_head_to_fp32": choice(
        "model.head_dtype", {True: "float32", False: None}, "model.head_dtype is a dtype"
    ),
    "reward_*": _REWARD,
    **each("", "environment_factory tools rollout_func max_tool_calling_iterations", ENVIRONMENT),
    "processing_class": "the model's folder has the tokenizer",
    **each("", "benchmarks do_eval overwrite_output_dir do_train", _SCRIPT),
    "callbacks": "RUN/metrics.jsonl has the metrics",
    "peft_config": LORA,
    "use_peft": only(False, LORA),
    "lora_*": LORA,
    "shuffle_dataset": only(True, "prompts are always shuffled here"),
    "remove_unused_columns": "columns that nothing names are not read",
    "disable_dropout": only(True, "there is no dropout here"),
    "ref_model_*": "the reference is the start: algorithm.reference",
    "sync_ref_model": only(False, "algorithm.reference.policy ema follows the policy"),
    "use_liger_*": SPEED,
    "attn_implementation": SPEED,
    "model_init_kwargs": SPEED,
    "deepspeed": SPEED,
    "fsdp*": SPEED,
    "ddp_*": SPEED,
    "dataloader_*": SPEED,
    "torch_*": SPEED,
    "tf32": SPEED,
    "gradient_checkpointing_kwargs": SPEED,
    "per_device_eval_batch_size": "generator.max_running limits completions in flight",
    "logging_*": "every step is written to RUN/metrics.jsonl",
    "log_*": "completions are in RUN/rollouts",
    "num_completions_to_print": "completions are in RUN/rollouts",
    "push_to_hub": only(False, _HUB),
    "hub_*": _HUB,
    "[*][*]*": "write the values themselves into the call, and import again",
}  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_completion_length": 256,
    "num_train_epochs": 3,
    "beta": 0.0,
    "epsilon": 0.2,
    "loss_type": "dapo",
    "scale_rewards": "group",
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "lr_scheduler_kwargs": {},
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "adam_beta2": 0.999,
    "max_grad_norm": 1.0,
    "save_steps": 500,
    "eval_strategy": "no",
}


def checks(values: Values, given: Container[str]) -> list[str]:
    """What a reader of our file must decide. given: our keys that it gives."""
    found = trl_data.checks(values)
    if values.keys() & {"environment_factory", "tools", "rollout_func"}:
        found.append(
            f"reward.tasks: without an environment a completion has one turn: {ENVIRONMENT}"
        )
    if "num_processes" in values:
        found.append("generator.replicas: the GPUs of vLLM, besides those of parallel.data")
        return found
    found.append(
        "parallel.data, generator.replicas: accelerate, their launcher, says how many GPUs"
    )
    found.append(trl_batches.check(values))
    return found
