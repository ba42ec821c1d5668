"""Small evaluated problems."""

from collections.abc import Sequence

import numpy as np

from megatron_rl.evaluation.samples import ProblemSamples


def make_problem(
    verdicts: Sequence[int],
    *,
    name: str = "p",
    classes: Sequence[int] | None = None,
    tokens: Sequence[int] | None = None,
    is_cut: Sequence[int] | None = None,
    task: str = "math",
    language: str = "",
    answer: str = "1",
) -> ProblemSamples:
    n = len(verdicts)
    return ProblemSamples(
        prompt_id=name,
        question=f"question {name}",
        answer=answer,
        task=task,
        language=language,
        is_correct=np.array(verdicts, bool),
        is_well_formed=np.ones(n, bool),
        is_cut=np.array(is_cut if is_cut is not None else [0] * n, bool),
        tokens=np.array(tokens if tokens is not None else [3] * n, np.int64),
        rewards=np.array(verdicts, float),
        classes=None if classes is None else np.array(classes, np.int64),
    )
