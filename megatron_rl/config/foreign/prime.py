"""Keys of prime-rl (TOML of rl, trainer, orchestrator and inference)."""

import re
from collections.abc import Container
from functools import partial
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
    each,
    offload,
    only,
    ratio,
    set_name,
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
    """The longest sequence; microbatches are as long unless the trainer's are longer."""
    return {
        "generator.context_tokens": value,
        "train.microbatch_tokens": values.get("model.seq_len", value),
    }


def _gpus(value: Any, values: Values, *, of: str, nodes: int = 1) -> dict[str, Any]:
    """Ranks of the trainer (of "parallel.data"), or engines, on a number of GPUs."""
    count = len(value) if isinstance(value, list) else value * nodes
    tensor = values.get("parallel.tp") or values.get("vllm.tensor_parallel_size") or 1
    each_takes = tensor if of == "generator.replicas" else values.get("model.cp") or 1
    return {of: ratio(count, each_takes, of)}


def _nodes(of: str) -> Rule:
    def rule(value: int, values: Values) -> dict[str, Any]:
        nodes = values.get("deployment.gpus_per_node", 8)
        if of == "generator.replicas":
            nodes *= values.get("deployment.num_infer_replicas", 1)
        return _gpus(value, values, of=of, nodes=nodes)

    return rule


def _schedule(value: str, values: Values) -> dict[str, Any]:
    """linear falls at the end alone there, in decay_steps; constant has no warm-up."""
    if value not in SCHEDULES:
        raise NoCounterpart(SCHEDULE)
    if value == "constant":
        return {"optimizer.lr_schedule": value, "optimizer.warmup_steps": 0}
    warmup = values.get("scheduler.warmup_steps", 10)
    falls = values.get("scheduler.decay_steps", 10)
    if _is_cut_short(value, values):
        raise NoCounterpart(
            f"constant, then a fall over the last {falls} steps; here a linear schedule falls from "
            "the warm-up to the end"
        )
    return {
        "optimizer.lr_schedule": value, "optimizer.warmup_steps": warmup,
        "optimizer.min_lr_ratio": values.get("scheduler.min_lr", 0.0) / values["optim.lr"],
    }  # fmt: skip


def _is_cut_short(kind: str, values: Values) -> bool:
    """Whether the rate falls linearly, and not from the end of the warm-up on."""
    falls = values.get("scheduler.decay_steps", 10) + values.get("scheduler.warmup_steps", 10)
    return kind == "linear" and falls != values.get("max_steps")


def _warmup(value: int, values: Values) -> dict[str, Any]:
    if _is_cut_short(values.get("scheduler.type", "constant"), values):
        return {"optimizer.lr_schedule": "constant", "optimizer.warmup_steps": value}
    return _of_schedule(value, values)


def _of_schedule(value: Any, values: Values) -> dict[str, Any]:
    kind = values.get("scheduler.type", "constant")
    if kind == "constant":
        raise NoCounterpart("no effect without a scheduler.type")
    return _schedule(kind, values)


def _wandb(key: str) -> Rule:
    """A key of a table that switches Weights & Biases on by being there."""

    def rule(value: Any, values: Values) -> dict[str, Any]:
        mode = "offline" if values.get("wandb.offline") else "online"
        return {"metrics.wandb": mode, **({key: value} if key else {})}

    return rule


def _algorithm(value: Any, values: Values) -> dict[str, Any]:
    """Their grpo subtracts the group's mean; tokens of the batch weigh the same."""
    prefixes = ("algorithms.", "advantage", "algo.", "algorithm.")
    others = [key for key in values if key.startswith(prefixes) and values[key] != value]
    if value not in ("grpo", ["grpo"]) or others:
        raise NoCounterpart(_LOSS)
    return {
        "algorithm.advantage_estimator.name": "group_mean",
        "algorithm.normalization.name": "none",
        "algorithm.aggregation.name": "batch_tokens",
    }


_DATA = {
    "args.dataset_name": "path",
    "args.dataset_subset": "subset",
    "args.dataset_split": "dataset_split",
    "args.question_key": "columns.question",
    "args.answer_key": "columns.answer",
    "ratio": "weight",
}
"""Keys of an environment with a data set of the Hub -> keys of [[prompts]]."""


_MAX_ENVIRONMENTS = 32
"""Further environments are named without being taken."""


def _of_environment(prefix: str, number: int, name: str) -> Rule:
    """The rule of an argument, which has an effect where its environment names a data set.

    prefix: "", or "eval." of an evaluation.
    """

    def rule(value: Any, values: Values) -> dict[str, Any]:
        known = [f"{prefix}env.{n}.args.dataset_name" in values for n in range(number + 1)]
        if not known[number]:
            raise NoCounterpart(_ENVIRONMENT)
        place = sum(known[:number])
        if not prefix:
            return {f"prompts.{place}.{_DATA[name]}": value}
        if name == "ratio":
            raise NoCounterpart("evaluations have no mixture")
        found = {f"eval.sets.{place}.prompts.{_DATA[name]}": value}
        if name == "args.dataset_name":
            called = values.get(f"eval.env.{number}.name")
            found[f"eval.sets.{place}.name"] = set_name(called or value)
        return found

    return rule


