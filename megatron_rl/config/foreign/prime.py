"""Keys of prime-rl (TOML of rl, trainer, orchestrator and inference)."""

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
    offload,
    only,
    ratio,
    to,
)


def _size(values: Values) -> int | None:
    given = (values.get(k) for k in ("rollouts_per_example", "group_size", "rollouts_per_prompt"))
    return next((size for size in given if size), None)


def _batch(value: int, values: Values) -> dict[str, Any]:
    """prime-rl counts completions; ours are groups."""
    size = _size(values)
    if size is None:
        raise NoCounterpart(
            "completions, without rollouts_per_example: set train.prompts_per_batch"
        )
    return {"train.prompts_per_batch": ratio(value, size, "train.prompts_per_batch")}


def _length(value: int, values: Values) -> dict[str, Any]:
    return {"generator.context_tokens": value, "train.microbatch_tokens": value}


def _gpus(key: str) -> Rule:
    def rule(value: Any, values: Values) -> dict[str, Any]:
        count = len(value) if isinstance(value, list) else value
        if key == "generator.replicas":
            count = ratio(count, values.get("parallel.tp") or 1, key)
        else:
            count = ratio(count, values.get("model.cp") or 1, key)
        return {key: count}

    return rule


_DATA = {
    "dataset_name": "path",
    "dataset_subset": "subset",
    "dataset_split": "dataset_split",
    "question_key": "columns.question",
    "answer_key": "columns.answer",
}
"""Arguments of environments with a data set of the Hub -> keys of [[prompts]]."""


_MAX_ENVIRONMENTS = 32
"""Further environments are named without being taken."""


def _prompts(_: Any, values: Values) -> dict[str, Any]:
    """A source for each environment that names its data set, in their order."""
    found: list[dict[str, Any]] = []
    for number in range(_MAX_ENVIRONMENTS):
        prefix = f"env.{number}.args."
        if values.get(f"{prefix}dataset_name") is None:
            continue
        source: dict[str, Any] = {}
        for name, ours in _DATA.items():
            if (value := values.get(prefix + name)) is not None:
                section, _, last = ours.rpartition(".")
                (source.setdefault(section, {}) if section else source)[last] = value
        found.append(source)
    return {"prompts": found}


def _argument(number: int) -> Rule:
    """The rule of an argument, which has an effect where its environment names a data set."""

    def rule(value: Any, values: Values) -> dict[str, Any]:
        if values.get(f"env.{number}.args.dataset_name") is None:
            raise NoCounterpart(_ENVIRONMENT)
        return _prompts(value, values)

    return rule


_ENVIRONMENT = (
    "environments of verifiers do not run here: write [[prompts]] with their data set, and "
    "[reward.tasks] where an answer is judged in another way; kind reasoning_gym makes its tasks"
)
_LOSS = "algorithm.preset names the objective: icepop, aipo, grpo, ...; `megatron-rl algorithms`"

