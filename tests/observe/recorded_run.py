"""A run folder whose rollouts and metrics the real rollout queue wrote; the trainer's own figures
are made up."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_rl.config.files import dump_toml
from megatron_rl.config.tree import Config
from megatron_rl.observe.facts import run_facts
from megatron_rl.observe.summary import summarize
from megatron_rl.protocol.metrics import JsonlWriter, MetricSet, stream_rows
from tests.rollout_queue.staged_run import StagedRun

STEPS, GROUPS, SIZE = 12, 3, 4


def record_run(folder: Path) -> Path:
    """12 steps of 3 groups of 4; four of five completions are right, so many groups are dropped."""
    folder.mkdir()
    config = Config.model_validate(
        {
            "run": {"dir": folder},
            "train": {"steps": STEPS, "prompts_per_batch": GROUPS, "group_size": SIZE},
            "sampling": {"max_new_tokens": 24},
            "queue": {"max_staleness": 2},
            "eval": {"prompts": 0},
        }
    )
    (folder / "config.toml").write_text(dump_toml(config))
    run = StagedRun(config, seed=3, solves=lambda prompt: 0.8)
    run.run(STEPS)
    trainer = JsonlWriter(folder / "metrics.jsonl", "trainer")
    for batch in run.batches:
        metrics = MetricSet()
        metrics.add_entries(batch.metrics)
        own = {"train/loss": 0.1, "train/logprob_gap": 0.01 * batch.step, "wait/batch_s": 1.0,
               "train/logprob_gap_tokens": 10.0 + batch.step, "weight_sync/s": 0.5}  # fmt: skip
        trainer.write(batch.step + 1, metrics.values() | own)
    trainer.close()
    summary = summarize(stream_rows(folder / "metrics.jsonl"), run_facts(config, folder, {}))
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def change_row(folder: Path, step: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the trainer's row of a step."""
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row["step"] == step and "queue/rollouts_trained" in row:
            change(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def remove_line(path: Path, number: int) -> None:
    """Remove a line, by its number from 1."""
    lines = path.read_text().splitlines(keepends=True)
    del lines[number - 1]
    path.write_text("".join(lines))
