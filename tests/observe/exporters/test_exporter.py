import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_rl.cli import main as cli
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import dump_toml, load_config
from megatron_rl.config.tree import Config
from megatron_rl.launcher.run_folder import set_aside
from megatron_rl.observe.exporters import exporter, wandb_run
from megatron_rl.observe.exporters.exporter import Exporter
from tests.observe.exporters.rows import row, write
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]


def config_of(run_dir: Path, *overrides: str) -> Config:
    return load_config(None, [f"run.dir={run_dir}", *overrides])


def losses(run_dir: Path) -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(run_dir / "tensorboard" / "trainer"))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars("train/loss")]


def test_steps_that_are_taken_again_replace_the_former_ones(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [row("trainer", 1, train__loss=1.0), row("trainer", 2, train__loss=2.0)])
    with Exporter(config_of(tmp_path, "metrics.tensorboard=true"), tmp_path) as passing:
        write(path, [row("trainer", 3, train__loss=3.0)])
        assert passing.advance() == 1 and passing.advance() == 0
        assert losses(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.0)]
        write(path, [row("launch", 1, launch__resumed=1), row("trainer", 2, train__loss=5.0)])
        passing.advance()
    assert losses(tmp_path) == [(1, 1.0), (2, 5.0)]


@pytest.mark.parametrize("at_once", [True, False])
def test_steps_that_a_restarted_trainer_repeats_are_counted_once(
    tmp_path: Path, at_once: bool
) -> None:
    path = tmp_path / "metrics.jsonl"
    steps = [row("trainer", n, train__loss=0.1, queue__rollouts_trained=4.0) for n in range(1, 6)]
    write(path, [row("trainer", -1, trainer__first_step=0), *steps[:2]])
    port = free_port()
    with Exporter(config_of(tmp_path, f"metrics.prometheus_port={port}"), tmp_path) as passing:
        new = [steps[2], row("trainer", -1, trainer__first_step=1), *steps[1:4]]
        for rows in [new] if at_once else [[one] for one in new]:
            write(path, rows)
            passing.advance()
        # The newest step was repeated, and none after it: what is counted stays.
        write(path, [row("trainer", -1, trainer__first_step=4), steps[4]])
        passing.advance()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
    [count] = [line for line in lines if "megatron_rl_queue_rollouts_trained_total{" in line]
    # Five steps of four.
    assert float(count.rpartition(" ")[2]) == 20.0


