"""What the view reads and prints."""

import io
import json
from pathlib import Path

from rich.console import Console

from megatron_rl.live_view import LiveView, MetricsTail
from megatron_rl.protocol.config_file import load_config

STEP = {
    "time": 1.0, "source": "trainer", "step": 7, "train/loss": 0.1, "rollout/reward": 0.625,
    "wait/batch_s": 0.25,
}  # fmt: skip
EVALUATION = {
    "time": 2.0, "source": "queue", "step": 7, "label": "after", "eval/accuracy": 0.75,
    "eval/accuracy_se": 0.025, "eval/n": 300,
}  # fmt: skip


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_tail_reads_each_complete_row_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read() == []
    append(path, '{"step": 1}\n{"step": 2}\n{"st')
    assert tail.read() == [{"step": 1}, {"step": 2}]
    append(path, 'ep": 3}\n')
    assert tail.read() == [{"step": 3}]
    assert tail.read() == []


def test_plain_output_has_one_line_a_step_and_an_evaluation(tmp_path: Path) -> None:
    output = io.StringIO()
    config = load_config(None, [f'run.dir="{tmp_path}"', "train.steps=40"])
    with LiveView(config, Console(file=output, width=80)) as view:
        view.enter_phase("reinforcement learning")
        append(tmp_path / "metrics.jsonl", json.dumps(STEP) + "\n")
        view.refresh({})
        append(tmp_path / "metrics.jsonl", json.dumps(EVALUATION) + "\n")
    lines = output.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].endswith("reinforcement learning")
    assert lines[1].startswith("step 7/40: reward 0.625")
    assert lines[2].startswith("evaluation after: accuracy 0.750 +- 0.025 on 300 held-out prompts")


def test_terminal_output_draws_steps(tmp_path: Path) -> None:
    output = io.StringIO()
    config = load_config(None, [f'run.dir="{tmp_path}"', "train.steps=40"])
    append(tmp_path / "metrics.jsonl", json.dumps(STEP) + "\n")
    with LiveView(config, Console(file=output, width=120, force_terminal=True)) as view:
        view.refresh({})
    assert "0.625" in output.getvalue()
    assert "last steps of 40" in output.getvalue()
