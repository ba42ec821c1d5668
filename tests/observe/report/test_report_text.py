"""`megatron-rl report` on what a run left behind."""

import json
from pathlib import Path

import pytest

from megatron_rl.cli import main as cli
from megatron_rl.config.files import dump_toml, load_config

ROW = {
    "time": 4.0, "source": "queue", "step": 0, "activity/rollouts_generated": 64,
    "activity/rollouts_scored": 64, "activity/format_failures/no_think_start": 64,
    "activity/groups_complete": 4, "activity/groups_dropped/zero_variance": 4,
    "activity/diagnosis": "64 of 64 completions fail the format check. Cause: x. Fix: y.",
}  # fmt: skip


def leave_run(folder: Path, *names: str) -> None:
    """A run folder with these files; names that end in / are folders."""
    folder.mkdir()
    config = load_config(None, ['run.dir="/gone/elsewhere"'])
    (folder / "config.toml").write_text(dump_toml(config))
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if name.endswith("/") else path.touch()


def named_paths(text: str, folder: Path) -> list[Path]:
    """What the report says that there is."""
    [line] = [line for line in text.splitlines() if line.startswith("Everything else")]
    names = line.split(": ", 1)[1].split(", ")
    assert str(folder) in line
    return [folder / name for name in names]


def test_report_of_a_run_without_a_step_says_why_and_names_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    leave_run(folder, "rollouts/")
    (folder / "metrics.jsonl").write_text(json.dumps(ROW) + "\n")
    assert cli.main(["report", str(folder)]) == 0
    text = capsys.readouterr().out
    named = named_paths(text, folder)
    assert [path for path in named if not path.exists()] == []
    assert {path.name for path in named} == {"config.toml", "metrics.jsonl", "rollouts"}
    assert "No step of reinforcement learning was taken." in text
    assert "64 format failures (no_think_start 64)" in text and "dropped: zero_variance 4" in text
    assert "Cause: x. Fix: y." in text


def test_report_of_a_run_that_never_wrote_metrics_names_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    leave_run(folder, "logs/queue.log")
    assert cli.main(["report", str(folder)]) == 0
    named = named_paths(capsys.readouterr().out, folder)
    assert {path.name for path in named} == {"config.toml", "logs"}


def test_report_names_the_model_that_is_there_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    leave_run(folder, "hf/cold_start/config.json")
    cli.main(["report", str(folder)])
    assert str(folder / "hf" / "cold_start") in capsys.readouterr().out
    (folder / "hf" / "cold_start" / "config.json").unlink()
    (folder / "hf" / "cold_start").rmdir()
    cli.main(["report", str(folder)])
    assert "Trained model       none" in capsys.readouterr().out
