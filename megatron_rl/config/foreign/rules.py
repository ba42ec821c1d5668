"""Rules for keys of other systems: ours and how to convert the value, or why there is none.

Used by the tables in this folder. A rule is a text (no counterpart: why, and what to do) or a
function of the value and of all values of the file that returns ours, by key.
"""

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any, NoReturn

Values = Mapping[str, Any]
Convert = Callable[[Any, Values], dict[str, Any]]
Rule = str | Convert
NOTHING: dict[str, Any] = {}
"""What a run here does anyway."""

SPEED = "speed or memory of their processes; `megatron-rl plan` tells what fits here"
MEMORY = 'generator.kv_tokens "auto" takes the memory that weights leave'
LORA = "all weights are trained here"
ENVIRONMENT = (
    "turns and tools are an environment here, reward.tasks.NAME.environment (docs/moving.md, "
    "docs/agents.md)"
)
# Engines on the trainer's GPUs free their memory while it works.
COLOCATED = {
    "generator.colocate": True, "generator.release_memory": True,
    "weights.method": "folder", "weights.kv_cache": "recompute",
}  # fmt: skip
SCHEDULE = "optimizer.lr_schedule is constant, linear or cosine"
SCHEDULES = {name: name for name in ("constant", "linear", "cosine")}


class NoCounterpart(ValueError):
    """A value that nothing here corresponds to; the text says why, and what to do."""


class Refused(NoCounterpart):
    """A value without which a run would train another objective: the import fails."""


class Nearest(dict[str, Any]):
    """Values of ours, by key, that come nearest to theirs."""

    def __init__(self, values: Mapping[str, Any], differs: str) -> None:
        super().__init__(values)
        self.differs = differs
        """Our key, and what differs; the file says it."""


def refuse(key: str, value: Any, allowed: Iterable[str], nearest: str) -> NoReturn:
    """Raise Refused for the value of a key of theirs."""
    raise Refused(
        f"{key} = {value!r} is an objective that is not here, and a run would train another one. "
        f"Allowed: {', '.join(allowed)}. Set {key} to the nearest, {nearest}, to import the file"
    )


def to(key: str, convert: Callable[[Any], Any] | None = None) -> Convert:
    """Sets one key of ours; None there is the default here."""

    def rule(value: Any, _: Values) -> dict[str, Any]:
        return NOTHING if value is None else {key: convert(value) if convert else value}

    return rule


def choice(key: str, table: Mapping[Any, Any], advice: str) -> Convert:
    """Sets one key of ours by a table of values."""

    def rule(value: Any, _: Values) -> dict[str, Any]:
        if value not in table:
            raise NoCounterpart(advice)
        return NOTHING if table[value] is None else {key: table[value]}

    return rule


def only(value: Any, why: str) -> Convert:
    """A key whose one value changes nothing here."""

    def rule(given: Any, _: Values) -> dict[str, Any]:
        if given != value:
            raise NoCounterpart(why)
        return NOTHING

    return rule


def needs(key: str, rule: Convert, why: str = "") -> Convert:
    """The rule of a key that has no effect without another one."""

    def checked(value: Any, values: Values) -> dict[str, Any]:
        if not values.get(key):
            raise NoCounterpart(f"no effect without {key}{why}")
        return rule(value, values)

    return checked


def kl_penalty(placement: str, coefficient: Any) -> dict[str, Any]:
    """The KL in the loss or in the reward, as other systems estimate it; "none": not measured."""
    if placement == "none":
        return {"algorithm.kl.placement": "none", "algorithm.reference.policy": "none"}
    estimator = "forward_kl" if placement == "loss" else "k1"
    return {"algorithm.kl.placement": placement, "algorithm.kl.estimator": estimator,
            "algorithm.kl.coefficient": coefficient,
            "algorithm.reference.policy": "start"}  # fmt: skip


def kl_in_loss(key: str, kind: Any, coefficient: Any) -> dict[str, Any]:
    """The KL in the loss as verl and slime estimate it. Raises Refused.

    key: theirs, of the kind. l, the log ratio to the reference, is theirs and ours.
    """
    if kind in ("low_var_kl", "k3"):
        return kl_penalty("loss", coefficient)
    # A kind with "+" has the gradient of k2, and another value.
    has_gradient_of_k2 = kind in ("mse", "k2") or str(kind).endswith("+")
    if not has_gradient_of_k2 and kind not in ("kl", "k1"):
        refuse(key, kind, ("low_var_kl (k3)", "mse (k2)", "k1", "low_var_kl+"), "low_var_kl")
    # The gradient of l^2 / 2 is l times that of the logprob: an advantage of -l.
    ours = kl_penalty("reward", coefficient) | {"algorithm.kl.horizon": "token"}
    if has_gradient_of_k2:
        differs = (
            f"the gradient of {kind} in the loss is that of k1 in each token's advantage. Here the "
            "clipping of the policy loss, and algorithm.correction, apply to it too"
        )
    else:
        differs = (
            f"the gradient of {kind} in the loss is 0 on average, so it holds nothing there. Here "
            'the coefficient holds the policy; algorithm.kl.placement="none" repeats theirs'
        )
    return Nearest(ours, f"algorithm.kl: {differs}")


