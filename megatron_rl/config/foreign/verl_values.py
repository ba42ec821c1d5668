"""Converts values of verl to ours. Used by the table in `verl.py`."""

from typing import Any

from megatron_rl.config.foreign.rules import (
    COLOCATED,
    NOTHING,
    NoCounterpart,
    Rule,
    Values,
    lengths,
    needs,
    positive,
    product,
    ratio,
    set_name,
    to,
    unknown_warmup,
)

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MEGATRON = f"{ACTOR}.megatron"
PROMPTS = "rollout.total_rollout_steps"
_ASYNC = "async_training"
_TEMPLATE = "data.apply_chat_template_kwargs."


def context(_: Any, values: Values) -> dict[str, Any]:
    return lengths(values["data.max_response_length"], values["data.max_prompt_length"])


def prompt(value: Any, values: Values) -> dict[str, Any]:
    return {"generator.context_tokens": value + values["data.max_response_length"]}


def _paths(value: Any) -> list[str]:
    return [str(path) for path in (value if isinstance(value, list) else [value])]


def sources(value: Any, values: Values) -> dict[str, Any]:
    # The prompts of val_files are held out instead.
    share = {"held_out_share": 0.0} if values.get("data.val_files") else {}
    return {"prompts": [{"path": path, **share} for path in _paths(value)]}


def template_kwargs(_: Any, values: Values) -> dict[str, Any]:
    """All of them, whichever of them is asked for."""
    given = {k.removeprefix(_TEMPLATE): v for k, v in values.items() if k.startswith(_TEMPLATE)}
    return {"render.chat_template_kwargs": given}


def prompt_key(value: Any, values: Values) -> dict[str, Any]:
    """The column of questions, in the files of training and of validation."""
    if value == "prompt":
        return NOTHING
    own = {"columns": {"question": value}}
    found = {"prompts": [own] * len(_paths(values["data.train_files"]))}
    if validated := values.get("data.val_files"):
        found["eval.sets"] = [{"prompts": own}] * len(_paths(validated))
    return found


def sets(value: Any, _: Values) -> dict[str, Any]:
    return {"eval.sets": [{"name": set_name(p), "prompts": {"path": p}} for p in _paths(value)]}


def batch(_: Any, values: Values) -> dict[str, Any]:
    return {"train.prompts_per_batch": _batch(values)}


def _batch(values: Values) -> int:
    """Prompts of a batch. Fully asynchronous scripts give 0, and count in minibatches."""
    minibatch, count = (
        values[f"{ACTOR}.ppo_mini_batch_size"],
        values.get(f"{_ASYNC}.require_batches"),
    )
    return values["data.train_batch_size"] or product(minibatch, count or 1)


def minibatches(_: Any, values: Values) -> dict[str, Any]:
    whole = _batch(values)
    # verl cuts a minibatch that exceeds the batch.
    size = min(values[f"{ACTOR}.ppo_mini_batch_size"], whole)
    return {"train.minibatches": ratio(whole, size, "train.minibatches")}


def steps(value: int, values: Values) -> dict[str, Any]:
    return {"train.steps": value // _batch(values)}


def eval_every(value: int, values: Values) -> dict[str, Any]:
    """Fully asynchronous scripts count weight syncs."""
    syncs = values.get(f"{_ASYNC}.trigger_parameter_sync_step") or 1
    return {"eval.every_steps": product(positive(value), syncs)}


def micro(value: int, values: Values) -> dict[str, Any]:
    if values.get(f"{ACTOR}.use_dynamic_bsz"):
        raise NoCounterpart("no effect with use_dynamic_bsz: ppo_max_token_len_per_gpu counts")
    longest = values["data.max_prompt_length"] + values["data.max_response_length"]
    return {"train.microbatch_tokens": product(value, longest)}


def tokens(value: int, values: Values) -> dict[str, Any]:
    # A microbatch is shared by the context ranks.
    keys = (f"{ACTOR}.ulysses_sequence_parallel_size", f"{MEGATRON}.context_parallel_size")
    return {"train.microbatch_tokens": product(value, *(values.get(key) or 1 for key in keys))}


def _updates(values: Values) -> int:
    """Optimizer steps of a batch. verl's schedule counts batches, ours optimizer steps."""
    whole = _batch(values)
    return -(-whole // min(values[f"{ACTOR}.ppo_mini_batch_size"], whole))


def warmup_steps(value: int, values: Values) -> dict[str, Any]:
    if value <= 0 and values.get(f"{ACTOR}.optim.lr_warmup_steps_ratio"):
        return NOTHING
    return {"optimizer.warmup_steps": product(positive(value), _updates(values))}


def warmup(value: float, values: Values) -> dict[str, Any]:
    if not value:
        return NOTHING
    if values[f"{ACTOR}.optim.lr_warmup_steps"] > 0:
        raise NoCounterpart("no effect with lr_warmup_steps")
    count, prompts = values.get("trainer.total_training_steps"), values.get(PROMPTS)
    count = count or (prompts and prompts // _batch(values))
    if not count:
        return unknown_warmup(value)
    return {"optimizer.warmup_steps": int(value * count * _updates(values))}


def overlong(prefix: str) -> dict[str, Rule]:
    """The penalty of long completions, whose keys have moved from release to release."""
    enable, length = f"{prefix}.enable", f"{prefix}.len"
    margin = needs(enable, lambda _, values: {"reward.length_margin_tokens": values[length]})
    return {
        length: margin,
        enable: lambda value, values: margin(value, values) if value else NOTHING,
        f"{prefix}.penalty_factor": needs(enable, to("reward.length")),
        f"{prefix}.*": "RUN/metrics.jsonl has the penalty",
    }


def gpus(_: Any, values: Values) -> dict[str, Any]:
    """verl's engines run on the trainer's GPUs, unless they generate while it trains."""
    gpus = product(values["trainer.n_gpus_per_node"], values["trainer.nnodes"])
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    keys = [f"{ACTOR}.ulysses_sequence_parallel_size", *(f"{MEGATRON}.{size}" for size in sizes)]
    ranks = product(*(values.get(key) or 1 for key in keys))
    engine = values[f"{ROLLOUT}.tensor_model_parallel_size"]
    data = ratio(gpus, ranks, "parallel.data")
    if apart := values.get("rollout.n_gpus_per_node"):
        # In fully_async scripts the engines have separate GPUs.
        apart = product(apart, values.get("rollout.nnodes", 1))
        replicas = ratio(apart, engine, "generator.replicas")
        return {"parallel.data": data, "generator.replicas": replicas}
    replicas = ratio(gpus, engine, "generator.replicas")
    return {"parallel.data": data, "generator.replicas": replicas, **COLOCATED}


def epochs(value: int, values: Values) -> dict[str, Any]:
    if values.get("trainer.total_training_steps"):
        raise NoCounterpart("no effect with total_training_steps")
    if values.get(PROMPTS):
        raise NoCounterpart("the fewer of its prompts and of total_rollout_steps count there")
    return {"train.epochs": value}


def greedy(value: Any, values: Values) -> dict[str, Any]:
    return {"eval.temperature": values[f"{ROLLOUT}.val_kwargs.temperature"] if value else 0.0}
