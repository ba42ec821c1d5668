"""Runs a whole run on this node: checks, prepares its folder, leads its phases, summarizes it.

Used by `megatron-rl run`, and in part by `nodes.py` and `megatron-rl eval`. One process, one
thread. All processes read RUN_DIR/config.toml; those of an evaluation without training read
RUN_DIR/config.LABEL.toml.
"""

import json
import logging
import shlex
import sys
from pathlib import Path

from rich.console import Console

from megatron_rl.cli.command_line.printing import say
from megatron_rl.config.files import dump_toml
from megatron_rl.config.tree import Config
from megatron_rl.data.dropped_prompts import write_dropped
from megatron_rl.launcher import preflight
from megatron_rl.launcher.claims import clear_claims
from megatron_rl.launcher.cold_start import left_behind_text, steps_left_behind
from megatron_rl.launcher.continuation import (
    changed_lines,
    failure_noted,
    forget_queue,
    has_ledger,
    why_not_continued,
)
from megatron_rl.launcher.node import first_node
from megatron_rl.launcher.phases import lead
from megatron_rl.launcher.placement import ONE_NODE
from megatron_rl.launcher.ports import draw_label, ports_text, resolve_ports
from megatron_rl.launcher.prompt_record import pin_revisions, record_prompts
from megatron_rl.launcher.run_folder import (
    CONFIG,
    Beginning,
    check_run_folder,
    checkpoints_passed_over,
    locked,
    set_aside,
    write_config,
)
from megatron_rl.observe.deaths import RunFailed
from megatron_rl.observe.facts import run_facts
from megatron_rl.observe.summary import RunFacts, summarize
from megatron_rl.observe.summary_text import render_text
from megatron_rl.protocol.checkpoint_folder import step_of
from megatron_rl.protocol.disk_room import WriteFailed, disk_faults_named, write_when_room
from megatron_rl.protocol.exports import COLD_START, FINAL, SFT_BASELINE
from megatron_rl.protocol.metrics import stream_rows
from megatron_rl.protocol.stop_request import clear_stop
from megatron_rl.protocol.whole_file import write_whole
from megatron_rl.rollout_queue.replay_datasets import prepare_datasets
from megatron_rl.trainer.sft_dataset import forget_sft_dataset
from megatron_rl.weights.folders.staging import recover

log = logging.getLogger(__name__)


def run(config: Config, console: Console) -> None:
    """Cold start, reinforcement learning, SFT baseline, evaluation, summary.

    Raises InputError before anything starts, RoleDied, DeadlineExceeded.
    """
    config = pin_revisions(config)
    prompts = preflight.check(config)
    ONE_NODE.place(config)
    for note in preflight.notes_of_host(config):
        console.print(note, style="bold red", highlight=False, soft_wrap=True)
    with locked(config.run.dir) as lock:
        # Checked again: another launcher may have held the lock until now.
        with disk_faults_named(config.run.dir):
            beginning = check_run_folder(config)
            config = begin(config, beginning, prompts, console)
        with failure_noted(config.run.dir), first_node(config, console, lock) as node:
            lead(node, is_resumed=beginning.checkpoint is not None)
        conclude(config, node.wall_s, console)


def begin(
    config: Config, beginning: Beginning, prompts: preflight.PromptReport, console: Console
) -> Config:
    """Prepare the locked run folder and tell where the run begins; returns the resolved config."""
    resumed = beginning.checkpoint
    forget_sft_dataset()
    # Before anything in the folder changes.
    is_left = has_ledger(config.run.dir)
    why_not = why_not_continued(config, resumed) if is_left else ""
    continues = is_left and not why_not
    # It may refuse to resume.
    is_resumed = resumed is not None or continues
    changed = changed_lines(config) if is_resumed else []
    record_prompts(config, prompts.files, prompts.own_files, is_resumed=is_resumed)
    clear_stop(config.run.dir)
    clear_claims(config.run.dir)
    passed_over = checkpoints_passed_over(config, resumed)
    if not continues:
        forget_queue(config.run.dir, resumed)
        if beginning.is_again and resumed is None:
            say(console, begin_anew(config))
    config = prepare_run_folder(config, resumed, prompts, console, continues=continues)
    for text in passed_over:
        log.warning("%s", text)
        say(console, f"warning: {text}")
    if is_resumed:
        text = _resumption_text(config, beginning, why_not, continues=continues)
        for line in (text, *changed):
            log.info("%s", line)
            say(console, line)
    return config


