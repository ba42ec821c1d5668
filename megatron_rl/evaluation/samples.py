"""The graded completions of an evaluated problem. Used by the rollout queue and the launcher."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from megatron_rl.protocol.rollout_files import RolloutRecord

CORRECT = "correct"
"""`reason` of the score of a right answer."""
_CUT = "length"
"""`finish_reason` of a completion cut at its limit."""


@dataclass(frozen=True, eq=False)
class ProblemSamples:
    """The n >= 1 graded completions of a problem, in the order of their indices."""

    prompt_id: str
    question: str
    answer: str
    """Reference answer."""
    task: str
    language: str
    """Requested language; empty: the language of the question."""
    is_correct: np.ndarray
    """[n] bool."""
    is_well_formed: np.ndarray
    """[n] bool: whether the format check passed."""
    is_cut: np.ndarray
    """[n] bool: whether the length limit cut the completion."""
    tokens: np.ndarray
    """[n] int64: length of each completion."""
    rewards: np.ndarray
    """[n] float64."""
    classes: np.ndarray | None = field(default=None)
    """[n] int64: a number per distinct answer, 0 for right answers, -1 for none. None: unknown."""

    @property
    def n(self) -> int:
        """Number of completions."""
        return len(self.is_correct)

    @property
    def right(self) -> int:
        """Number of right completions."""
        return int(self.is_correct.sum())

    @property
    def accuracy(self) -> float:
        """Share of right completions."""
        return float(self.is_correct.mean())


def of_records(records: Iterable[RolloutRecord]) -> list[ProblemSamples]:
    """Problems of an evaluation's records, in order of first appearance; skips ungraded records."""
    by_prompt: dict[str, list[RolloutRecord]] = {}
    for record in records:
        if record.reward is not None:
            by_prompt.setdefault(record.prompt_id, []).append(record)
    return [_of_prompt(sorted(found, key=lambda r: r.index)) for found in by_prompt.values()]


def _is_well_formed(record: RolloutRecord) -> bool:
    return record.is_outcome or record.parts.get("format", 0.0) > 0.0


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
        is_well_formed=np.array([_is_well_formed(record) for record in records]),
        is_cut=np.array([record.finish_reason == _CUT for record in records]),
        tokens=np.array([record.sampled_tokens for record in records], np.int64),
        rewards=np.array([record.reward for record in records], np.float64),
        classes=np.array(classes, np.int64) if is_known else None,
    )
