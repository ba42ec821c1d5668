"""Derives values of keys that are missing or "auto" from other keys.

`files.py` fills them in before it checks a tree, so every process reads plain values from the run's
config.toml.
"""

from collections.abc import Callable, Mapping
from typing import Any

from megatron_rl.config.presets import PRESETS

AUTO = "auto"
DEFAULT_PRESET = "magistral"
_Tree = Mapping[str, Any]


def _shares_data(tree: _Tree) -> bool:
    return (_number(tree, "parallel", "data") or 1) > 1


def _shares_tensors(tree: _Tree) -> bool:
    return (_number(tree, "parallel", "tensor") or 1) > 1


def _samples(tree: _Tree) -> int:
    return 1 if _number(tree, "eval", "temperature") == 0 else 4


def _correction(tree: _Tree) -> str:
    """truncated for the trainer's old logprobs: with the generator's, the loss ratio corrects."""
    algorithm = _section(tree, "algorithm")
    preset = PRESETS.get(algorithm.get("preset", DEFAULT_PRESET))
    values: _Tree = preset.values if preset is not None else {}
    if "name" in _section(values, "correction"):
        return str(values["correction"]["name"])
    policy_loss = {**_section(values, "policy_loss"), **_section(algorithm, "policy_loss")}
    is_own = policy_loss.get("old_logprobs") == "recompute"
    return "truncated" if is_own and _is_ever_stale(tree) else "none"


def _is_ever_stale(tree: _Tree) -> bool:
    """Whether any stage trains on older policies' tokens: all stages have one objective."""
    stages = [_section(one, "queue").get("max_staleness", 0) for one in _tables(tree, "stages")]
    given = [_section(tree, "queue").get("max_staleness", 1), *stages]
    return any(_as_number(versions) != 0 for versions in given)


def _section(tree: _Tree, name: str) -> _Tree:
    found = tree.get(name, {})
    return found if isinstance(found, dict) else {}


_SLOWEST_TOKEN_S = 0.12
"""Seconds per token of the slowest stream of a full engine that still counts as healthy."""


def _request_timeout_s(tree: _Tree) -> float:
    return max(300.0 * patience_of(tree), _SLOWEST_TOKEN_S * patience_of(tree) * _longest(tree))


def _lease_timeout_s(tree: _Tree) -> float:
    request_s = _number(tree, "generator", "request_timeout_s")
    return 1.2 * (_request_timeout_s(tree) if request_s is None else request_s)


def _batch_timeout_s(tree: _Tree) -> float:
    return max(1200.0 * patience_of(tree), 1.5 * _lease_s(tree))


def _wait_s(tree: _Tree) -> float:
    """Half of the time after which the queue ends a run whose trainer is away."""
    given = _number(tree, "train", "batch_timeout_s")
    return (_batch_timeout_s(tree) if given is None else given) / 2


def _eval_timeout_s(tree: _Tree) -> float:
    return max(600.0 * patience_of(tree), 2.0 * _lease_s(tree))


def _lease_s(tree: _Tree) -> float:
    given = _number(tree, "queue", "lease_timeout_s")
    return _lease_timeout_s(tree) if given is None else given


def patience_of(tree: _Tree) -> float:
    """`run.patience`, or 1 for a missing or invalid value, which the check of the tree refuses."""
    given = _number(tree, "run", "patience")
    return 1.0 if given is None else given


def _number(tree: _Tree, section: str, name: str) -> float | None:
    return _as_number(_section(tree, section).get(name))


def _as_number(given: Any) -> float | None:
    """A number, in quotes or not, as the tree takes it; None for what its check refuses."""
    if isinstance(given, str):
        try:
            return float(given)
        except ValueError:
            return None
    return given if isinstance(given, int | float) else None


def _longest(tree: _Tree) -> float:
    """Most tokens of a completion, in any stage or evaluation."""
    evaluation = _section(tree, "eval")
    stages = [_section(one, "sampling") for one in _tables(tree, "stages")]
    sections = [_section(tree, "sampling"), evaluation, *_tables(evaluation, "sets"), *stages]
    found = [_as_number(section.get("max_new_tokens")) for section in sections]
    return max((n for n in found if n is not None), default=0)


def _tables(tree: _Tree, name: str) -> list[_Tree]:
    found = tree.get(name, [])
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


DERIVED: dict[str, Callable[[_Tree], Any]] = {
    "parallel.sequence": _shares_tensors,
    "parallel.distributed_optimizer": _shares_data,
    "parallel.overlap_gradients": _shares_data,
    "algorithm.correction.name": _correction,
    "eval.samples": _samples,
    "eval.timeout_s": _eval_timeout_s,
    "generator.request_timeout_s": _request_timeout_s,
    "queue.lease_timeout_s": _lease_timeout_s,
    "train.batch_timeout_s": _batch_timeout_s,
    "nodes.wait_s": _wait_s,
}
"""Key -> function of the tree that gives its value."""


def fill_in(tree: dict[str, Any]) -> dict[str, Any]:
    """A copy of the tree with missing derived keys; the check of the tree refuses non-tables."""
    filled = tree
    for key, derive in DERIVED.items():
        if _given(filled, key) in (None, AUTO):
            filled = _with_value(filled, key.split("."), derive(tree))
    return filled


def _given(tree: _Tree, key: str) -> Any:
    *sections, name = key.split(".")
    for section in sections:
        tree = _section(tree, section)
    return tree.get(name)


def _with_value(tree: dict[str, Any], parts: list[str], value: Any) -> dict[str, Any]:
    first, *rest = parts
    if not rest:
        return {**tree, first: value}
    inner = tree.get(first, {})
    return {**tree, first: _with_value(inner, rest, value)} if isinstance(inner, dict) else tree
