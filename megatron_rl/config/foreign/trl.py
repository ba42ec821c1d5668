"""Keys of TRL (GRPOConfig, GRPOTrainer, load_dataset; YAML of `trl grpo`)."""

import math
from typing import Any

from megatron_rl.config.foreign.rules import (
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
    loggers,
    only,
    positive,
    product,
    ratio,
    to,
)


def _batch(_: Any, values: Values) -> dict[str, Any]:
    """Groups of a batch; TRL counts completions, of each process unless it gives the whole."""
    size, whole = values["num_generations"], values.get("generation_batch_size")
    steps = values.get("steps_per_generation") or values["gradient_accumulation_steps"]
    per_process = product(values["per_device_train_batch_size"], steps)
    if whole:
        return {"train.prompts_per_batch": ratio(whole, size, "train.prompts_per_batch")}
    if per_process % size:
        raise NoCounterpart(
            f"{per_process} completions of each process are {per_process / size:g} groups of "
            f"{size}: set train.prompts_per_batch to that times the number of processes"
        )
    return {"train.prompts_per_batch": per_process // size}


def _minibatches(value: int, values: Values) -> dict[str, Any]:
    accumulated = values["gradient_accumulation_steps"]
    count = ratio(value, accumulated, "train.minibatches")
    return {"train.minibatches": count, **_batch(value, values)}


def _steps(value: int, values: Values) -> dict[str, Any]:
    """An optimizer step there; a batch here."""
    return {"train.steps": _batches(value, values)} if value > 0 else NOTHING


def _batches(updates: int, values: Values) -> int:
    """Batches that a number of optimizer steps makes; the last may have fewer."""
    steps = values.get("steps_per_generation") or values["gradient_accumulation_steps"]
    each = ratio(steps, values["gradient_accumulation_steps"], "train.minibatches")
    return -(-updates // each)


def _warmup(value: float, values: Values) -> dict[str, Any]:
    if not value or values["warmup_steps"]:
        return NOTHING
    steps = values.get("max_steps", -1)
    if steps <= 0:
        raise NoCounterpart("a share of max_steps: give the steps as optimizer.warmup_steps")
    return {"optimizer.warmup_steps": math.ceil(value * steps)}


def _epochs(value: float, values: Values) -> dict[str, Any]:
    if values.get("max_steps", -1) > 0:
        raise NoCounterpart("no effect with max_steps")
    if value != int(value):
        raise NoCounterpart("train.epochs is a whole number: set train.steps")
    return {"train.epochs": int(value)}


def _context(_: Any, values: Values) -> dict[str, Any]:
    new = values["max_completion_length"]
    prompt = values.get("max_prompt_length")
    longest = values.get("vllm_max_model_length") or (prompt + new if prompt else None)
    context = {"generator.context_tokens": longest} if longest else {}
    return {"sampling.max_new_tokens": new, **context}


def _beta(value: float, _: Values) -> dict[str, Any]:
    if not value:
        return {"algorithm.kl.placement": "none", "algorithm.reference.policy": "none"}
    return {"algorithm.kl.placement": "loss", "algorithm.kl.estimator": "forward_kl",
            "algorithm.kl.coefficient": value}  # fmt: skip


def _epsilon(value: float, values: Values) -> dict[str, Any]:
    high = values.get("epsilon_high")
    return {
        "algorithm.policy_loss.eps_low": value,
        "algorithm.policy_loss.eps_high": value if high is None else high,
    }


def _loss(value: Any, _: Values) -> dict[str, Any]:
    names = {"grpo": "sequence_mean", "dapo": "batch_tokens", "bnpo": "batch_tokens",
             "dr_grpo": "sequence_sum"}  # fmt: skip
    if value == "cispo":
        return {"algorithm.preset": "cispo"}
    if value not in names:
        raise NoCounterpart("`megatron-rl algorithms` lists the policy losses")
    return {"algorithm.preset": "grpo", "algorithm.aggregation.name": names[value]}


def _every(key: str, strategy: str, usual: str) -> Convert:
    """A number of steps, which counts with the strategy "steps"."""

    def rule(value: Any, values: Values) -> dict[str, Any]:
        if values.get(strategy, usual) != "steps":
            raise NoCounterpart(f"no effect without {strategy} steps; {key} is a number of steps")
        return {key: _batches(value, values)}

    return rule


_FORMATS = ("parquet", "json", "arrow", "csv")
"""Names by which load_dataset reads files."""


def _data(section: str) -> dict[str, Rule]:
    """Arguments of load_dataset for train_dataset or eval_dataset."""

    def put(key: str) -> Convert:
        def rule(value: Any, _: Values) -> dict[str, Any]:
            values = value if isinstance(value, list) else [value]
            if section == "train_dataset":
                return {"prompts": [{key: one} for one in values]}
            return {"eval.sets": [{"name": "validation", "prompts": {key: values[0]}}]}

        return rule

    def path(value: Any, values: Values) -> dict[str, Any]:
        return NOTHING if value in _FORMATS else put("path")(value, values)

    def files(value: Any, values: Values) -> dict[str, Any]:
        if isinstance(value, dict):
            split = str(values.get(f"{section}.split", "train")).partition("[")[0]
            if split not in value:
                raise NoCounterpart(f"no file of the split {split}: write prompts.path")
            value = value[split]
        if values.get(f"{section}.path") not in _FORMATS:
            raise NoCounterpart("one file of a data set: write its path as prompts.path")
        return put("path")(value, values)

    def split(value: Any, values: Values) -> dict[str, Any]:
        if "[" in str(value) or "+" in str(value):
            raise NoCounterpart(
                "parts of splits: prompts.where chooses rows; dataset_split a split"
            )
        if values.get(f"{section}.path") in _FORMATS:
            return NOTHING
        return put("dataset_split")(value, values)

    why = "map and filter are not run: prompts.template, prompts.columns and prompts.where do this"
    return {
        f"{section}.path": path, f"{section}.data_files": files, f"{section}.split": split,
        f"{section}.name": put("subset"), f"{section}.revision": put("revision"),
        f"{section}.shuffle(...)": lambda value, values: NOTHING,
        f"{section}.*": why,
        section: "write its file, or its name on the Hub, as prompts.path",
    }  # fmt: skip


_ENGINE = "vLLM there; SGLang generates here: generator.extra_args takes its options"
_REWARD = "functions there; here [reward.tasks] and [[reward.extra]], see docs/extending.md"
_HUB = "`megatron-rl convert` and RUN/final hold models of Hugging Face's form"

RULES: dict[str, Rule] = {
    "model": to("model.path"),
    "model_name_or_path": to("model.path"),
    "model_revision": to("model.revision"),
    **_data("train_dataset"),
    **_data("eval_dataset"),
    "num_generations": to("train.group_size"),
    "per_device_train_batch_size": _batch,
    "gradient_accumulation_steps": _batch,
    "generation_batch_size": _batch,
    "steps_per_generation": _minibatches,
    "num_iterations": only(1, "each group is trained on once; replay.buffer_groups repeats them"),
    "max_steps": _steps,
    "num_train_epochs": _epochs,
    "max_completion_length": _context,
    "max_prompt_length": _context,
    "vllm_max_model_length": _context,
    "temperature": to("sampling.temperature"),
    "top_p": to("sampling.top_p"),
    "top_k": to("sampling.top_k", positive),
    "min_p": to("sampling.min_p"),
    "repetition_penalty": only(1.0, "it would change the logprobs of completions"),
    "beta": _beta,
    "epsilon": _epsilon,
    "epsilon_high": to("algorithm.policy_loss.eps_high"),
    "delta": to("algorithm.policy_loss.dual_clip"),
    "loss_type": _loss,
    "scale_rewards": choice(
        "algorithm.normalization.name",
        {True: "group", "group": "group", False: "none", "none": "none", "batch": "minibatch"},
        "algorithm.normalization is group, minibatch or none",
    ),
    "importance_sampling_level": choice(
        "algorithm.policy_loss.level", {"token": "token", "sequence": "sequence"},
        "algorithm.policy_loss.level is token or sequence",
    ),
    "mask_truncated_completions": only(False, "completions at the limit count, with their reward"),
    "vllm_importance_sampling_correction": choice(
        "algorithm.correction.name", {True: "truncated", False: "none"}, "true or false"
    ),
    "vllm_importance_sampling_cap": to("algorithm.correction.high"),
    "learning_rate": to("optimizer.lr"),
    "lr_scheduler_type": choice(
        "optimizer.lr_schedule",
        SCHEDULES | {"constant_with_warmup": "constant"},
        SCHEDULE,
    ),
    "warmup_steps": to("optimizer.warmup_steps"),
    "warmup_ratio": _warmup,
    "weight_decay": to("optimizer.weight_decay"),
    "adam_beta1": to("optimizer.beta1"),
    "adam_beta2": to("optimizer.beta2"),
    "max_grad_norm": to("optimizer.clip_grad_norm"),
    "optim": "AdamW with float32 masters trains here",
    "bf16": only(True, "model.dtype is bfloat16, or float32"),
    "fp16": only(False, "model.dtype is bfloat16, or float32"),
    "torch_dtype": to("model.dtype"),
    "dtype": to("model.dtype"),
    "gradient_checkpointing": to("model.recompute", lambda value: "full" if value else "none"),
    "seed": to("run.seed"),
    "output_dir": to("run.dir"),
    "run_name": to("metrics.wandb_name"),
    "report_to": loggers,
    "save_steps": _every("checkpoint.every_steps", "save_strategy", "steps"),
    "save_total_limit": to("checkpoint.keep_last"),
    "save_strategy": choice(
        "checkpoint.every_steps", {"no": 0, "steps": None}, "checkpoint.every_steps is in steps"
    ),
    "save_*": "checkpoint.every_steps and checkpoint.keep_last say when and how many",
    "eval_steps": _every("eval.every_steps", "eval_strategy", "no"),
    "eval_strategy": choice(
        "eval.every_steps", {"no": 0, "steps": None}, "eval.every_steps is a number of steps"
    ),
    "num_generations_eval": to("eval.samples"),
    "resume_from_checkpoint": "a run resumes by itself; checkpoint.resume chooses",
    "chat_template_kwargs": to("render.chat_template_kwargs"),
    "chat_template_path": to("render.chat_template"),
    "system_prompt": to("render.system_prompt"),
    "vllm_mode": lambda value, _: (
        {"generator.colocate": True, "weights.method": "host"} if value == "colocate" else NOTHING
    ),
    "vllm_tensor_parallel_size": to("generator.tensor_parallel"),
    "vllm_gpu_memory_utilization": MEMORY,
    "vllm_*": _ENGINE,
    "use_vllm": _ENGINE,
    "generation_kwargs": "[sampling] has the settings; sampling.stop the texts that end it",
    "reward_funcs": _REWARD,
    "reward_weights": "reward.extra.weight",
    "reward_*": _REWARD,
    "processing_class": "the model's folder has the tokenizer",
    "callbacks": "RUN/metrics.jsonl has the metrics",
    "peft_config": LORA,
    "use_peft": only(False, LORA),
    "lora_*": LORA,
    "dataset_name": lambda value, _: {"prompts": [{"path": value}]},
    "dataset_config": lambda value, _: {"prompts": [{"subset": value}]} if value else NOTHING,
    "dataset_train_split": lambda value, _: {"prompts": [{"dataset_split": value}]},
    "dataset_test_split": "a second [[eval.sets]] with prompts.dataset_split",
    "datasets": "one [[prompts]] for each data set",
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
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "adam_beta2": 0.999,
    "save_steps": 500,
}


def checks(values: Values) -> list[str]:
    """What a reader of our file must decide."""
    found = ["parallel.data, generator.replicas: TRL's launcher (accelerate) says how many GPUs"]
    if "generation_batch_size" not in values:
        found.append(
            "train.prompts_per_batch: per_device_train_batch_size * gradient_accumulation_steps "
            "(or steps_per_generation) / num_generations is the batch of one process; multiply it "
            "by the number of processes, which the file does not tell"
        )
    return found
