"""Compares the results of two evaluations, set by set. Used by `megatron-rl eval --compare`."""

from pathlib import Path
from typing import Any

from megatron_rl.config.errors import InputError
from megatron_rl.evaluation.comparison import Comparison, compare
from megatron_rl.evaluation.runs.results import HELD_OUT, Report, read_problems, read_report

_SETTINGS = ("samples", "temperature", "top_p", "top_k", "min_p", "stop", "max_new_tokens")


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
        settings = _other_settings(*(report["sets"][name] for report in reports))
        sets[name] = {**_plain(compare(*problems)), "other_settings": settings}
    return {
        "first": str(first),
        "second": str(second),
        "sets": sets,
        "only_first": [name for name in names[0] if name not in common],
        "only_second": [name for name in names[1] if name not in common],
    }


def _other_settings(first: Report, second: Report) -> dict[str, list[Any]]:
    """Sampling settings that differ: both values by name."""
    return {
        name: [first.get(name), second.get(name)]
        for name in _SETTINGS
        if first.get(name) != second.get(name)
    }


def _plain(found: Comparison) -> dict[str, Any]:
    test = found.test
    return {
        "problems": test.problems if test else 0,
        "first_accuracy": found.first_accuracy,
        "second_accuracy": found.second_accuracy,
        "difference": test.difference if test else None,
        "se": test.se if test else None,
        "p": test.p if test else None,
        "is_exact": test.is_exact if test else None,
        "higher": test.higher if test else 0,
        "lower": test.lower if test else 0,
        "only_first": found.only_first,
        "only_second": found.only_second,
        "other_samples": found.other_samples,
    }
