"""`megatron-rl verify FILE`: grades a file of completions again and prints the verdicts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from megatron_rl.cli.command_line.command import command
from megatron_rl.cli.command_line.parameters import OneConfig, Overrides
from megatron_rl.cli.command_line.printing import printable
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.config.shipped import config_path as path_of
from megatron_rl.config.staging import longest_stage, resolve_stages
from megatron_rl.config.tree import Config
from megatron_rl.data.answers import accepted_answers
from megatron_rl.data.prompts import prompts_of_run
from megatron_rl.launcher.reward_trial import open_grading
from megatron_rl.launcher.thinking import decide_thinking
from megatron_rl.protocol.types import Prompt, Score, ScoreFailed
from megatron_rl.rollout_queue.schedule import length_rule
from verification import audit, settings
from verification.format import last_box

_WIDTH = 48


@dataclass(frozen=True)
class VerifyOptions:
    file: Annotated[Path, typer.Argument()]
    """Rollouts of a run, or JSONL of {text, answer}."""
    overrides: Overrides = field(default_factory=list)
    config: OneConfig = None
    disagree: bool = False
    """Show where math parsers differ."""


@command("verify", "Grade a file of completions again, and say why.")
def verify_file(options: VerifyOptions, console: Console) -> int:
    """Exit code: 0, 1 (grading failed somewhere), 2 (bad input)."""
    config_path = None if options.config is None else path_of(options.config)
    return verify(
        options.file, config_path, options.overrides, disagree=options.disagree, console=console
    )


def verify(
    path: Path, config_path: Path | None, overrides: list[str], *, disagree: bool, console: Console
) -> int:
    """Print the verdicts on a file; exit code 1 if grading failed anywhere. Raises InputError.

    The default configuration of a file in RUN/rollouts is RUN/config.toml.
    """
    if config_path is None:
        saved = path.resolve().parent.parent / "config.toml"
        config_path = saved if saved.exists() else None
    config = decide_thinking(load_config(config_path, overrides))
    settings.check_functions(config.reward)
    # The longest stage judges all evaluations of a run.
    is_evaluation = path.name.startswith(("eval_", "dropped_eval_"))
    rules = [] if is_evaluation else [length_rule(stage) for stage in resolve_stages(config)]
    records = audit.read_records(
        path, _prompts_by_id(config), rules, read_answers=_accepted_answers
    )
    longest = longest_stage(config)
    reward = audit.with_opinions(longest.reward) if disagree else longest.reward
    with open_grading(longest.model_copy(update={"reward": reward})) as grading:
        scores = grading.score(record.sample for record in records)
    _print_reasons(records, scores, console)
    _print_changes(records, scores, console)
    if disagree:
        _print_disagreements(audit.disagreements(records, scores), console)
        _print_beside_bare(audit.beside_bare(scores), console)
    return int(any(isinstance(score, ScoreFailed) for score in scores))


def _accepted_answers(answer: audit.Answer, task: str) -> list[str]:
    is_math = task == "math"
    try:
        return accepted_answers(answer, reads_text=is_math, is_math=is_math)
    except ValueError as error:
        raise InputError(f"{error}: {answer!r:.80}") from error


def _prompts_by_id(config: Config) -> dict[str, Prompt]:
    if not config.prompts and not config.eval.sets:
        return {}
    sets = prompts_of_run(config)
    return {prompt.id: prompt for prompt in sets.all}


def _print_reasons(
    records: Sequence[audit.Record], scores: Sequence[Score | ScoreFailed], console: Console
) -> None:
    table = Table("reason", "completions", "share", "mean reward", "an answer", "its reference")
    for row in audit.reason_rows(records, scores):
        share = f"{100 * row.count / len(records):.1f} %"
        cells = (row.reason, str(row.count), share, f"{row.reward:.3f}")
        table.add_row(*cells, _short(_answer_of(row.answer)), _short(row.reference))
    console.print(table, markup=False)


def _print_changes(
    records: Sequence[audit.Record], scores: Sequence[Score | ScoreFailed], console: Console
) -> None:
    changed = audit.changes(records, scores)
    recorded = sum(bool(record.recorded_reason) for record in records)
    if not recorded:
        return
    if not changed:
        console.print(f"All {recorded} verdicts are those that the file holds.")
        return
    table = Table("verdict in the file", "verdict now", "completions")
    for (before, now), count in sorted(changed.items(), key=lambda item: -item[1]):
        table.add_row(before, now, str(count))
    console.print(table, markup=False)


def _print_disagreements(found: list[audit.Disagreement], console: Console) -> None:
    if not found:
        console.print("The parsers disagree on no answer.")
        return
    table = Table("answer", "reference", *audit.PARSERS, "verdict")
    words = {True: "right", False: "wrong", None: "-"}
    for pair in found:
        said = [words[pair.said[name]] for name in audit.PARSERS]
        answer = _short(_answer_of(pair.answer))
        table.add_row(answer, _short(pair.reference), *said, pair.verdict)
    console.print(table, markup=False)


def _print_beside_bare(counts: dict[tuple[bool, bool], int], console: Console) -> None:
    table = Table("beside bare math-verify", "it says right", "it says wrong")
    for is_right, words in ((True, "our verdict: right"), (False, "our verdict: wrong")):
        table.add_row(words, *(str(counts.get((is_right, bare), 0)) for bare in (True, False)))
    console.print(table, markup=False)


def _answer_of(text: str) -> str:
    """The last box of a completion, or its end."""
    return last_box(text) or text[-_WIDTH:]


def _short(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= _WIDTH else shown[: _WIDTH - 1] + "…"
