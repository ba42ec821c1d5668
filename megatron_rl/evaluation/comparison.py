"""Compares two evaluations problem by problem. Used by the launcher."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron_rl.evaluation.paired_test import PairedTest, paired_test
from megatron_rl.evaluation.samples import ProblemSamples

_Key = tuple[str, str, str, int]


@dataclass(frozen=True)
class Comparison:
    """One set of two evaluations."""

    test: PairedTest | None
    """None: no problem is in both."""
    first_accuracy: float | None
    """Over the paired problems; second_accuracy too."""
    second_accuracy: float | None
    only_first: int
    """Problems without a verdict in the second evaluation."""
    only_second: int
    other_samples: int
    """Paired problems with different numbers of graded completions; for these the level of the test
    is approximate."""


def compare(first: Sequence[ProblemSamples], second: Sequence[ProblemSamples]) -> Comparison:
    """Second evaluation of a set minus the first.

    Problems are paired by task, question and reference answer; duplicates in order.
    """
    ours, theirs = _by_key(first), _by_key(second)
    pairs = [(problem, theirs[key]) for key, problem in ours.items() if key in theirs]
    test = None
    if pairs:
        test = paired_test([_share(b) - _share(a) for a, b in pairs])
    return Comparison(
        test,
        _mean([a.accuracy for a, _ in pairs]),
        _mean([b.accuracy for _, b in pairs]),
        only_first=len(ours) - len(pairs),
        only_second=len(theirs) - len(pairs),
        other_samples=sum(a.n != b.n for a, b in pairs),
    )


def _by_key(problems: Sequence[ProblemSamples]) -> dict[_Key, ProblemSamples]:
    seen: Counter[tuple[str, str, str]] = Counter()
    found = {}
    # Records are in order of completion, so duplicates are sorted by id.
    for problem in sorted(problems, key=lambda problem: problem.prompt_id):
        name = (problem.task, problem.question, problem.answer)
        found[(*name, seen[name])] = problem
        seen[name] += 1
    return found


def _share(problem: ProblemSamples) -> Fraction:
    return Fraction(problem.right, problem.n)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