def begin_anew(config: Config) -> str:
    """Move aside the files of an attempt without a checkpoint; returns the text about it."""
    run_dir, steps = config.run.dir, steps_left_behind(config)
    kept = left_behind_text(config, steps)
    return (
        f"{run_dir} holds an attempt of this run that ended before its first checkpoint. The run "
        f"starts again{kept}; the attempt's other files are now in {set_aside(run_dir, steps)}."
    )


def _resumption_text(config: Config, beginning: Beginning, why_not: str, *, continues: bool) -> str:
    step, source = 0, "the beginning, because no checkpoint is complete yet"
    if beginning.checkpoint is not None:
        step, source = step_of(beginning.checkpoint), str(beginning.checkpoint)
        named = config.checkpoint.resume
        if named != "auto" and Path(named).resolve() != beginning.checkpoint.resolve():
            source += f", its newest one since it began at {named} (checkpoint.resume)"
    if (end := beginning.ended_after) > step:
        source += f". The run had ended after step {end} and takes the later steps again"
    kept = "What was generated but not trained on is generated again"
    if why_not:
        kept += f", because the queue's ledger is not continued: {why_not}"
    if continues:
        kept = (
            "The queue continues its ledger: completions that had arrived are not generated again, "
            "and the trainer repeats its later steps on the stored batches"
        )
    return (
        f"Resuming {config.run.dir} after step {step} of {config.train.steps}, from {source}. "
        f"{kept}."
    )


def conclude(config: Config, wall_s: dict[str, float], console: Console) -> None:
    """Write and print the summary of a run that has ended; wall_s: seconds by phase.

    Raises RunFailed when the disk stays full.
    """
    run_dir = config.run.dir

    def facts() -> RunFacts:
        return run_facts(config, run_dir, wall_s)

    summary = summarize(stream_rows(run_dir / "metrics.jsonl"), facts())
    path, content = run_dir / "summary.json", json.dumps(summary, indent=2) + "\n"
    try:
        write_when_room(
            path, lambda: write_whole(path, content), limit_s=config.checkpoint.write_timeout_s
        )
    except WriteFailed as error:
        raise RunFailed(str(error)) from error
    # Facts are read again, because the text names the summary too.
    text = f"{render_text(summary, facts())}\n{_next_commands(run_dir)}"
    say(console, "\n" + text)


def _next_commands(run_dir: Path) -> str:
    """Commands to look at the run. Whole paths: scripts change the folder before they call us."""
    command = Path(sys.executable).with_name("megatron-rl")
    if not command.exists():
        command = Path("megatron-rl")
    place = shlex.quote(str(run_dir))
    return f"Look at it          {command} report {place} (plots), view {place} (rollouts)"


def log_into(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(
        logging.Formatter("%(asctime)s launch %(levelname)s %(name)s: %(message)s")
    )
    logging.getLogger().addHandler(handler)
    logging.getLogger("megatron_rl").setLevel(logging.INFO)


def prepare_run_folder(
    config: Config,
    resumed: Path | None,
    prompts: preflight.PromptReport,
    console: Console,
    *,
    replaces_config: bool = False,
    continues: bool = False,
) -> Config:
    """Resolve ports and save the config that all processes read; print notes about prompts.

    replaces_config: overwrite the config, for a resumed evaluation, which may have other ports.
    continues: the queue continues its ledger.
    """
    resolved = draw_label(resolve_ports(config.replaced(run={"dir": config.run.dir.resolve()})))
    (resolved.run.dir / "logs").mkdir(parents=True, exist_ok=True)
    for name in (COLD_START, SFT_BASELINE, FINAL):
        recover(resolved.run.dir / "hf" / name)
    # Before the configuration is replaced, because this may refuse its input.
    notes = [*prompts.notes, *prepare_datasets(resolved)]
    if replaces_config:
        write_whole(resolved.run.dir / CONFIG, dump_toml(resolved), is_private=True)
    else:
        write_config(resolved, resumed, continues=continues)
    write_dropped(resolved.run.dir, prompts.dropped)
    log_into(resolved.run.dir / "logs" / "launch.log")
    log.info("ports: %s", ports_text(resolved.ports))
    for note in notes:
        log.info("%s", note)
        say(console, note)
    return resolved
