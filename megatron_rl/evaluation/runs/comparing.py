"""Compares the results of two evaluations, set by set. Used by `megatron-rl eval --compare`."""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from megatron_rl.config.errors import InputError
from megatron_rl.evaluation.paired_test import paired_test
from megatron_rl.evaluation.runs.results import (
    HELD_OUT,
    SETTINGS,
    Report,
    read_problems,
    read_report,
)
from megatron_rl.evaluation.samples import ProblemSamples


def compare_folders(first: Path, second: Path) -> dict[str, Any]:
    """The comparison to print: {"first", "second", "sets", "only_first", "only_second"}.

    Raises InputError for a folder without results, and when no set is in both.
    """
    reports = [read_report(folder) for folder in (first, second)]
    names = [list(report["sets"]) for report in reports]
    common = [name for name in names[0] if name in names[1]]
    if not common:
        raise InputError(
            f"no set is in both evaluations: {first} has {', '.join(names[0])}; {second} has "
            f"{', '.join(names[1])}"
        )
    sets = {}
    for name in common:
        problems = [
            read_problems(folder, report["label"], "" if name == HELD_OUT else name)
            for folder, report in zip((first, second), reports, strict=True)
        ]
        told = [report["sets"][name] for report in reports]
        sets[name] = compare(*problems) | {
            "other_settings": _other_settings(*told),
            "lost": [_lost(*pair) for pair in zip(told, problems, strict=True)],
        }
    return {
        "first": str(first),
        "second": str(second),
        "sets": sets,
        "only_first": [name for name in names[0] if name not in common],
        "only_second": [name for name in names[1] if name not in common],
    }


def _lost(told: Report, found: Sequence[ProblemSamples]) -> dict[str, int]:
    """Problems and completions by eval.json (told_*) and in the recorded lines, if these are fewer.

    {} if no line is lost.
    """
    counts = {"problems": len(found), "completions": sum(problem.n for problem in found)}
    if not any(counts[name] < told.get(name, 0) for name in counts):
        return {}
    return counts | {f"told_{name}": told.get(name, 0) for name in counts}


def _other_settings(first: Report, second: Report) -> dict[str, list[Any]]:
    """Sampling settings that differ: both values by name."""
    return {
        name: [first.get(name), second.get(name)]
        for name in ("samples", *SETTINGS)
        if first.get(name) != second.get(name)
    }


def compare(first: Sequence[ProblemSamples], second: Sequence[ProblemSamples]) -> dict[str, Any]:
    """Second evaluation of a set minus the first, over the paired problems.

    Problems are paired by task, question and reference answer; duplicates in order. only_first and
    only_second: problems without a verdict in the other evaluation. other_samples: paired problems
    with different numbers of graded completions; for these the level of the test is approximate.
    """
    ours, theirs = _by_key(first), _by_key(second)
    pairs = [(problem, theirs[key]) for key, problem in ours.items() if key in theirs]
    test = paired_test([_share(b) - _share(a) for a, b in pairs]) if pairs else None
    return {
        "problems": len(pairs),
        "first_accuracy": _mean([a.accuracy for a, _ in pairs]),
        "second_accuracy": _mean([b.accuracy for _, b in pairs]),
        "difference": test.difference if test else None,
        "se": test.se if test else None,
        "p": test.p if test else None,
        "is_exact": test.is_exact if test else None,
        "higher": test.higher if test else 0,
        "lower": test.lower if test else 0,
        "only_first": len(ours) - len(pairs),
        "only_second": len(theirs) - len(pairs),
        "other_samples": sum(a.n != b.n for a, b in pairs),
    }


def _by_key(problems: Sequence[ProblemSamples]) -> dict[tuple[str, str, str, int], ProblemSamples]:
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