RULES: dict[str, Rule] = {
    "model": to("model.path"),
    "model.name": to("model.path"),
    "model.seq_len": to("train.microbatch_tokens"),
    "model.max_model_len": to("generator.context_tokens"),
    "model.cp": to("parallel.context"),
    "model.ep": to("parallel.expert"),
    "model.ac.*": lambda value, values: {"model.recompute": "full"},
    "model.ac": lambda value, values: {"model.recompute": "full"} if value else NOTHING,
    "model.optim_cpu_offload": offload,
    "model.lora*": LORA,
    "model.experimental.lora*": LORA,
    **each("model.", "attn compile compile.* trust_remote_code impl load_using_meta fsdp_* tp "
        "reshard_after_forward dp_replicate enforce_eager dtype optimization_dtype reduce_dtype "
        "moe_* debug.* conversation tool_call_parser enable_auto_tool_choice", SPEED),
    "max_steps": to("train.steps"),
    "seq_len": _length,
    "batch_size": _batch,
    "rollouts_per_example": to("train.group_size"),
    "rollouts_per_prompt": to("train.group_size"),
    "group_size": to("train.group_size"),
    "max_async_level": to("queue.max_staleness"),
    "max_off_policy_steps": to("queue.max_staleness"),
    "strict_async_level": to("queue.strict_staleness"),
    "oversampling_factor": "the queue asks for further groups by itself",
    "max_concurrent": to("generator.max_running"),
    "seed": to("run.seed"),
    "output_dir": to("run.dir"),
    "optim.lr": to("optimizer.lr"),
    "optim.weight_decay": to("optimizer.weight_decay"),
    "optim.max_norm": to("optimizer.clip_grad_norm"),
    "optim.betas1": to("optimizer.beta1"),
    "optim.betas2": to("optimizer.beta2"),
    "optim.type": only("adamw", "AdamW trains here"),
    "scheduler.type": choice(
        "optimizer.lr_schedule", SCHEDULES, SCHEDULE
    ),
    "scheduler.warmup_steps": to("optimizer.warmup_steps"),
    "scheduler.*": "optimizer.lr_schedule and optimizer.min_lr_ratio",
    "sampling.max_tokens": to("sampling.max_new_tokens"),
    "sampling.max_completion_tokens": to("sampling.max_new_tokens"),
    "sampling.temperature": to("sampling.temperature"),
    "sampling.top_p": to("sampling.top_p"),
    "sampling.top_k": to("sampling.top_k", lambda value: max(0, value)),
    "sampling.min_p": to("sampling.min_p"),
    "sampling.seed": "run.seed seeds everything here",
    "sampling.repetition_penalty": only(1.0, "it would change the logprobs of completions"),
    "sampling.min_tokens": only(0, "it would change the logprobs of completions"),
    "sampling.*": "[sampling] has the settings",
    **{
        f"env.{number}.args.{name}": _argument(number)
        for number in range(_MAX_ENVIRONMENTS)
        for name in _DATA
    },
    "env.*": _ENVIRONMENT,
    "environment.*": _ENVIRONMENT,
    "eval.interval": to("eval.every_steps"),
    "eval.rollouts_per_example*": to("eval.samples", lambda v: v[0] if isinstance(v, list) else v),
    "eval.sampling.temperature": to("eval.temperature"),
    "eval.sampling.max_tokens": to("eval.max_new_tokens"),
    "eval.*": "[[eval.sets]] names the prompts of an evaluation",
    "ckpt.interval": to("checkpoint.every_steps"),
    "ckpt.keep": to("checkpoint.keep_last"),
    "ckpt.keep_last": to("checkpoint.keep_last"),
    "ckpt.resume_step": only(-1, "a run resumes by itself; checkpoint.resume chooses"),
    "ckpt*": "[checkpoint] says when and how many",
    "weights*": "checkpoint.export_every_steps exports models",
    "weight_broadcast.*": "weights.method",
    "wandb.project": to("metrics.wandb_project"),
    "wandb.name": to("metrics.wandb_name"),
    "wandb.*": "metrics.wandb*",
    "parallel.tp": to("generator.tensor_parallel"),
    "parallel.dp": to("generator.replicas"),
    "deployment.num_train_gpus": _gpus("parallel.data"),
    "deployment.num_infer_gpus": _gpus("generator.replicas"),
    "trainer_gpu_ids": _gpus("parallel.data"),
    "inference_gpu_ids": _gpus("generator.replicas"),
    "gpu_memory_utilization": MEMORY,
    "enable_router_replay": to("train.router_replay"),
    "loss*": _LOSS,
    "advantage*": _LOSS,
    "algorithms*": _LOSS,
    "buffer.*": "the queue drops zero-variance groups; [curriculum] chooses by pass rate",
    "log.*": "each process writes its log to RUN/logs",
    "server.*": "the launcher chooses addresses; [expert.ports] fixes them",
    "client.*": "the launcher chooses addresses; [expert.ports] fixes them",
    "bench*": SPEED,
    "profile*": "train.profile_steps records steps here",
    "vllm_extra*": "generator.extra_args takes SGLang's options",
}  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "optim.lr": 1e-6,
    "optim.weight_decay": 0.01,
    "optim.max_norm": 1.0,
    "optim.betas1": 0.9,
    "optim.betas2": 0.999,
    "sampling.temperature": 1.0,
    "max_off_policy_steps": 8,
}


def checks(values: Values) -> list[str]:
    """What a reader of our file must decide."""
    found = [_LOSS]
    if _size(values) is None:
        found.append("train.group_size: not given; prime-rl samples 1 completion of each prompt")
    if "seq_len" not in values:
        found.append("generator.context_tokens: seq_len is not given; prime-rl takes 2048")
    return found
