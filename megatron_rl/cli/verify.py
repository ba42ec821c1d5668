"""`megatron-rl verify FILE`: grades a file of completions again and prints the verdicts."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer
from rich.console import Console
from rich.table import Column, Table

from megatron_rl.cli.command_line.command import command
from megatron_rl.cli.command_line.parameters import Json, OneConfig, Overrides
from megatron_rl.cli.command_line.printing import show_table
from megatron_rl.config.errors import InputError, printable
from megatron_rl.config.files import load_config
from megatron_rl.config.shipped import config_path as path_of
from megatron_rl.config.staging import longest_stage, resolve_stages
from megatron_rl.config.tree import Config
from megatron_rl.data.answers import accepted_answers
from megatron_rl.data.jsonl_source import COMPARED, refuse_slips
from megatron_rl.data.prompts import prompts_of_run
from megatron_rl.launcher.thinking import decide_thinking
from megatron_rl.protocol.line_errors import decode_texts
from megatron_rl.protocol.rollout_files import RolloutRecord
from megatron_rl.protocol.types import Prompt, Score, ScoreFailed
from megatron_rl.rollout_queue.schedule import length_rule
from verification import audit, settings
from verification.format import last_box
from verification.library import Answer, Grading

_WIDTH = 48


@dataclass(frozen=True)
class VerifyOptions:
    file: Annotated[Path, typer.Argument()]
    """Rollouts of a run, or JSONL of {text, answer}."""
    overrides: Overrides = field(default_factory=list)
    config: OneConfig = None
    disagree: bool = False
    """Show where math parsers differ."""
    json: Json = False


class Graded(NamedTuple):
    """Lines of a file with their verdicts."""

    records: Sequence[audit.Record]
    scores: Sequence[Score | ScoreFailed]


@command("verify", "Grade a file of completions again, and say why.")
def verify_file(options: VerifyOptions, console: Console) -> int:
    """Exit code: 0, 1 (grading failed somewhere), 2 (bad input)."""
    config_path = None if options.config is None else path_of(options.config)
    config = _read_config(options.file, config_path, options.overrides)
    graded = _grade(options.file, config, disagree=options.disagree)
    if options.json:
        print(json.dumps(_as_json(graded, disagree=options.disagree)), file=console.file)
    else:
        _print(graded, console, disagree=options.disagree)
    return int(any(isinstance(score, ScoreFailed) for score in graded.scores))


def _read_config(path: Path, config_path: Path | None, overrides: list[str]) -> Config:
    """The default configuration of a file in RUN/rollouts is RUN/config.toml."""
    if config_path is None:
        saved = path.resolve().parent.parent / "config.toml"
        config_path = saved if saved.exists() else None
    return decide_thinking(load_config(config_path, overrides))


def _grade(path: Path, config: Config, *, disagree: bool) -> Graded:
    """Grade the lines of a file. Raises InputError."""
    settings.check_functions(config.reward)
    # The longest stage judges all evaluations of a run.
    is_evaluation = path.name.startswith(("eval_", "dropped_eval_"))
    rules = [] if is_evaluation else [length_rule(stage) for stage in resolve_stages(config)]
    _check_lines(path, config)
    records = audit.read_records(
        path, _prompts_by_id(config), rules, read_answers=_accepted_answers
    )
    longest = longest_stage(config)
    reward = audit.with_opinions(longest.reward) if disagree else longest.reward
    with Grading.of(longest.model_copy(update={"reward": reward})) as grading:
        scores = grading.score(record.sample for record in records)
    return Graded(records, scores)


def _check_lines(path: Path, config: Config) -> None:
    """Raise InputError for a misspelt key, and for a line without an answer to compare with."""
    keys = (*audit.KEYS, *(field.name for field in msgspec.structs.fields(RolloutRecord)))
    tasks = config.reward.all_tasks
    for number, line in decode_texts(path, dict[str, Any], expected=audit.EXPECTED):
        place = f"{path}:{number}"
        refuse_slips(line, keys, place)
        task = line.get("task", "math")
        is_compared = task in tasks and tasks[task].compare in COMPARED
        if not is_compared or line.get("is_outcome"):
            continue
        answer = line.get("answer", "")
        try:
            answers = _accepted_answers(answer, task)
        except InputError as error:
            raise InputError(f"{place}: {error}") from error
        if not answers and not line.get("other_answers"):
            told = f"the answer is empty ({answer!r})" if "answer" in line else "there is no answer"
            raise InputError(f"{place}: {told}; expected {audit.EXPECTED}")


def _accepted_answers(answer: Answer, task: str) -> list[str]:
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


def _as_json(graded: Graded, *, disagree: bool) -> dict[str, Any]:
    verdicts = audit.line_verdicts(graded.records, graded.scores)
    found: dict[str, Any] = {
        "completions": len(verdicts),
        "reasons": Counter(verdict.reason for verdict in verdicts),
        "lines": [verdict._asdict() for verdict in verdicts],
    }
    if disagree:
        pairs = audit.disagreements(graded.records, graded.scores)
        found["disagreements"] = [pair._asdict() for pair in pairs]
    return found


def _print(graded: Graded, console: Console, *, disagree: bool) -> None:
    _print_reasons(graded.records, graded.scores, console)
    _print_changes(graded.records, graded.scores, console)
    if disagree:
        _print_disagreements(audit.disagreements(graded.records, graded.scores), console)
        _print_beside_bare(audit.beside_bare(graded.scores), console)


def _print_reasons(
    records: Sequence[audit.Record], scores: Sequence[Score | ScoreFailed], console: Console
) -> None:
    # A pipe has 80 columns: answers may take several lines, reasons are never cut.
    texts = (Column(name, overflow="fold") for name in ("an answer", "its reference"))
    names = ("reason", "completions", "share", "mean reward")
    table = Table(*(Column(name, no_wrap=True) for name in names), *texts)
    for row in audit.reason_rows(records, scores):
        share = f"{100 * row.count / len(records):.1f} %"
        cells = (row.reason, str(row.count), share, f"{row.reward:.3f}")
        table.add_row(*cells, _short(_answer_of(row.answer)), _short(row.reference))
    show_table(console, table)


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
    reasons = (Column(name, no_wrap=True) for name in ("verdict in the file", "verdict now"))
    table = Table(*reasons, "completions")
    for (before, now), count in sorted(changed.items(), key=lambda item: -item[1]):
        table.add_row(before, now, str(count))
    show_table(console, table)


def _print_disagreements(found: list[audit.Disagreement], console: Console) -> None:
    if not found:
        console.print("The parsers disagree on no answer.")
        return
    texts = (Column(name, overflow="fold") for name in ("answer", "reference"))
    table = Table(*texts, *audit.PARSERS, Column("verdict", no_wrap=True))
    words = {True: "right", False: "wrong", None: "-"}
    for pair in found:
        said = [words[pair.said[name]] for name in audit.PARSERS]
        answer = _short(_answer_of(pair.answer))
        table.add_row(answer, _short(pair.reference), *said, pair.verdict)
    show_table(console, table)


def _print_beside_bare(counts: dict[tuple[bool, bool], int], console: Console) -> None:
    table = Table("beside bare math-verify", "it says right", "it says wrong")
    for is_right, words in ((True, "our verdict: right"), (False, "our verdict: wrong")):
        table.add_row(words, *(str(counts.get((is_right, bare), 0)) for bare in (True, False)))
    show_table(console, table)


def _answer_of(text: str) -> str:
    """The last box of a completion, or its end."""
    return last_box(text) or text[-_WIDTH:]


def _short(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= _WIDTH else shown[: _WIDTH - 1] + "…"
