"""`megatron-rl audit RUN`: check that a run's records agree with each other and its model."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_rl.cli.command_line.command import command
from megatron_rl.cli.command_line.parameters import Json, RunFolder
from megatron_rl.cli.command_line.printing import (
    open_console,
    outlive_terminal,
    progress,
    say,
    show_table,
)
from megatron_rl.config.errors import InputError, printable
from megatron_rl.config.files import load_run
from megatron_rl.evaluation.runs.results import RESULTS
from megatron_rl.observe.audit import audit_records
from megatron_rl.observe.audit_findings import Findings
from megatron_rl.protocol.exports import FINAL


@dataclass(frozen=True)
class AuditOptions:
    run_dir: RunFolder
    model: bool = False
    """Also load hf/final in transformers: compare its logits with the trainer's, and repeat the
    evaluation; minutes."""
    json: Json = False


@command("audit", "Check a run's records for consistency.")
def audit(options: AuditOptions, console: Console) -> int:
    """Exit code: 0 (all holds), 1, 2 (bad input)."""
    if options.model:
        _check_exported(options.run_dir)
    with progress(open_console(stderr=True), "files of rollouts") as report:
        findings = audit_records(options.run_dir, report)
    found: dict[str, object] = {}
    if options.model:
        # torch and transformers are slow to load.
        from megatron_rl.launcher.audit_model import audit_model

        found = audit_model(options.run_dir)
        for name, value in found.items():
            if name.startswith("is_"):
                findings.check("hf/final is the model that the run reports", bool(value), name)
    # The exit code stays the verdict when the reader of a pipe has seen enough.
    with outlive_terminal():
        if options.json:
            tree = dataclasses.asdict(findings) | {"is_sound": findings.is_sound, "model": found}
            say(console, json.dumps(tree))
        else:
            _print(findings, found, console)
    return 0 if findings.is_sound else 1


def _check_exported(run_dir: Path) -> None:
    """Raise InputError for a folder without the model of a run that has ended."""
    folder = run_dir / "hf" / FINAL
    if (run_dir / RESULTS).exists():
        raise InputError(
            f"{run_dir} is an evaluation and has no model: give the run that trained "
            "the model, or leave --model out"
        )
    if not (run_dir / "summary.json").exists():
        raise InputError(f"{run_dir} has no summary.json: its run has not ended")
    if not load_run(run_dir).train.steps:
        raise InputError(
            f"{run_dir} took no step of reinforcement learning, so it has no {folder}, which "
            "--model loads: leave --model out"
        )
    if not folder.is_dir():
        raise InputError(f"{folder} is gone, and --model loads it: leave --model out")


def _print(findings: Findings, found: dict[str, object], console: Console) -> None:
    table = Table("rule", "looked at", "broken", box=None, pad_edge=False)
    for name, rule in findings.rules.items():
        table.add_row(name, str(rule.looked_at), str(rule.broken))
    show_table(console, table)
    lines = [f"broken: {name}: {text}" for name, rule in findings.rules.items()
             for text in rule.examples]  # fmt: skip
    lines += [f"not looked at: {text}" for text in findings.skipped]
    lines += [f"{name} {value}" for name, value in found.items()]
    for line in lines:
        say(console, printable(line))
    console.print(findings.verdict)
