"""Keys of TRL that count batches and optimizer steps. Used by the table in `trl.py`."""

from typing import Any

from megatron_rl.config.foreign.rules import (
    NOTHING,
    Convert,
    NoCounterpart,
    Values,
    product,
    ratio,
)


def batch(_: Any, values: Values) -> dict[str, Any]:
    """Groups of a batch; TRL counts completions, of each process unless it gives the whole."""
    size, whole = values["num_generations"], values.get("generation_batch_size")
    if whole:
        return {"train.prompts_per_batch": ratio(whole, size, "train.prompts_per_batch")}
    microbatches = values.get("steps_per_generation") or values["gradient_accumulation_steps"]
    per_process = product(values["per_device_train_batch_size"], microbatches, _processes(values))
    if per_process % size:
        raise NoCounterpart(
            f"{per_process} completions of each process are {per_process / size:g} groups of "
            f"{size}: set train.prompts_per_batch to that times the number of processes"
        )
    return {"train.prompts_per_batch": per_process // size}


def _processes(values: Values) -> int:
    return values.get("num_processes") or 1


def minibatches(_: Any, values: Values) -> dict[str, Any]:
    """Groups and optimizer steps of a batch."""
    return {"train.minibatches": _updates(values), **batch(_, values)}


def _updates(values: Values) -> int:
    """Optimizer steps of a batch."""
    accumulated = values["gradient_accumulation_steps"]
    if whole := values.get("generation_batch_size"):
        each = product(values["per_device_train_batch_size"], accumulated, _processes(values))
        return ratio(whole, each, "train.minibatches")
    microbatches = values.get("steps_per_generation") or accumulated
    return ratio(microbatches, accumulated, "train.minibatches")


def steps(value: int, values: Values) -> dict[str, Any]:
    """An optimizer step there; a batch here."""
    return {"train.steps": _batches(value, values)} if value > 0 else NOTHING


def _batches(updates: int, values: Values) -> int:
    """Batches that a number of optimizer steps makes; the last may have fewer."""
    return -(-updates // _updates(values))


def every(key: str, strategy: str, usual: str) -> Convert:
    """A number of steps, which counts with the strategy "steps"."""

    def rule(value: Any, values: Values) -> dict[str, Any]:
        if values.get(strategy, usual) != "steps":
            raise NoCounterpart(f"no effect without {strategy} steps; {key} is a number of steps")
        if value < 1:
            raise NoCounterpart(f"a share of all steps: {key} is a number of steps")
        return {key: _batches(value, values)}

    return rule


def check(values: Values) -> str:
    """What the number of processes changes, where the file does not tell it."""
    if values.get("generation_batch_size"):
        return (
            "train.minibatches: on one process; divide it by the number of processes, which the "
            "file does not tell, and multiply train.steps, checkpoint.every_steps and "
            "eval.every_steps by that number"
        )
    return (
        "train.prompts_per_batch: per_device_train_batch_size * gradient_accumulation_steps "
        "(or steps_per_generation) / num_generations is the batch of one process; multiply it "
        "by the number of processes, which the file does not tell"
    )
