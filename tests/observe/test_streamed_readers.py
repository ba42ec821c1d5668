"""Whoever reads the files of a run holds a small part of them in memory at once."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.cli.status import of_rows
from megatron_rl.config.files import dump_toml, load_config
from megatron_rl.config.tree import Config
from megatron_rl.launcher.cold_start import is_evaluated, rows_of_cold_start
from megatron_rl.observe.exporters.follow import Follower
from megatron_rl.observe.facts import sampled_accuracy
from megatron_rl.observe.report.material import read_material
from megatron_rl.observe.summary import RunFacts, summarize
from megatron_rl.protocol.metrics import drop_torn_line, iter_jsonl, stream_rows
from megatron_rl.protocol.rollout_files import read_records
from megatron_rl.protocol.types import TrainSequence
from megatron_rl.rollout_queue.evaluation import read_ended
from megatron_rl.simulation.records import read_run
from megatron_rl.sweep.measures import measure
from megatron_rl.trainer.sft import baseline_steps

FILE_BYTES, STEPS, ROLLOUTS = 6_000_000, 120, 300
HELD_BYTES = 1_200_000


def metrics_lines() -> str:
    """Of a run: thirty rows about activity, then one about a step."""
    activity = {f"activity/reason/wrong_in_way_{n}": n for n in range(14)}
    lines = []
    for step in range(1, STEPS + 1):
        for n in range(30):
            at = {"time": step * 300.0 + 10 * n, "source": "queue", "step": step}
            lines.append(at | {"activity/seconds": 5.0, "activity/rollouts_scored": 3} | activity)
        lines.append({
            "time": step * 300.0 + 299.0, "source": "trainer", "step": step, "train/loss": 0.5,
            "train/update_s": 20.0, "wait/batch_s": 1.0, "weight_sync/s": 0.5,
            "train/padded_tokens": 100.0, "rollout/length_tokens": 10.0,
            "queue/groups_trained": 4, "queue/groups_dropped_zero_variance": 2,
            "queue/rollouts_trained": 16,
            # Six groups, of 4 rollouts in the first steps and then of 10.
            "reason/correct": 24 if step <= 40 else 50,
            "reason/wrong_answer": 0 if step <= 40 else 10,
        })  # fmt: skip
    lines.append({"time": 1.0, "source": "queue", "step": STEPS, "label": "after", "eval/n": 2,
                  "eval/accuracy": 0.5, "eval/accuracy_se": 0.1, "eval/seconds": 0.0})  # fmt: skip
    return "".join(json.dumps(line) + "\n" for line in lines)


def record_line(index: int, chars: int) -> str:
    times = {"opened": 0.0, "leased": 1.0, "done": 2.0, "scored": 3.0, "trained": 4.0}
    return json.dumps({
        "prompt_id": "p", "group": index, "index": 0, "task": "math", "problem": "1 + 1",
        "language": "en", "text": "x" * chars, "answer": "2", "reward": 1.0, "parts": {},
        "reason": "correct" if index % 3 else "wrong", "tokens": 7, "versions": [0],
        "finish_reason": "stop", "seed": 0, "prompt_tail": "", "times": times,
    }) + "\n"  # fmt: skip


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "rollouts").mkdir()
    (folder / "config.toml").write_text(dump_toml(config(folder)))
    (folder / "summary.json").write_text("{}")
    (folder / "metrics.jsonl").write_text(metrics_lines())
    chars = FILE_BYTES // ROLLOUTS
    lines = "".join(record_line(index, chars) for index in range(ROLLOUTS))
    (folder / "rollouts" / "step_000001.jsonl").write_text(lines)
    return folder


def config(folder: Path) -> Config:
    return load_config(None, [f"run.dir={folder}", "train.group_size=10", "sft.batch_size=2"])


def follow(folder: Path) -> int:
    return sum(len(rows) for rows in Follower(folder / "metrics.jsonl").read_all())


def read_torn(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    size = path.stat().st_size
    with path.open("a") as file:
        file.write('{"torn')
    drop_torn_line(path)
    return path.stat().st_size - size


def step_of_status(folder: Path) -> int:
    rows = stream_rows(folder / "metrics.jsonl")
    return of_rows(rows, config(folder), state="stopped", now=0.0).step


def steps_of_baseline(folder: Path) -> int:
    """Trained 120 x 100 tokens, generated (40 x 24 + 80 x 60) x 10: 12,000 + 57,600 / 3."""
    sequence = TrainSequence(np.zeros(1_000), 1, np.zeros(0), [], advantage=1.0, weight=1.0)
    return baseline_steps(config(folder), [sequence])


READERS: dict[str, tuple[Callable[[Path], object], object]] = {
    "summary": (
        lambda folder: summarize(stream_rows(folder / "metrics.jsonl"), RunFacts())["steps"],
        STEPS,
    ),
    "status": (step_of_status, STEPS),
    "sweep": (
        lambda folder: measure([folder], ["train/loss", "step_s"]),
        [{"train/loss": 0.5, "step_s": 300.0}],
    ),
    "SFT baseline": (steps_of_baseline, 16),
    "evaluations that ended": (lambda folder: read_ended(folder, STEPS), {("after", STEPS)}),
    "models to choose from": (lambda folder: is_evaluated(config(folder), 3), False),
    "cold start": (
        lambda folder: rows_of_cold_start(iter_jsonl(folder / "metrics.jsonl"), STEPS),
        "",
    ),
    "exporter": (follow, 31 * STEPS + 1),
    "torn line": (read_torn, 0),
    "simulator": (lambda folder: len(read_run(folder).rollouts), ROLLOUTS),
    "report": (lambda folder: read_material(folder, config(folder), "").lengths, [7] * ROLLOUTS),
    "records": (
        lambda folder: sum(
            record.tokens for record in read_records(folder / "rollouts" / "step_000001.jsonl")
        ),
        7 * ROLLOUTS,
    ),
    "accuracy of records": (
        lambda folder: sampled_accuracy(folder / "rollouts"),
        (pytest.approx(2 / 3), pytest.approx(2 / 3)),
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_a_reader_holds_a_small_part_of_a_file(run_dir: Path, name: str) -> None:
    read, expected = READERS[name]
    tracemalloc.start()
    found = read(run_dir)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == expected
    assert peak < HELD_BYTES
