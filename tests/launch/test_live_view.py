"""What the view reads and prints."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from megatron_rl.live_view import LiveView, MetricsTail, restart_line
from megatron_rl.protocol.config_file import load_config

STEP = {
    "time": 1.0, "source": "trainer", "step": 7, "train/loss": 0.1, "rollout/reward": 0.625,
    "wait/batch_s": 0.25,
}  # fmt: skip
EVALUATION = {
    "time": 2.0, "source": "queue", "step": 7, "label": "after", "eval/accuracy": 0.75,
    "eval/accuracy_se": 0.025, "eval/n": 300,
}  # fmt: skip
RESTART = {
    "time": 3.0, "source": "launch", "step": 7, "launch/generator_restarts": 1,
    "role": "generator-0", "exit_code": -9, "restart": 2, "max_restarts": 3,
}  # fmt: skip
RESTART_LINE = "warning: generator-0 ended with signal 9 after step 7; restart 2 of 3"


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


@pytest.mark.parametrize("is_terminal", [False, True])
def test_restart_of_a_generator_is_a_warning(tmp_path: Path, is_terminal: bool) -> None:
    output = io.StringIO()
    config = load_config(None, [f'run.dir="{tmp_path}"', "train.steps=40"])
    append(tmp_path / "metrics.jsonl", json.dumps(STEP) + "\n" + json.dumps(RESTART) + "\n")
    with LiveView(config, Console(file=output, width=120, force_terminal=is_terminal)) as view:
        assert view.last_step == -1
        view.refresh({})
        assert view.last_step == 7
    assert RESTART_LINE in output.getvalue()


def test_restart_before_the_first_step_says_so() -> None:
    assert restart_line(RESTART | {"step": -1}).endswith("before the first step; restart 2 of 3")
