"""Tables of `megatron-rl eval`: figures of the sets, and comparisons."""

from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_rl.cli.command_line.printing import say, show_table
from megatron_rl.config.errors import printable
from megatron_rl.evaluation.runs.results import Report

_NONE = "-"


def print_report(report: Report, console: Console) -> None:
    """Print the figures of each set, then its accuracy by task, language, length and truncation."""
    say(console, f"Evaluation of {report['model']}")
    table = Table("set", "figure", "value", "problems", "samples")
    for name, found in report["sets"].items():
        for title, figure in _figures(found):
            samples = str(found["samples"])
            table.add_row(name, title, _figure(figure), str(figure["problems"]), samples)
    show_table(console, table)
    parts = Table("set", "part", "problems", "completions", "accuracy")
    for name, found in report["sets"].items():
        for part, cells in _parts(found):
            parts.add_row(name, printable(part), *cells)
    show_table(console, parts)


def _figures(found: Report) -> list[tuple[str, dict[str, Any]]]:
    """(name in the table, figure) of a set."""
    named = [("accuracy", found["accuracy"])]
    named += [(f"pass@{k}", figure) for k, figure in found["pass_at"].items()]
    named += [(f"maj@{k}", figure) for k, figure in found["maj_at"].items()]
    return named + [(key, found[key]) for key in ("format", "truncated", "length_tokens", "reward")]


def _parts(found: Report) -> list[tuple[str, tuple[str, str, str]]]:
    """(name, cells) of each part of a set."""
    rows = [
        (f"{kind} {name}", part)
        for kind in ("task", "language")
        for name, part in found[f"by_{kind}"].items()
    ]
    for part in found["by_length"]:
        rows.append((f"{part['tokens_from']} to {part['tokens_to']} tokens", part))
    rows += found["by_truncation"].items()
    return [(name, _part(part)) for name, part in rows]


def _part(part: dict[str, Any]) -> tuple[str, str, str]:
    accuracy = part["accuracy"]
    return str(accuracy["problems"]), str(part["completions"]), _figure(accuracy)


def print_comparison(compared: dict[str, Any], console: Console) -> None:
    """Print a row per set, then warnings."""
    table = Table("set", "problems", "A", "B", "B - A", "p", "B better, worse", "only A, only B")
    for name, found in compared["sets"].items():
        table.add_row(name, *_cells(found))
    say(console, f"A: {compared['first']}", f"B: {compared['second']}")
    show_table(console, table)
    say(console, *_remarks(compared))


def _cells(found: dict[str, Any]) -> tuple[str, ...]:
    only = f"{found['only_first']}, {found['only_second']}"
    if found["p"] is None:
        return "0", _NONE, _NONE, _NONE, _NONE, _NONE, only
    error = "" if found["se"] is None else f" +- {found['se']:.3f}"
    return (
        str(found["problems"]),
        f"{found['first_accuracy']:.3f}",
        f"{found['second_accuracy']:.3f}",
        f"{found['difference']:+.3f}{error}",
        f"{found['p']:.3g}" + ("" if found["is_exact"] else " (drawn)"),
        f"{found['higher']}, {found['lower']}",
        only,
    )


def _remarks(compared: dict[str, Any]) -> list[str]:
    lines = ["p: paired sign-flip test, two-sided (docs/evaluation.md)"]
    for name, found in compared["sets"].items():
        for folder, lost in zip("AB", found["lost"], strict=True):
            if lost:
                lines.append(
                    f"warning: {name}: {folder} has {lost['problems']} of "
                    f"{lost['told_problems']} problems and {lost['completions']} of "
                    f"{lost['told_completions']} completions of its eval.json: lines are missing, "
                    "and the accuracies differ from those that it reported"
                )
        for setting, (first, second) in found["other_settings"].items():
            lines.append(f"warning: {name}: {setting} is {first} in A, {second} in B")
        if found["other_samples"]:
            lines.append(
                f"warning: {name}: {found['other_samples']} problems have other numbers of graded "
                "completions in A and B: p is approximate"
            )
    for folder, key in (("A", "only_first"), ("B", "only_second")):
        if compared[key]:
            lines.append(f"warning: only {folder} has the sets {', '.join(compared[key])}")
    return lines


def _figure(figure: dict[str, Any]) -> str:
    error = "" if figure["se"] is None else f" +- {figure['se']:.3f}"
    return f"{figure['value']:.3f}{error}"
