"""The graded completions of one problem of an evaluation.

Used by the rollout queue for its groups, and by the launcher for recorded rollouts.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from megatron_rl.protocol.rollout_files import RolloutRecord

CORRECT = "correct"
"""The `reason` of a right answer's score."""
_CUT = "length"
"""The `finish_reason` of a completion that was cut at its limit."""


@dataclass(frozen=True, eq=False)
class ProblemSamples:
    """The n graded completions of a problem, in the order of their indices; n is at least 1."""

    prompt_id: str
    question: str
    answer: str
    """The reference."""
    task: str
    language: str
    """Requested language; empty: that of the question."""
    is_correct: np.ndarray
    """[n] bool."""
    is_well_formed: np.ndarray
    """[n] bool: whether the format check passed."""
    is_cut: np.ndarray
    """[n] bool: whether the completion was cut at its length limit."""
    tokens: np.ndarray
    """[n] int64: length of each completion."""
    rewards: np.ndarray
    """[n] float64."""
    classes: np.ndarray | None = field(default=None)
    """[n] int64: a number per distinct answer, 0 for right ones; -1: no answer. None: unknown."""

    @property
    def n(self) -> int:
        """Graded completions."""
        return len(self.is_correct)

    @property
    def right(self) -> int:
        """Completions that are right."""
        return int(self.is_correct.sum())

    @property
    def accuracy(self) -> float:
        """Share of right completions."""
        return float(self.is_correct.mean())


def of_records(records: Iterable[RolloutRecord]) -> list[ProblemSamples]:
    """Problems of an evaluation's records, in order of first appearance.

    Records without a verdict are left out: they count neither as right nor as wrong.
    """
    by_prompt: dict[str, list[RolloutRecord]] = {}
    for record in records:
        if record.reward is not None:
            by_prompt.setdefault(record.prompt_id, []).append(record)
    return [_of_prompt(sorted(found, key=lambda r: r.index)) for found in by_prompt.values()]


def _of_prompt(records: list[RolloutRecord]) -> ProblemSamples:
    first = records[0]
    classes = [record.answer_class for record in records]
    is_known = all(number is not None for number in classes)
    return ProblemSamples(
        prompt_id=first.prompt_id,
        question=first.problem,
        answer=first.answer,
        task=first.task,
        language=first.language,
        is_correct=np.array([record.reason == CORRECT for record in records]),
        is_well_formed=np.array([record.parts.get("format", 0.0) > 0.0 for record in records]),
        is_cut=np.array([record.finish_reason == _CUT for record in records]),
        tokens=np.array([record.tokens for record in records], np.int64),
        rewards=np.array([record.reward for record in records], np.float64),
        classes=np.array(classes, np.int64) if is_known else None,
    )
