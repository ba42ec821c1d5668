"""Chooses the most accurate candidate of a cold start.

Used by `cold_start.py` and `summary.py`. Pure functions of rows of `metrics.jsonl`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.errors import InputError
from megatron_rl.config.evaluation import CLEAR_ERRORS
from megatron_rl.protocol.exports import candidate_name, candidate_step
from megatron_rl.protocol.metrics import Row

CHOSEN = "launch/chosen_step"
"""Metric of the launcher: the chosen step of the cold start."""
SET = "evaluation_set"
"""In the same row: the evaluation set of the choice; "" for held-out prompts."""


@dataclass(frozen=True)
class Candidate:
    """An evaluated model of the cold start."""

    step: int
    accuracy: float
    se: float | None
    """Standard error of the accuracy."""
    n: int
    """Prompts."""


def candidates_of(rows: Iterable[Row], set_name: str) -> dict[int, Candidate]:
    """Candidates evaluated on a set, by step, in order."""
    found = {}
    for row in rows:
        name, _, of_set = str(row.get("label", "")).partition(".")
        step = candidate_step(name)
        if step is not None and of_set == set_name and "eval/accuracy" in row:
            se = row.get("eval/accuracy_se")
            found[step] = Candidate(step, row["eval/accuracy"], se, row["eval/n"])
    return dict(sorted(found.items()))


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Candidates by falling accuracy; of equal ones the earlier step first."""
    return sorted(candidates, key=lambda one: (-one.accuracy, one.step))


def choose(rows: Iterable[Row], steps: Iterable[int], set_name: str) -> Candidate:
    """The best candidate of these steps. Raises InputError if one was not evaluated."""
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
    """The chosen step, all candidates, and the lead of the chosen one; None without a choice."""
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
    if choice is None:
        return []
    by = f"on {choice['evaluation_set']}" if choice["evaluation_set"] else "on held-out prompts"
    found = [
        f"step {step}: {accuracy_text(one['accuracy'], one['se'])}"
        for step, one in choice["candidates"].items()
    ]
    lines = [f"Cold start          {by}: {', '.join(found)}"]
    text = f"  chosen            step {choice['chosen_step']}"
    if choice["next_best_step"] is not None:
        ahead, next_step = choice["ahead_of_next_best"], f"step {choice['next_best_step']}"
        errors = choice["ahead_of_next_best_standard_errors"]
        text += f", {difference_text(ahead, errors, next_step)}"
    return [*lines, text]


def difference_of(
    start: tuple[float | None, float | None], end: tuple[float | None, float | None]
) -> tuple[float | None, float | None]:
    """Difference of two (accuracy, standard error), absolute and in combined standard errors."""
    if start[0] is None or end[0] is None:
        return None, None
    found = end[0] - start[0]
    if start[1] is None or end[1] is None:
        return found, None
    error = math.hypot(start[1], end[1])
    return found, found / error if error else None


def accuracy_text(accuracy: float | None, error: float | None) -> str:
    """An accuracy with its standard error, which one problem lacks."""
    if accuracy is None:
        return "not measured"
    return f"{accuracy:.3f}" if error is None else f"{accuracy:.3f} +- {error:.3f}"


def prompts_text(count: int, *, is_held_out: bool = False) -> str:
    """A number of evaluated prompts."""
    return f"{count} {'held-out ' if is_held_out else ''}prompt{'' if count == 1 else 's'}"


def difference_text(difference: float, sigmas: float | None, other: str) -> str:
    """A difference to another accuracy; below CLEAR_ERRORS it is undecided."""
    text = f"{difference:+.3f} to {other}"
    if sigmas is None:
        return text
    verdict = "" if abs(sigmas) >= CLEAR_ERRORS else ": too little to tell from chance"
    return f"{text}, {sigmas:+.1f} combined standard errors{verdict}"
