"""Figures of an evaluation set, overall and by task, language, length and truncation, as JSON.

Used by the launcher for eval.json.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from megatron_rl.evaluation.figures import (
    clustered_figure,
    maj_figures,
    mean_figure,
    most_samples,
    pass_figures,
)
from megatron_rl.evaluation.samples import ProblemSamples

OF_QUESTION = "of the question"
"""Language of problems that request none."""
LENGTH_BINS = 4
_Report = dict[str, Any]


def set_report(problems: Sequence[ProblemSamples]) -> _Report:
    """All figures of one set of at least one problem.

    Each is {"value", "se", "problems"}; se is None for one problem. `by_length` and `by_truncation`
    are over completions, with errors clustered by problem.
    """
    return {
        **figures_report(problems),
        "by_task": _by(problems, lambda problem: problem.task),
        "by_language": _by(problems, lambda problem: problem.language or OF_QUESTION),
        "by_length": _by_length(problems),
        "by_truncation": _by_truncation(problems),
    }


def figures_report(problems: Sequence[ProblemSamples]) -> _Report:
    """Figures of at least one problem."""
    return {
        "problems": len(problems),
        "completions": sum(problem.n for problem in problems),
        "samples": most_samples(problems),
        "accuracy": asdict(mean_figure([problem.accuracy for problem in problems])),
        "pass_at": {str(k): asdict(figure) for k, figure in pass_figures(problems).items()},
        "maj_at": {str(k): asdict(figure) for k, figure in maj_figures(problems).items()},
        "without_classes": sum(problem.classes is None for problem in problems),
        "format": asdict(mean_figure([float(p.is_well_formed.mean()) for p in problems])),
        "truncated": asdict(mean_figure([float(p.is_cut.mean()) for p in problems])),
        "length_tokens": asdict(mean_figure([float(p.tokens.mean()) for p in problems])),
        "reward": asdict(mean_figure([float(p.rewards.mean()) for p in problems])),
    }


def _by(problems: Sequence[ProblemSamples], key: Callable[[ProblemSamples], str]) -> _Report:
    found: dict[str, list[ProblemSamples]] = {}
    for problem in problems:
        found.setdefault(key(problem), []).append(problem)
    return {name: figures_report(found[name]) for name in sorted(found)}


def _by_length(problems: Sequence[ProblemSamples]) -> list[_Report]:
    """Accuracy by quarter of the completion lengths, shortest first.

    Equal lengths share a quarter, so quarters may differ in size or be missing.
    """
    tokens = np.concatenate([problem.tokens for problem in problems])
    inner = np.quantile(tokens, np.arange(1, LENGTH_BINS) / LENGTH_BINS, method="lower")
    bins = np.searchsorted(np.unique(inner), tokens, side="left")
    parts = [bins == number for number in np.unique(bins)]
    return [
        {"tokens_from": int(tokens[mine].min()), "tokens_to": int(tokens[mine].max())}
        | _accuracy(problems, mine)
        for mine in parts
    ]


def _by_truncation(problems: Sequence[ProblemSamples]) -> _Report:
    """Accuracy of finished completions, and of completions cut at the length limit."""
    is_cut = np.concatenate([problem.is_cut for problem in problems])
    parts = {"finished": ~is_cut, "cut": is_cut}
    return {name: _accuracy(problems, mine) for name, mine in parts.items() if mine.any()}


def _accuracy(problems: Sequence[ProblemSamples], mine: np.ndarray) -> _Report:
    """Accuracy of the chosen completions; mine: [completions] bool."""
    is_correct = np.concatenate([problem.is_correct for problem in problems]).astype(float)
    clusters = np.repeat(np.arange(len(problems)), [problem.n for problem in problems])
    accuracy = clustered_figure(is_correct[mine], clusters[mine])
    return {"completions": int(mine.sum()), "accuracy": asdict(accuracy)}
