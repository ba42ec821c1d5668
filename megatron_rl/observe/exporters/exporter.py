"""Exports the metric rows of a run to every program that `[metrics]` names.

`python -m megatron_rl.observe.exporters.exporter --config FILE` is a process of a run. It reads
RUN/metrics.jsonl every `expert.metrics.poll_s` until SIGTERM, then once more. The run continues
without it. `megatron-rl metrics export` uses `Exporter` for a finished run.
"""

import argparse
import importlib.util
import logging
import signal
import sys
import threading
from contextlib import ExitStack
from functools import partial, reduce
from pathlib import Path
from typing import Protocol, Self

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.observe.exporters.follow import Follower, Row
from megatron_rl.protocol.closing import Closing
from megatron_rl.protocol.metrics import FIRST_STEP, RESUMED
from megatron_rl.protocol.process import run_main, set_up_logging

ROLE = "metrics"
_TENSORBOARD, _WANDB = "tensorboard", "wandb"
log = logging.getLogger(__name__)


class Writer(Protocol):
    """A destination of rows."""

    def add(self, rows: list[Row]) -> None:
        """Take in rows, in file order."""

    def close(self) -> None:
        """Finish."""


def check_installed(config: Config) -> None:
    """Raise InputError if a package for `[metrics]` is missing."""
    asked = {"tensorboard": config.metrics.tensorboard, "wandb": config.metrics.wandb != "off"}
    for name, is_asked in asked.items():
        if is_asked and importlib.util.find_spec(name) is None:
            raise InputError(
                f"metrics.{name} needs the package {name}, which is not installed: "
                f"`.venv/bin/pip install {name}`, or leave metrics.{name} at its default"
            )


class Exporter(Closing):
    """Follows the metrics of a run folder."""

    def __init__(self, config: Config, out: Path) -> None:
        """Opens nothing yet. out: folder of the writers' files. Raises InputError for a missing
        package."""
        check_installed(config)
        self._config, self._out = config, out
        self._follower = Follower(config.run.dir / "metrics.jsonl")
        self._writers: list[Writer] = []
        self.passed_on = 0
        """Number of rows that the writers have."""
        self._last_step = 0
        """Last step of the trainer in these rows."""

    def __enter__(self) -> Self:
        self._open()
        return self

    def _open(self) -> None:
        self._writers = open_writers(self._config, self._out)
        self.passed_on = self._last_step = 0
        for rows in self._follower.read_all():
            self._pass_on(rows)

    def close(self) -> None:
        with ExitStack() as stack:
            for writer in self._writers:
                stack.callback(writer.close)
        self._writers = []

    def advance(self) -> int:
        """Export new rows; returns their number."""
        rows = self._follower.read()
        if self._are_repeated(rows):
            # The writers start again, without the rows of steps that are repeated.
            self.close()
            self._open()
        else:
            self._pass_on(rows)
        return len(rows)

    def _are_repeated(self, rows: list[Row]) -> bool:
        """Whether a resumed run, or a restarted trainer, repeats steps from one of the rows on."""
        last = self._last_step
        for row in rows:
            if RESUMED in row or row.get(FIRST_STEP, last) < last:
                return True
            last = _last_step(last, row)
        return False

    def _pass_on(self, rows: list[Row]) -> None:
        if rows:
            self.passed_on += len(rows)
            self._last_step = reduce(_last_step, rows, self._last_step)
            for writer in self._writers:
                writer.add(rows)


def _last_step(step: int, row: Row) -> int:
    """The last step of the trainer after one more row."""
    return max(step, row["step"]) if row["source"] == "trainer" else step


def open_writers(config: Config, out: Path) -> list[Writer]:
    """The writers that `[metrics]` asks for. Raises OSError for a port in use."""
    wanted = config.metrics
    writers: list[Writer] = []
    if wanted.tensorboard:
        from megatron_rl.observe.exporters.tensorboard import TensorBoardWriter

        writers.append(TensorBoardWriter(out / _TENSORBOARD))
    if wanted.prometheus_port:
        from megatron_rl.observe.exporters.prometheus import PrometheusServer

        server = PrometheusServer(wanted.prometheus_host, wanted.prometheus_port, settings(config))
        writers.append(server)
        log.info("serving http://%s:%d/metrics", wanted.prometheus_host, server.port)
    if wanted.wandb != "off":
        from megatron_rl.observe.exporters.wandb_run import WandbRun

        writers.append(
            WandbRun(
                out / _WANDB,
                wanted,
                default_name=config.run.dir.resolve().name,
                # Without the label, by which sockets know the run's processes.
                config=config.model_dump(mode="json", exclude={"ports": {"label"}}),
            )
        )
    return writers


def destinations(config: Config, out: Path) -> dict[str, str | Path]:
    """Name of each writer -> its address, or the folder into which it writes."""
    wanted = config.metrics
    found: dict[str, str | Path] = {}
    if wanted.tensorboard:
        found["TensorBoard"] = out / _TENSORBOARD
    if wanted.prometheus_port:
        address = f"http://{wanted.prometheus_host}:{wanted.prometheus_port}/metrics"
        found["Prometheus"] = address
    if wanted.wandb != "off":
        found[f"Weights & Biases, {wanted.wandb}"] = out / _WANDB
    return found


def settings(config: Config) -> dict[str, float]:
    """Configuration values that alerts compare with."""
    return {
        "queue.max_staleness": config.queue.max_staleness,
        "generator.replicas": config.generator.replicas,
        "train.prompts_per_batch": config.train.prompts_per_batch,
        "expert.train.batch_timeout_s": config.train.batch_timeout_s,
    }


def main(config: Config) -> None:
    """Export rows until SIGTERM."""
    ending = threading.Event()
    # Other roles write their last rows while the run ends: rows are read again after SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    with Exporter(config, config.run.dir) as exporter:
        while not ending.wait(config.metrics.poll_s):
            exporter.advance()
        while exporter.advance():
            pass


def start() -> int:
    parser = argparse.ArgumentParser(description="passes metrics on; started by a run")
    parser.add_argument("--config", type=Path, required=True)
    config = load_config(parser.parse_args().config)
    set_up_logging(ROLE, config.run.dir / "logs")
    return run_main(ROLE, partial(main, config))


if __name__ == "__main__":
    sys.exit(start())