def test_weights_and_biases_offline_leaves_a_folder(tmp_path: Path) -> None:
    rows = [row("trainer", 1, train__loss=1.0), row("sft", 1, train__loss=2.0)]
    rows.append(row("queue", 1, generator__tokens=3.0))
    write(tmp_path / "metrics.jsonl", rows)
    named = [
        "metrics.wandb_entity=my-team", "metrics.wandb_group=seeds-of-a",
        "metrics.wandb_name=my-first", 'metrics.wandb_tags=["tag-one", "tag-two"]',
        "expert.ports.label=secret-of-sockets",
    ]  # fmt: skip
    with Exporter(config_of(tmp_path, "metrics.wandb=offline", *named), tmp_path) as passing:
        passing.advance()
    (files,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    # Their binary format keeps texts as they are.
    content = files.read_bytes()
    assert b"train/loss" in content and b"max_staleness" in content
    assert b"secret-of-sockets" not in content
    # One prefix each, and names that several roles write stay apart.
    for name in (b"sft/loss", b"generator/tokens"):
        assert name in content
    for doubled in (b"trainer/train/", b"sft/train/", b"queue/generator/"):
        assert doubled not in content
    for text in (b"my-team", b"seeds-of-a", b"my-first", b"tag-one", b"tag-two"):
        assert text in content
    # The same run folder stays the same run of theirs.
    first = (tmp_path / "wandb" / "megatron_rl_run_id").read_text()
    assert files.name == f"run-{first}.wandb"


class WandbService:
    """As online: a run keeps its rows and its summary, also if its process is killed."""

    def __init__(self) -> None:
        self.runs: dict[str, SimpleNamespace] = {}

    def init(self, *, id: str, **settings: Any) -> SimpleNamespace:
        if id not in self.runs:
            self.runs[id] = SimpleNamespace(summary={}, rows=[])
        run = self.runs[id]
        run.log = run.rows.append
        run.define_metric = lambda *names, **settings: None
        run.finish = lambda: None
        return run

    Settings = staticmethod(lambda **settings: None)
    teardown = staticmethod(lambda: None)

    def losses(self) -> list[list[tuple[int, float]]]:
        """(step, loss) of the trainer's rows, by run."""
        return [
            [(one["step/trainer"], one["train/loss"]) for one in run.rows if "train/loss" in one]
            for run in self.runs.values()
        ]


def test_weights_and_biases_gets_each_row_once_and_repeated_steps_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, path = WandbService(), tmp_path / "metrics.jsonl"
    monkeypatch.setattr(wandb_run, "wandb", service)
    config = config_of(tmp_path, "metrics.wandb=online")

    def export(*rows: dict[str, Any], is_killed: bool = False) -> None:
        write(path, list(rows))
        exporter = Exporter(config, tmp_path)
        exporter.__enter__()
        if not is_killed:
            exporter.close()

    def trainer(*steps: int, at: float, loss: float) -> list[dict[str, Any]]:
        return [row("trainer", step, at, train__loss=loss) for step in steps]

    export(*trainer(1, 2, 3, 4, at=1000.0, loss=1.0))
    export(*trainer(5, 6, at=1000.0, loss=1.0), is_killed=True)
    resumed = row("launch", 2, 2000.0, launch__resumed=1)
    export(resumed, *trainer(3, 4, 5, 6, 7, at=2000.0, loss=2.0))
    first = [(step, 1.0) for step in range(1, 7)]
    again = [(step, 2.0) for step in range(3, 8)]
    assert service.losses() == [first + again]
    # An attempt without a checkpoint begins another W&B run.
    (tmp_path / "config.toml").touch()
    set_aside(tmp_path)
    export(*trainer(1, 2, at=3000.0, loss=3.0))
    assert service.losses() == [first + again, [(1, 3.0), (2, 3.0)]]


def test_a_missing_package_is_told_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"metrics\.wandb needs the package wandb"):
        Exporter(config_of(tmp_path, "metrics.wandb=offline"), tmp_path)
    Exporter(config_of(tmp_path), tmp_path)


def test_the_process_passes_on_what_is_written_while_it_is_told_to_end(tmp_path: Path) -> None:
    overrides = ["metrics.tensorboard=true", "expert.metrics.poll_s=0.1"]
    (tmp_path / "config.toml").write_text(dump_toml(config_of(tmp_path, *overrides)))
    path = tmp_path / "metrics.jsonl"
    write(path, [row("trainer", 1, train__loss=1.0)])
    command = [sys.executable, "-m", "megatron_rl.observe.exporters.exporter", "--config"]
    process = subprocess.Popen([*command, str(tmp_path / "config.toml")], cwd=ROOT)
    try:
        await_file(tmp_path / "tensorboard" / "trainer")
        # Stopped, it cannot see the row before the signal.
        os.kill(process.pid, signal.SIGSTOP)
        write(path, [row("trainer", 2, train__loss=2.0)])
        process.send_signal(signal.SIGTERM)
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait(timeout=60)
    assert losses(tmp_path) == [(1, 1.0), (2, 2.0)]


def await_file(path: Path) -> None:
    ends_at = time.monotonic() + 60
    while not path.exists() and time.monotonic() < ends_at:
        time.sleep(0.05)
    assert path.exists()


def test_a_finished_run_is_exported_by_the_command(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text(dump_toml(Config()))
    rows = [row("trainer", 1, train__loss=1.0), row("queue", 1, queue__groups=2)]
    write(tmp_path / "metrics.jsonl", rows)
    export = ["metrics", "export", str(tmp_path)]
    assert cli.main(export) == 2 and "nothing is to be exported" in caplog.text
    capsys.readouterr()
    assert cli.main([*export, "metrics.tensorboard=true"]) == 0
    folder = tmp_path / "tensorboard"
    assert capsys.readouterr().out == f"2 rows of {tmp_path} passed on to TensorBoard ({folder})\n"
    assert losses(tmp_path) == [(1, 1.0)]