def times(norm: float, divisor: Any) -> dict[str, Any]:
    """The clipping of gradients where their loss is divided by a number, and ours is not."""
    return {"optimizer.clip_grad_norm": norm * (divisor or 1)}


def undivided(divisor: Any, name: str) -> Nearest:
    """Sums over sequences; divisor: what they divide the loss by, None: not known; name: of it."""
    if divisor:
        scale = f"clip_grad_norm is theirs times {divisor}, so that it clips the same"
    else:
        scale = "multiply clip_grad_norm by it to clip the same"
    return Nearest(
        {"algorithm.aggregation.name": "sequence_sum"},
        f"optimizer.clip_grad_norm: their loss is divided by {name}, and sequence_sum is not: "
        f"{scale}. AdamW's steps do not depend on the factor",
    )


def clip(low: float, high: float | None) -> dict[str, Any]:
    """The clip range of the ratio; high: None for the same as low."""
    return {"algorithm.policy_loss.eps_low": low,
            "algorithm.policy_loss.eps_high": low if high is None else high}  # fmt: skip


def lengths(new: int, prompt: int | None, context: int | None = None) -> dict[str, Any]:
    """Tokens of a completion, and of prompt and completion if both, or their sum, are given."""
    context = context or (prompt + new if prompt else None)
    longest = {"generator.context_tokens": context} if context else {}
    return {"sampling.max_new_tokens": new, **longest}


def truncated(high: float) -> dict[str, Any]:
    """Weights of the trainer's logprobs over the engine's, cut at `high`."""
    return {
        "algorithm.correction.name": "truncated", "algorithm.correction.high": high,
        "algorithm.policy_loss.old_logprobs": "recompute",
    }  # fmt: skip


def unknown_warmup(share: float) -> dict[str, Any]:
    """The warm-up over a share of a number of steps that the file does not tell."""
    return Nearest(
        {"optimizer.warmup_steps": 0},
        f"optimizer.warmup_steps: {share:g} of all optimizer steps there, whose number the file "
        "does not tell; 0 is written",
    )


def offload(value: Any, _: Values) -> dict[str, Any]:
    """Optimizer state in host memory, which the distributed optimizer alone can hold there."""
    return {"optimizer.offload": True, "parallel.distributed_optimizer": True} if value else NOTHING


def positive(value: int) -> int:
    """-1, or 0, is never, or all, there; 0 here."""
    return max(0, value)


def ratio(above: int, below: int, text: str) -> int:
    if not below or above % below or not above:
        raise NoCounterpart(f"{text} = {above} / {below} is no whole number: set it yourself")
    return above // below


def set_name(path: str) -> str:
    """Name of an evaluation set: the file's, with the folder's where the file's says little."""
    parts = PurePosixPath(path).with_suffix("").parts[-2:]
    return re.sub(r"[^A-Za-z0-9_-]", "_", "-".join(parts).strip("/-")) or "validation"


def joined(system: str) -> str:
    """What a reader must decide about data sets that another system joins."""
    return (
        f"prompts.weight: {system} joins its data sets, so that each counts by its number of rows; "
        "here each has the same share of groups"
    )


def loggers(value: Any, _: Values) -> dict[str, Any]:
    names = [str(name).lower() for name in (value if isinstance(value, list) else [value])]
    if others := set(names) - {"wandb", "tensorboard", "console", "file", "none"}:
        raise NoCounterpart(f"{', '.join(sorted(others))}: metrics.wandb and metrics.tensorboard "
                            "are ours, and RUN/metrics.jsonl is always written")  # fmt: skip
    online = {"metrics.wandb": "online"} if "wandb" in names else {}
    return online | ({"metrics.tensorboard": True} if "tensorboard" in names else {})


def product(*values: Any) -> int:
    """The product of whole numbers. Raises TypeError for others."""
    if not all(isinstance(value, int) for value in values):
        raise TypeError(f"expected whole numbers, not {values}")
    return math.prod(values)


def rule_of(rules: Mapping[str, Rule], key: str) -> Rule | None:
    """The rule of a key: its own, or that of the first pattern with * that it fits."""
    if key in rules and "*" not in key:
        return rules[key]
    return next((rules[p] for p in rules if "*" in p and fnmatch.fnmatchcase(key, p)), None)


def each(prefix: str, names: str, reason: str) -> dict[str, Rule]:
    """The same reason for several keys."""
    return {prefix + name: reason for name in names.split()}
