"""`megatron-rl metrics`: what each metric means; metrics of a run for other programs."""

import argparse
import time
from pathlib import Path

from rich.console import Console

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config, override
from megatron_rl.metrics_out.exporter import Exporter
from megatron_rl.metrics_out.table import markdown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `megatron-rl metrics`."""
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("table", help="print docs/metrics.md").set_defaults(handler=_table)
    dashboard = parts.add_parser("dashboard", help="print a dashboard for Grafana")
    dashboard.set_defaults(handler=_dashboard)
    parts.add_parser("alerts", help="print rules for Prometheus").set_defaults(handler=_alerts)
    export = parts.add_parser("export", help="pass on the metrics of a run, finished or not")
    export.add_argument("run_dir", type=Path)
    export.add_argument("--follow", action="store_true", help="go on until Ctrl-C")
    export.add_argument("overrides", nargs="*", metavar="metrics.key=value")
    export.set_defaults(handler=_export)


def _table(options: argparse.Namespace, console: Console) -> int:
    print(markdown(), end="", file=console.file)
    return 0


def _dashboard(options: argparse.Namespace, console: Console) -> int:
    # prometheus_client is loaded by this part alone.
    from megatron_rl.metrics_out.grafana import dashboard

    print(dashboard(), end="", file=console.file)
    return 0


def _alerts(options: argparse.Namespace, console: Console) -> int:
    from megatron_rl.metrics_out.grafana import alerts

    print(alerts(), end="", file=console.file)
    return 0


def _export(options: argparse.Namespace, console: Console) -> int:
    saved = options.run_dir / "config.toml"
    if not saved.is_file():
        raise InputError(f"{options.run_dir} holds no run: it has no config.toml")
    overrides = [override("run.dir", str(options.run_dir)), *options.overrides]
    config = load_config(saved, overrides)
    if not config.metrics.is_on:
        raise InputError(
            "nothing is to be exported: give metrics.tensorboard=true, metrics.wandb=offline or "
            "metrics.prometheus_port=9400"
        )
    with Exporter(config) as exporter:
        while options.follow:
            time.sleep(config.metrics.poll_s)
            exporter.advance()
    return 0
