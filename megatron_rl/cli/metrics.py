"""`megatron-rl metrics`: meanings of metrics, and exports of a run's metrics."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from megatron_rl.cli.command_line.command import NoOptions, command, group
from megatron_rl.cli.command_line.parameters import Overrides, RunFolder
from megatron_rl.cli.command_line.printing import say
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_run, override
from megatron_rl.observe.exporters.exporter import Exporter, destinations
from megatron_rl.observe.metrics_table import markdown
from megatron_rl.protocol.whole_file import check_writable

group(__name__, "What metrics mean; metrics of a run for other programs.")


@command("table", "Print docs/metrics.md.")
def table(options: NoOptions, console: Console) -> int:
    print(markdown(), end="", file=console.file)
    return 0


@command("dashboard", "Print a dashboard for Grafana.")
def print_dashboard(options: NoOptions, console: Console) -> int:
    # Only this part loads prometheus_client.
    from megatron_rl.observe.exporters.grafana import dashboard

    print(dashboard(), end="", file=console.file)
    return 0


@command("alerts", "Print rules for Prometheus.")
def print_alerts(options: NoOptions, console: Console) -> int:
    from megatron_rl.observe.exporters.grafana import alerts

    print(alerts(), end="", file=console.file)
    return 0


@dataclass(frozen=True)
class ExportOptions:
    run_dir: RunFolder
    overrides: Overrides = field(default_factory=list)
    follow: bool = False
    """Also pass on new rows, until Ctrl-C."""
    out: Path | None = None
    """Folder for the files of TensorBoard and W&B; default: the run's folder."""


@command("export", "Pass on the metrics of a run, finished or not.")
def export(options: ExportOptions, console: Console) -> int:
    overrides = [override("run.dir", str(options.run_dir)), *options.overrides]
    config = load_run(options.run_dir, overrides)
    if not config.metrics.is_on:
        raise InputError(
            "nothing is to be exported: give metrics.tensorboard=true, metrics.wandb=offline or "
            "metrics.prometheus_port=9400"
        )
    out = options.out or config.run.dir
    places = destinations(config, out)
    for place in places.values():
        if isinstance(place, Path):
            check_writable(place, "give --out FOLDER elsewhere")
    with Exporter(config, out) as exporter:
        where = " and ".join(f"{name} ({place})" for name, place in places.items())
        say(console, f"{exporter.passed_on:,} rows of {options.run_dir} passed on to {where}")
        if options.follow:
            say(console, "new rows follow until Ctrl-C")
        elif config.metrics.prometheus_port:
            say(console, "the Prometheus server ends with this command: --follow keeps it")
        while options.follow:
            time.sleep(config.metrics.poll_s)
            exporter.advance()
    return 0
