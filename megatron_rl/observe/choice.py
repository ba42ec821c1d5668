"""Which model of a cold start reinforcement learning begins with: the most accurate one.

Used by `cold_start.py` and `summary.py`. Pure functions of the rows of `metrics.jsonl`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.exports import candidate_name, candidate_step

CHOSEN = "launch/chosen_step"
"""Metric of the launcher: the step of the cold start that was chosen."""
SET = "evaluation_set"
"""Beside it: the set that it was chosen by; empty for the held-out prompts."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Candidate:
    """A model of the cold start, and what its evaluation says."""

    step: int
    accuracy: float
    se: float | None
    """Its standard error."""
    n: int
    """Prompts."""


def candidates_of(rows: Iterable[Row], set_name: str) -> dict[int, Candidate]:
    """By step, those that were evaluated on the set, in the order of their steps."""
    found = {}
    for row in rows:
        name, _, of_set = str(row.get("label", "")).partition(".")
        step = candidate_step(name)
        if step is not None and of_set == set_name and "eval/accuracy" in row:
            se = row.get("eval/accuracy_se")
            found[step] = Candidate(step, row["eval/accuracy"], se, row["eval/n"])
    return dict(sorted(found.items()))


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The most accurate one first; of equal ones that of fewer steps."""
    return sorted(candidates, key=lambda one: (-one.accuracy, one.step))


def choose(rows: Iterable[Row], steps: Iterable[int], set_name: str) -> Candidate:
    """The best of the candidates of these steps. Raises InputError where one was not measured."""
    found = candidates_of(rows, set_name)
    missing = [candidate_name(step) for step in steps if step not in found]
    if missing:
        where = f"the set {set_name!r}" if set_name else "held-out prompts"
        raise InputError(
            f"nothing was measured of {', '.join(missing)} on {where}, so there is no choice: add "
            "prompts, or set sft.export_every_steps=0"
        )
    return ranked(found[step] for step in steps)[0]


def summarize_choice(rows: list[Row]) -> dict[str, Any] | None:
    """The chosen model, the candidates, and its lead; None without a choice."""
    made = [row for row in rows if CHOSEN in row]
    if not made:
        return None
    step, set_name = made[-1][CHOSEN], made[-1][SET]
    candidates = candidates_of(rows, set_name)
    chosen = candidates[step]
    others = [one for one in ranked(candidates.values()) if one.step != step]
    ahead, errors = (None, None)
    if others:
        ahead, errors = difference_of(
            (others[0].accuracy, others[0].se), (chosen.accuracy, chosen.se)
        )
    return {
        "chosen_step": step,
        "evaluation_set": set_name or None,
        "candidates": {
            str(one.step): {"accuracy": one.accuracy, "se": one.se, "n": one.n}
            for one in candidates.values()
        },
        "next_best_step": others[0].step if others else None,
        "ahead_of_next_best": ahead,
        "ahead_of_next_best_standard_errors": errors,
    }


def choice_lines(choice: dict[str, Any] | None) -> list[str]:
    """The choice as the report tells it."""
    if choice is None:
        return []
    by = f"on {choice['evaluation_set']}" if choice["evaluation_set"] else "on held-out prompts"
    found = [
        f"step {step}: {one['accuracy']:.3f}" + (f" +- {one['se']:.3f}" if one["se"] else "")
        for step, one in choice["candidates"].items()
    ]
    lines = [f"Cold start          {by}: {', '.join(found)}"]
    text = f"  chosen            step {choice['chosen_step']}"
    if choice["next_best_step"] is not None:
        text += f", {choice['ahead_of_next_best']:+.3f} to step {choice['next_best_step']}"
        errors = choice["ahead_of_next_best_standard_errors"]
        if errors is not None:
            verdict = "" if abs(errors) >= 3 else ": too little to tell from chance"
            text += f", {errors:+.1f} combined standard errors{verdict}"
    return [*lines, text]


def difference_of(
    start: tuple[float | None, float | None], end: tuple[float | None, float | None]
) -> tuple[float | None, float | None]:
    """Difference of two accuracies, and the same in combined standard errors."""
    if start[0] is None or end[0] is None:
        return None, None
    found = end[0] - start[0]
    error = math.hypot(start[1] or 0.0, end[1] or 0.0)
    return found, found / error if error else None
