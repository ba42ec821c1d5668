"""`megatron-rl metrics`: meanings of metrics, and exports of a run's metrics."""

import time
from dataclasses import dataclass, field

from rich.console import Console

from megatron_rl.cli.command_line.command import command, plain_app
from megatron_rl.cli.command_line.parameters import Overrides, RunFolder
from megatron_rl.cli.command_line.printing import say
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_run, override
from megatron_rl.observe.exporters.exporter import Exporter, destinations
from megatron_rl.observe.metrics_table import markdown

app = plain_app("What metrics mean; metrics of a run for other programs.")


@dataclass(frozen=True)
class NoOptions:
    """No options."""


@command(app, "table", "Print docs/metrics.md.")
def table(options: NoOptions, console: Console) -> int:
    """Exit code: 0."""
    print(markdown(), end="", file=console.file)
    return 0


@command(app, "dashboard", "Print a dashboard for Grafana.")
def print_dashboard(options: NoOptions, console: Console) -> int:
    """Exit code: 0."""
    # Only this part loads prometheus_client.
    from megatron_rl.observe.exporters.grafana import dashboard

    print(dashboard(), end="", file=console.file)
    return 0


@command(app, "alerts", "Print rules for Prometheus.")
def print_alerts(options: NoOptions, console: Console) -> int:
    """Exit code: 0."""
    from megatron_rl.observe.exporters.grafana import alerts

    print(alerts(), end="", file=console.file)
    return 0


@dataclass(frozen=True)
class ExportOptions:
    """Options of `metrics export`."""

    run_dir: RunFolder
    overrides: Overrides = field(default_factory=list)
    follow: bool = False
    """Also pass on new rows, until Ctrl-C."""


@command(app, "export", "Pass on the metrics of a run, finished or not.")
def export(options: ExportOptions, console: Console) -> int:
    """Exit code: 0, 2 (bad input)."""
    overrides = [override("run.dir", str(options.run_dir)), *options.overrides]
    config = load_run(options.run_dir, overrides)
    if not config.metrics.is_on:
        raise InputError(
            "nothing is to be exported: give metrics.tensorboard=true, metrics.wandb=offline or "
            "metrics.prometheus_port=9400"
        )
    with Exporter(config) as exporter:
        where = " and ".join(destinations(config))
        say(console, f"{exporter.passed_on:,} rows of {options.run_dir} passed on to {where}")
        if options.follow:
            say(console, "new rows follow until Ctrl-C")
        elif config.metrics.prometheus_port:
            say(console, "the Prometheus server ends with this command: --follow keeps it")
        while options.follow:
            time.sleep(config.metrics.poll_s)
            exporter.advance()
    return 0
