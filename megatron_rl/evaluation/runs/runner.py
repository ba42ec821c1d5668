"""Evaluates a model folder on all sets with the serving processes of a run, without a trainer.

Used by `megatron-rl eval`. Repeating the command generates the missing completions.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megatron_rl.cli.command_line.printing import say
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.config.layers import changed_keys, first_of
from megatron_rl.config.tree import Config
from megatron_rl.data.prompts import prompts_of_run
from megatron_rl.evaluation.runs.results import RESULTS, Report, make_report, write_report
from megatron_rl.evaluation.runs.tables import print_report
from megatron_rl.launcher import preflight
from megatron_rl.launcher.dry_run_text import NOTHING, evaluation_lines
from megatron_rl.launcher.node import first_node
from megatron_rl.launcher.phases import evaluate_folder
from megatron_rl.launcher.prompt_record import pin_revisions, record_prompts
from megatron_rl.launcher.run import prepare_run_folder
from megatron_rl.launcher.run_folder import CONFIG, locked
from megatron_rl.protocol.stop_request import clear_stop
from megatron_rl.rollout_queue.evaluation import (
    EvaluationSet,
    evaluation_sets,
    is_of,
    read_evaluated,
    recorded_problems,
)

_SECTIONS = ("model", "prompts", "render", "sampling", "reward", "eval")
"""With run.seed, what the results of an evaluation depend on; but for eval.timeout_s."""


def evaluate(
    config: Config,
    label: str,
    console: Console,
    *,
    dry_in: Path | None = None,
    option: str = "--run-dir",
) -> None:
    """Evaluate the model folder, write eval.json, print its tables.

    dry_in: only check, and print the planned work in this folder. option: of the command, which
    names run.dir. Raises InputError before any process starts, RoleDied, DeadlineExceeded.
    """
    if not config.eval.is_wanted:
        raise InputError(
            "eval.prompts is 0 and there are no [[eval.sets]]: give the number of held-out prompts "
            "to evaluate on, or name sets"
        )
    if not re.fullmatch(r"[A-Za-z0-9_-]+", label):
        raise InputError(f"--label {label!r}: it names files; use letters, digits, - and _")
    config = pin_revisions(_without_training(config))
    is_again = _check_earlier(config, label, option)
    prompts = preflight.check(config, is_known_folder=is_again)
    dropped = frozenset(prompt.id for prompt in prompts.dropped)
    loaded = prompts_of_run(config, dropped)
    sets = evaluation_sets(config, loaded)
    changed = _check_recorded(config, label, sets, option)
    if dry_in is not None:
        problems = sum(len(one.prompts) for one in sets)
        missing = _missing(config, label, sets)
        lines = evaluation_lines(config, label, dry_in, problems, missing)
        say(console, *prompts.notes, *lines, NOTHING)
        return
    with locked(config.run.dir) as lock:
        # Again: another launcher may have changed the folder before this one got the lock.
        is_again = _check_earlier(config, label, option)
        clear_stop(config.run.dir)
        missing = _missing(config, label, sets)
        if is_again:
            say(console, _again_text(config, missing, changed))
        if missing:
            record_prompts(config, prompts.files, prompts.own_files, is_resumed=False)
            config = prepare_run_folder(config, None, prompts, console, replaces_config=is_again)
            with first_node(config, console, lock) as node:
                evaluate_folder(node, label, ["--keep-evaluated"])
        report = make_report(config, label, sets, left_out=loaded.dropped)
        write_report(config.run.dir, report)
    print_report(report, console)
    _say_where(config, label, report, console)


def _without_training(config: Config) -> Config:
    return config.model_copy(
        update={
            "sft": config.sft.model_copy(update={"steps": 0, "baseline": False}),
            "train": config.train.model_copy(update={"steps": 0, "epochs": 0}),
            "checkpoint": config.checkpoint.model_copy(update={"resume": "never"}),
        }
    )


def _check_earlier(config: Config, label: str, option: str) -> bool:
    """Whether the folder holds an earlier part of this evaluation.

    Raises InputError when it holds another evaluation: results never mix.
    """
    run_dir = config.run.dir
    path = run_dir / CONFIG
    if not path.exists():
        return False
    other = f"name another folder with {option} DIR"
    # No label: the first start ended before its processes began.
    labels = {path.name.split(".")[1] for path in run_dir.glob("config.*.toml")}
    if labels and label not in labels:
        raise InputError(f"{run_dir} already holds another run, or another --label: {other}")
    earlier = load_config(path)
    changed = list(filter(_counts, changed_keys(earlier, config)))
    if earlier.train.steps:
        changed.append("train.steps")
    if changed:
        raise InputError(
            f"{run_dir} holds an evaluation with other values of {first_of(changed)}: {other}, or "
            f"give the values of {path} to resume that one"
        )
    return True


def _counts(key: str) -> bool:
    """Whether results depend on a key: completions under different values must not mix."""
    if key.startswith("run.") or key == "eval.timeout_s":
        return key == "run.seed"
    return key.partition(".")[0] in _SECTIONS


def _missing(config: Config, label: str, sets: list[EvaluationSet]) -> int:
    """Number of problems without all their completions."""
    found = [read_evaluated(config.run.dir, one.label(label), one) for one in sets]
    return sum(len(one.prompts) for one in sets) - sum(map(len, found))


def _check_recorded(config: Config, label: str, sets: list[EvaluationSet], option: str) -> int:
    """Number of recorded problems that have changed, and so are generated again.

    Raises InputError for recorded problems that a set lacks: a resumed evaluation would remove
    their completions.
    """
    changed = 0
    for one in sets:
        prompts = {prompt.id: prompt for prompt in one.prompts}
        recorded = recorded_problems(config.run.dir, one.label(label))
        lacking = [name for name in recorded if name not in prompts]
        if lacking:
            raise InputError(lacking_text(config.run.dir, lacking, one.described, option))
        changed += sum(not is_of(record, prompts) for record in recorded.values())
    return changed


def lacking_text(folder: Path, lacking: Sequence[str], source: str, option: str) -> str:
    """The refusal of a source without problems that the folder has completions of, by id."""
    return (
        f"{folder} holds completions of {len(lacking)} problems that are not among {source} (first "
        f"{lacking[0]!r}), and a resume would remove them: name another folder with {option} DIR, "
        "or give a file with all earlier problems, to which others may be added. A row without an "
        "id has the number of its line as id, so add rows at the end"
    )


def _again_text(config: Config, missing: int, changed: int) -> str:
    if not missing:
        return f"{config.run.dir} holds all completions: nothing is generated."
    said = f"; {changed} of them are replaced, because their question or answer has changed"
    return (
        f"Resuming the evaluation in {config.run.dir}: {missing} problems are missing"
        f"{said if changed else ''}."
    )


def _say_where(config: Config, label: str, report: Report, console: Console) -> None:
    for name, found in report["sets"].items():
        if count := found["missing_problems"] + found["short_problems"]:
            say(
                console,
                f"warning: {name}: {count} problems lack completions; repeat the command to retry",
            )
    say(
        console,
        f"Figures: {config.run.dir / RESULTS}",
        f"Completions: {config.run.dir}/rollouts/eval_{label}*.jsonl",
    )
