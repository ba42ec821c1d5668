"""`megatron-rl data TOOL`: reads files, calls a tool, writes its rows and its report.

The report is printed as a table and written beside the output as OUT.report.json.
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.data.code_tests import CodeTestOptions, check_tests, run_on_tests
from megatron_rl.data.dedupe import decontaminate, dedupe
from megatron_rl.data.difficulty import DifficultyOptions, filter_difficulty, open_classes
from megatron_rl.data.format_filter import filter_format
from megatron_rl.data.labels import LabelRules
from megatron_rl.data.near_duplicates import DEFAULT_THRESHOLD
from megatron_rl.data.options import check_at_least
from megatron_rl.data.report import Report
from megatron_rl.data.rows import Row, encode_lines, read_rows
from megatron_rl.data.samples import read_samples
from megatron_rl.data.solutions import check_sandbox, read_solutions
from megatron_rl.data.traces import TraceOptions, mine_traces, read_training_rollouts
from megatron_rl.data.translate import (
    Chosen,
    TranslateOptions,
    choose,
    read_translations,
    request_of,
    translate,
)
from megatron_rl.launcher import prompts_command
from megatron_rl.launcher.evaluation import grade
from megatron_rl.launcher.terminal_text import printable
from megatron_rl.launcher.whole_file import write_whole
from megatron_rl.trainer.traces import read_traces
from verification.comparisons import code_limits

Handler = Callable[[argparse.Namespace, Console], int]


def add_arguments(
    parser: argparse.ArgumentParser, until_death: Callable[[Callable[[], None]], int]
) -> None:
    """Arguments of all tools; until_death: exit code of work whose processes may die."""
    tools = parser.add_subparsers(dest="tool", required=True)
    graded = tools.add_parser("grade", help="samples of every problem by a model, graded")
    grade.add_arguments(graded, until_death)
    _add_difficulty(tools.add_parser("difficulty", help="keep what is neither too hard nor easy"))
    _add_traces(tools.add_parser("traces", help="mine a run for traces of a cold start"))
    _add_filter_format(tools.add_parser("filter-format", help="one comparable answer a problem"))
    _add_dedupe(tools.add_parser("dedupe", help="drop near duplicates within a file"))
    _add_decontaminate(tools.add_parser("decontaminate", help="drop what evaluations ask"))
    _add_code_tests(tools.add_parser("code-tests", help="hold tests against solutions"))
    _add_translate(tools.add_parser("translate", help="a share of the problems in six languages"))
    prompts_command.add_check_arguments(tools.add_parser("check", help="faults with their rows"))
    prompts_command.add_show_arguments(tools.add_parser("show", help="as the model sees them"))


def _add_files(parser: argparse.ArgumentParser, handler: Handler, task: str = "math") -> None:
    """Input and output, which all tools have."""
    parser.add_argument("prompts", type=Path, help="JSONL of prompts")
    parser.add_argument("--out", type=Path, required=True, help="JSONL to write")
    parser.add_argument("--task", default=task, help="of lines that name none (%(default)s)")
    parser.set_defaults(handler=handler)


def _add_difficulty(parser: argparse.ArgumentParser) -> None:
    _add_files(parser, _difficulty)
    parser.add_argument(
        "--samples", type=Path, required=True,
        help="folder with rollouts, a file of them, or JSONL of {id, correct, answers}",
    )  # fmt: skip
    parser.add_argument("--label", default="", help="one evaluation of the folder of samples")
    parser.add_argument("--config", type=Path, help="TOML file whose [reward] has your tasks")
    rules, options = LabelRules(), DifficultyOptions()
    parser.add_argument("--labels", choices=["keep", "drop", "relabel"], default=rules.action)
    for name in ("label_share", "max_label_share", "relabel_share"):
        _add_number(parser, name, getattr(rules, name))
    for name in ("above", "up_to", "min_samples"):
        _add_number(parser, name, getattr(options, name))


def _add_filter_format(parser: argparse.ArgumentParser) -> None:
    _add_files(parser, _filter_format)
    parser.add_argument("--tasks", nargs="+", default=["math"], help="to filter; default: math")


def _filter_format(options: argparse.Namespace, console: Console) -> int:
    _check_output(options)
    rows = read_rows(options.prompts, task=options.task)
    kept, report = filter_format(rows, tasks=options.tasks)
    return _write_rows(options, kept, report, console)


def _add_dedupe(parser: argparse.ArgumentParser) -> None:
    _add_files(parser, _dedupe)
    _add_number(parser, "threshold", DEFAULT_THRESHOLD)


def _add_decontaminate(parser: argparse.ArgumentParser) -> None:
    _add_files(parser, _decontaminate)
    parser.add_argument(
        "--against", type=Path, nargs="+", required=True, help="JSONL of evaluation problems"
    )
    _add_number(parser, "threshold", DEFAULT_THRESHOLD)


def _dedupe(options: argparse.Namespace, console: Console) -> int:
    _check_output(options)
    kept, report = dedupe(
        read_rows(options.prompts, task=options.task), threshold=options.threshold
    )
    return _write_rows(options, kept, report, console)


def _decontaminate(options: argparse.Namespace, console: Console) -> int:
    _check_output(options)
    rows = read_rows(options.prompts, task=options.task)
    evaluations = [row for path in options.against for row in read_rows(path, task=options.task)]
    kept, report = decontaminate(rows, evaluations, threshold=options.threshold)
    return _write_rows(options, kept, report, console)


def _add_code_tests(parser: argparse.ArgumentParser) -> None:
    _add_files(parser, _code_tests, task="code")
    parser.add_argument(
        "--solutions", type=Path, required=True,
        help="folder with rollouts, a file of them, or JSONL of {id, language, source}",
    )  # fmt: skip
    parser.add_argument("--config", type=Path, help="TOML file with [reward]: limits, tasks")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    defaults = CodeTestOptions()
    parser.add_argument("--languages", nargs="*", default=list(defaults.languages))
    for name in ("min_solutions", "agreement", "relabel_agreement", "min_tests"):
        _add_number(parser, name, getattr(defaults, name))


def _code_tests(options: argparse.Namespace, console: Console) -> int:
    names = [field.name for field in fields(CodeTestOptions) if field.name != "languages"]
    wanted = CodeTestOptions(
        **{name: getattr(options, name) for name in names}, languages=tuple(options.languages)
    )
    check_at_least("--workers", options.workers, 1)
    _check_output(options)
    rows = read_rows(options.prompts, task=options.task)
    config = _config(options.config)
    solutions = read_solutions(options.solutions, config.reward)
    limits = check_sandbox(code_limits(config.reward))
    printed, counts = run_on_tests(rows, solutions, limits, workers=options.workers)
    kept, report = check_tests(rows, printed, options=wanted, counts=counts)
    return _write_rows(options, kept, report, console)


def _add_translate(parser: argparse.ArgumentParser) -> None:
    _add_files(parser, _translate)
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument(
        "--requests", action="store_true", help="write what is to be translated to --out"
    )
    how.add_argument("--translations", type=Path, help="JSONL of {id, language, text}")
    how.add_argument("--endpoint", help="ask this server, as in http://127.0.0.1:30000/v1")
    parser.add_argument("--served-model", help="with --endpoint: the model's name there")
    parser.add_argument("--key-variable", help="environment variable with the server's key")
    for name, default in (("attempts", 3), ("at_once", 16), ("timeout_s", 120.0)):
        _add_number(parser, name, default)
    _add_number(parser, "max_tokens", 4096)
    defaults = TranslateOptions()
    for name in ("share", "seed"):
        _add_number(parser, name, getattr(defaults, name))
    parser.add_argument("--languages", nargs="+", default=list(defaults.languages))
    parser.add_argument("--tasks", nargs="+", default=list(defaults.tasks))
    parser.add_argument("--keep-source", action="store_true", help="add translations")


def _translate(options: argparse.Namespace, console: Console) -> int:
    wanted = TranslateOptions(
        share=options.share,
        languages=tuple(options.languages),
        tasks=tuple(options.tasks),
        keep_source=options.keep_source,
        seed=options.seed,
    )
    _check_output(options)
    rows = read_rows(options.prompts, task=options.task)
    chosen, ineligible = choose(rows, wanted)
    if options.requests:
        write_whole(options.out, encode_lines([request_of(item) for item in chosen]))
        said = ", ".join(f"{count} {reason}" for reason, count in ineligible.most_common())
        console.print(
            f"{options.out}: {len(chosen)} of {len(rows)} problems to translate; not eligible: "
            f"{said or 'none'}",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
        return 0
    if options.endpoint is not None:
        found, figures = _ask_endpoint(options, chosen)
    else:
        found, figures = read_translations(options.translations), {}
    kept, report = translate(rows, lambda r: found.get((r.id, r.language), ""), wanted)
    report = msgspec.structs.replace(report, figures={**report.figures, **figures})
    return _write_rows(options, kept, report, console)


def _ask_endpoint(
    options: argparse.Namespace, chosen: list[Chosen]
) -> tuple[dict[tuple[str, str], str], dict[str, Any]]:
    """Translations by a served model, and what it took; they are kept beside the output."""
    # Needs aiohttp, which the other tools do without.
    from megatron_rl.data.asking import ask_all
    from megatron_rl.data.chat_endpoint import Endpoint

    if not options.served_model:
        raise InputError("--endpoint needs --served-model NAME: the name that the server gives it")
    key = ""
    if options.key_variable is not None:
        key = os.environ.get(options.key_variable, "")
        if not key:
            raise InputError(f"--key-variable {options.key_variable}: it is not set, or empty")
    endpoint = Endpoint(
        options.endpoint, options.served_model, options.timeout_s, options.max_tokens, key
    )
    beside = options.out.with_name(f"{options.out.name}.translations.jsonl")
    asked = ask_all(chosen, endpoint, beside, attempts=options.attempts, at_once=options.at_once)
    return asked.texts, {"requests": asked.figures()}


def _add_traces(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    parser.add_argument("--out", type=Path, required=True, help="JSONL to write")
    parser.add_argument("--prompts", type=Path, help="the run's prompts, for all their messages")
    parser.add_argument("--instructions", type=Path, help="traces to mix in")
    parser.add_argument("--instruction-task", help="task of those; default: as they are")
    parser.add_argument("--template-opens-thoughts", action="store_true")
    defaults = TraceOptions()
    for field in fields(defaults):
        if field.name != "template_opens_thoughts":
            _add_number(parser, field.name, getattr(defaults, field.name))
    parser.set_defaults(handler=_traces)


def _add_number(parser: argparse.ArgumentParser, name: str, default: float) -> None:
    flag = f"--{name.replace('_', '-')}"
    parser.add_argument(flag, type=type(default), default=default, help="default %(default)s")


def _difficulty(options: argparse.Namespace, console: Console) -> int:
    rules = LabelRules(
        action=options.labels,
        label_share=options.label_share,
        max_label_share=options.max_label_share,
        relabel_share=options.relabel_share,
    )
    wanted = DifficultyOptions(options.above, options.up_to, options.min_samples, rules)
    _check_output(options)
    rows = read_rows(options.prompts, task=options.task)
    config = _config(options.config)
    samples = read_samples(options.samples, config.reward, label=options.label)
    with open_classes(config.reward, config.verifier) as classify:
        kept, report = filter_difficulty(
            rows, samples, options=wanted, reward=config.reward, classify=classify
        )
    return _write_rows(options, kept, report, console)


def _traces(options: argparse.Namespace, console: Console) -> int:
    wanted = TraceOptions(**{f.name: getattr(options, f.name) for f in fields(TraceOptions)})
    _check_output(options)
    given = [] if options.instructions is None else read_traces(options.instructions)
    if options.instruction_task is not None:
        given = [msgspec.structs.replace(trace, task=options.instruction_task) for trace in given]
    rows = [] if options.prompts is None else read_rows(options.prompts)
    traces, report = mine_traces(
        read_training_rollouts(options.run_dir),
        instructions=given,
        prompts={row.prompt.id: row.prompt for row in rows},
        options=wanted,
    )
    return _write(options.out, traces, report, console)


def _config(path: Path | None) -> Config:
    """The configuration whose tasks count; without a file the defaults."""
    return load_config(path, [])


# --- output -------------------------------------------------------------------------------------


def _check_output(options: argparse.Namespace) -> None:
    """Raise InputError for an output that cannot be written, or that is the input."""
    folder = options.out.resolve().parent
    if not folder.is_dir():
        raise InputError(f"--out {options.out}: there is no folder {folder}")
    given: list[Any] = []
    for name, value in vars(options).items():
        if name != "out":
            given += value if isinstance(value, list) else [value]
    files = [value for value in given if isinstance(value, Path)]
    if any(file.resolve() == options.out.resolve() for file in files):
        raise InputError(f"--out {options.out} is a file that is read: name another one")


def _write_rows(
    options: argparse.Namespace, rows: list[Row], report: Report, console: Console
) -> int:
    return _write(options.out, [row.line() for row in rows], report, console)


def _write(out: Path, lines: list[Any], report: Report, console: Console) -> int:
    """Write lines and report, and print the counts; exit code 0."""
    write_whole(out, encode_lines(lines))
    beside = out.with_name(f"{out.name}.report.json")
    write_whole(beside, msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n")
    print_report(report, console)
    console.print(f"{out}, {beside}", markup=False, highlight=False, soft_wrap=True)
    return 0


def print_report(report: Report, console: Console) -> None:
    """Counts as a table."""
    table = Table(f"data {report.tool}", "rows")
    table.add_row("read", str(report.read))
    for kind, counts in (
        ("dropped", report.dropped), ("added", report.added), ("changed", report.changed)
    ):  # fmt: skip
        for name, count in counts.items():
            table.add_row(f"{kind}: {printable(name)}", str(count))
    table.add_row("written", str(report.written))
    for name, value in report.figures.items():
        if isinstance(value, list):
            continue  # Of rows: in the file alone.
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        table.add_row(name, printable(shown))
    console.print(table, markup=False)