def plain(key: str) -> str:
    """The key in the table of a key of a file: without its file, its process and newer tables."""
    key = key.rpartition(": ")[2]
    if key.startswith("orchestrator.optim."):
        return key
    for prefix in ("trainer.", "orchestrator.", "inference.", "train.", "monitors."):
        key = key.removeprefix(prefix)
    # Newer releases: [[source]] with env.taskset.KEY; older ones: [[env]] with args.KEY.
    key = re.sub(r"^(eval\.)?source\.", r"\1env.", key)
    key = re.sub(r"^((?:eval\.)?env\.\d+\.)env\.", r"\1", key)
    return re.sub(r"^((?:eval\.)?env\.\d+\.)taskset\.", r"\1args.", key)


_ENVIRONMENT = (
    "environments of verifiers run by VerifiersEpisode (docs/agents.md); or write [[prompts]] with "
    "their data set, and [reward.tasks] where an answer is judged in another way"
)
_LOSS = (
    "algorithm.policy_loss: prime-rl masks tokens whose probability has moved far since they were "
    "sampled; the preset icepop masks by ratio, `megatron-rl algorithms` lists others"
)

RULES: dict[str, Rule] = {
    "model": to("model.path"),
    "model.name": to("model.path"),
    "model.seq_len": to("train.microbatch_tokens"),
    "model.max_model_len": to("generator.context_tokens"),
    "model.cp": to("parallel.context"),
    "model.ep": to("parallel.expert"),
    "model.ac.mode": only("full", 'model.recompute = "selective", with model.recompute_modules'),
    **dict.fromkeys(
        ("model.ac", "model.ac.freq"), lambda value, values: {"model.recompute": "full"}
    ),
    "model.ac.targets": "model.recompute_modules",
    "model.fp8": only(False, "model.fp8 names how tensors are scaled"),
    "model.optim_cpu_offload": offload,
    "model.lora*": LORA,
    "model.experimental.lora*": LORA,
    **each("model.", "attn compile compile.* trust_remote_code impl load_using_meta fsdp_* tp "
        "reshard_after_forward dp_replicate enforce_eager dtype optimization_dtype reduce_dtype "
        "moe_* debug.* ac_offloading* ep_* deepep_* cp_style fused_lm_head* conversation "
        "tool_call_parser enable_auto_tool_choice", SPEED),
    "max_steps": to("train.steps"),
    "seq_len": _length,
    "batch_size": _batch,
    "rollouts_per_example": to("train.group_size"),
    "rollouts_per_prompt": to("train.group_size"),
    "group_size": to("train.group_size"),
    "max_async_level": to("queue.max_staleness"),
    "max_off_policy_steps": to("queue.max_staleness"),
    "strict_async_level": to("queue.strict_staleness"),
    **each("", "oversampling_factor max_inflight_rollouts concurrency.* tasks_per_minute",
        "the queue asks for further groups by itself"),
    "token_batch_size": "tokens of a batch: set train.prompts_per_batch",
    "max_concurrent": to("generator.max_running"),
    "seed": to("run.seed"),
    "output_dir": to("run.dir"),
    "optim.lr": to("optimizer.lr"),
    "optim.weight_decay": to("optimizer.weight_decay"),
    "optim.max_norm": to("optimizer.clip_grad_norm"),
    "optim.betas1": to("optimizer.beta1"),
    "optim.betas2": to("optimizer.beta2"),
    "optim.type": only("adamw", "AdamW trains here"),
    "scheduler.type": _schedule,
    "scheduler.warmup_steps": _warmup,
    **dict.fromkeys(("scheduler.decay_steps", "scheduler.min_lr"), _of_schedule),
    "scheduler.*": "optimizer.lr_schedule and optimizer.min_lr_ratio",
    "orchestrator.optim.*": "of several runs at once; trainer.optim.lr counts in one run",
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
        f"{prefix}env.{number}.{name}": _of_environment(prefix, number, name)
        for prefix in ("", "eval.")
        for number in range(_MAX_ENVIRONMENTS)
        for name in _DATA
    },
    **{
        f"env.{number}.{name}": to("train.group_size")
        for number in range(_MAX_ENVIRONMENTS)
        for name in ("group_size", "rollouts_per_example")
    },
    "env.*": _ENVIRONMENT,
    "eval.env.*": _ENVIRONMENT,
    "environment.*": _ENVIRONMENT,
    "eval.interval": to("eval.every_steps"),
    **dict.fromkeys(
        ("eval.rollouts_per_example*", "eval.group_size"),
        to("eval.samples", lambda value: value[0] if isinstance(value, list) else value),
    ),
    "eval.sampling.temperature": to("eval.temperature"),
    "eval.sampling.top_p": to("eval.top_p"),
    **dict.fromkeys(
        ("eval.sampling.max_tokens", "eval.sampling.max_completion_tokens"),
        to("eval.max_new_tokens"),
    ),
    "eval.*": "[[eval.sets]] names the prompts of an evaluation",
    "ckpt.interval": to("checkpoint.every_steps"),
    "ckpt.keep": to("checkpoint.keep_last"),
    "ckpt.keep_last": to("checkpoint.keep_last"),
    "ckpt.resume_step": only(-1, "a run resumes by itself; checkpoint.resume chooses"),
    "ckpt*": "[checkpoint] says when and how many",
    "weights*": "checkpoint.export_every_steps exports models",
    "weight_broadcast.*": "weights.method",
    "wandb": _wandb(""),
    "wandb.project": _wandb("metrics.wandb_project"),
    "wandb.name": _wandb("metrics.wandb_name"),
    "wandb.entity": _wandb("metrics.wandb_entity"),
    "wandb.group": _wandb("metrics.wandb_group"),
    "wandb.tags": _wandb("metrics.wandb_tags"),
    "wandb.offline": _wandb(""),
    "wandb.*": "metrics.wandb*",
    **dict.fromkeys(("parallel.tp", "vllm.tensor_parallel_size"), to("generator.tensor_parallel")),
    **dict.fromkeys(("parallel.dp", "vllm.data_parallel_size"), to("generator.replicas")),
    "deployment.num_train_nodes": _nodes("parallel.data"),
    "deployment.num_infer_nodes": _nodes("generator.replicas"),
    **dict.fromkeys(
        ("deployment.num_train_gpus", "trainer_gpu_ids"), partial(_gpus, of="parallel.data")
    ),
    **dict.fromkeys(
        ("deployment.num_infer_gpus", "inference_gpu_ids"), partial(_gpus, of="generator.replicas")
    ),
    "deployment.*": "parallel.data and generator.replicas say how many GPUs there are",
    **each("", "slurm slurm.*", "docs/slurm.md shows how a job starts"),
    "gpu_memory_utilization": MEMORY,
    "enable_router_replay": to("train.router_replay"),
    "loss*": _LOSS,
    "advantage*": _LOSS,
    **dict.fromkeys(("algorithms", "algorithms.0.id", "algo.type", "algorithm.type"), _algorithm),
    **each("", "algorithms* algo.* algorithm.*", _LOSS),
    **each("", "buffer.* pre_batch_filters* post_batch_filters*",
        "the queue drops zero-variance groups; [curriculum] chooses by pass rate"),
    **dict.fromkeys(("tokenizer.chat_template", "model.chat_template"), to("render.chat_template")),
    **each("", "tokenizer.* renderer renderer.*", "the tokenizer's template; [render] has options"),
    **each("", "clean_output_dir dry_run heartbeat.* metrics_server.* prime_monitor* data.* gc* "
        "matmul_precision dist_timeout_seconds rollout_transport.* env_server_base_port "
        "collect_inference_metrics pool_size max_retries experimental.* extra_env_kwargs.*",
        "a setting of their processes"),
    "log.*": "each process writes its log to RUN/logs",
    "server.*": "the launcher chooses addresses; [expert.ports] fixes them",
    "client.*": "the launcher chooses addresses; [expert.ports] fixes them",
    "bench*": SPEED,
    "profile*": "train.profile_steps records steps here",
    **each("", "vllm_extra* vllm.* enable_prefix_caching seed_* kv_cache_offload* use_deep_gemm "
        "enable_expert_parallel enable_eplb enable_dbo all2all_backend api_server_count "
        "enable_return_routed_experts", "generator.extra_args takes SGLang's options"),
    "inference": lambda value, values: NOTHING,
    "enable_lora": only(False, LORA),
}  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "model.name": "Qwen/Qwen3-0.6B",
    "batch_size": 128,
    "optim.lr": 1e-6,
    "optim.weight_decay": 0.01,
    "optim.max_norm": 1.0,
    "optim.betas1": 0.9,
    "optim.betas2": 0.999,
    "scheduler.type": "constant",
    "sampling.temperature": 1.0,
    "max_off_policy_steps": 8,
    "seq_len": 2048,
    "algorithms": "grpo",
}


def checks(values: Values, given: Container[str]) -> list[str]:
    """What a reader of our file must decide. given: our keys that it gives."""
    found = [_LOSS]
    if _size(values) is None:
        found.append("train.group_size: not given; older releases sample 1 completion")
    if "max_steps" not in values:
        found.append("train.steps: not given; prime-rl trains until it is stopped")
    if not values.keys() & {"sampling.max_tokens", "sampling.max_completion_tokens"}:
        found.append(
            "sampling.max_new_tokens: not given, and 1024 here; prime-rl generates until seq_len, "
            "which counts the prompt too"
        )
    data = [key for key in values if key.endswith(".dataset_name") and key.startswith("env.")]
    if len(data) > 1 and not any(key.endswith(".ratio") for key in values):
        found.append("prompts.weight: without ratio each prompt counts there, each source here")
    return found
