"""`status`, `report` and `view` on folders of others, torn and half-made ones: one clear line."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.cli import main as cli
from megatron_rl.config.files import dump_toml, load_config

STEP = {"time": 1.0, "source": "trainer", "step": 1, "train/loss": 0.1}
NOBODY = 65534
CAPABILITIES = "-dac_override,-dac_read_search"
WITHOUT_RIGHTS = ["setpriv", f"--bounding-set={CAPABILITIES}", f"--inh-caps={CAPABILITIES}"]
needs_rights = pytest.mark.skipif(
    os.geteuid() == 0 and shutil.which("setpriv") is None,
    reason="root may read everything: setpriv (util-linux) would take that from it",
)


def make_run(folder: Path, metrics: str = json.dumps(STEP) + "\n") -> Path:
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.toml").write_text(dump_toml(load_config(None, ["train.steps=5"])))
    (folder / "metrics.jsonl").write_text(metrics)
    (folder / "lock").touch()
    return folder


def call_as_another(
    arguments: list[str], folder: Path, *overrides: str
) -> subprocess.CompletedProcess[str]:
    """Without the rights of root, on a folder of somebody else."""
    is_root = os.geteuid() == 0
    if is_root:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
    command = [sys.executable, "-m", "megatron_rl.cli.main", *arguments, str(folder), *overrides]
    return subprocess.run(
        [*WITHOUT_RIGHTS, *command] if is_root else command,
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip


@pytest.mark.parametrize("command", ["status", "report"])
def test_a_damaged_line_is_named(
    tmp_path: Path, command: str, caplog: pytest.LogCaptureFixture
) -> None:
    line = json.dumps(STEP)
    run = make_run(tmp_path / "run", f"{line}\n{line[:20]}\n{line}\n")
    assert cli.main([command, str(run)]) == 2
    assert f"{run}/metrics.jsonl:2: " in caplog.text and "take a line out" in caplog.text
    assert len(caplog.text.strip().splitlines()) == 1


@pytest.mark.parametrize("command", ["status", "report"])
def test_a_text_in_place_of_a_number_is_named(
    tmp_path: Path, command: str, caplog: pytest.LogCaptureFixture
) -> None:
    line = json.dumps(STEP)
    damaged = json.dumps(STEP | {"rollout/reward": "abc"})
    run = make_run(tmp_path / "run", f"{line}\n{damaged}\n")
    assert cli.main([command, str(run)]) == 2
    assert f"{run}/metrics.jsonl:2: rollout/reward is 'abc'; expected a number" in caplog.text


@pytest.mark.parametrize("command", ["report", "view"])
def test_a_record_without_a_reward_is_named(
    tmp_path: Path, command: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path / "run")
    record = {
        "prompt_id": "p", "group": 0, "index": 0, "task": "math", "problem": "1+1?",
        "language": "", "text": "2", "answer": "2", "reward": 1.0, "parts": {},
        "reason": "correct", "tokens": 1, "versions": [0], "finish_reason": "stop", "seed": 0,
        "prompt_tail": "",
    }  # fmt: skip
    lines = [record, {name: record[name] for name in record if name != "reward"}]
    path = run / "rollouts" / "step_000001.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert cli.main([command, str(run)]) == 2
    assert f"{path}:2: " in caplog.text and "`reward`" in caplog.text


@pytest.mark.parametrize("command", ["report", "view"])
def test_a_damaged_record_is_named(
    tmp_path: Path, command: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path / "run")
    (run / "rollouts" / "step_000001.jsonl").write_text('{"a\n')
    assert cli.main([command, str(run)]) == 2
    assert f"{run}/rollouts/step_000001.jsonl:1: " in caplog.text


def test_a_run_that_writes_now_is_reported_without_its_last_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = json.dumps(STEP)
    run = make_run(tmp_path / "run", f"{line}\n{line[:20]}")
    assert cli.main(["status", str(run)]) == 1
    assert "stopped, step 1 of 5" in capsys.readouterr().out
    # Nothing was synced yet.
    assert cli.main(["report", "--text", str(run)]) == 0


def test_a_torn_summary_is_named_with_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path / "run")
    (run / "summary.json").write_text('{"wall_s": {')
    assert cli.main(["report", str(run)]) == 2
    assert "summary.json" in caplog.text and "move it away" in caplog.text


@needs_rights
def test_the_run_of_another_user_is_read_and_never_written_to(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.chmod(0o555)
    (run / "lock").chmod(0o444)
    before = sorted(run.rglob("*"))
    said = call_as_another(["status"], run)
    assert said.returncode == 1 and "stopped, step 1 of 5" in said.stdout
    refused = call_as_another(["report"], run)
    assert refused.returncode == 2
    assert "cannot write" in refused.stderr and "--html FILE elsewhere" in refused.stderr
    html = tmp_path / "mine.html"
    assert call_as_another(["report", "--html", str(html)], run).returncode == 0
    assert html.stat().st_size > 1000 and sorted(run.rglob("*")) == before


@needs_rights
@pytest.mark.parametrize("key", ["tensorboard=true", "wandb=offline"])
def test_metrics_of_a_run_of_another_user_are_exported_elsewhere(tmp_path: Path, key: str) -> None:
    run = make_run(tmp_path / "run")
    run.chmod(0o555)
    command = ["metrics", "export"]
    refused = call_as_another(command, run, f"metrics.{key}")
    name = key.partition("=")[0]
    assert refused.returncode == 2 and len(refused.stderr.strip().splitlines()) == 1
    assert f"cannot write to {run}/{name}: {run} is no writable folder" in refused.stderr
    out = tmp_path / "mine"
    said = call_as_another([*command, "--out", str(out)], run, f"metrics.{key}")
    assert said.returncode == 0, said.stderr
    assert f"1 rows of {run} passed on" in said.stdout and f"({out}/{name})" in said.stdout
    assert list((out / name).iterdir()) and not (run / name).exists()


@needs_rights
def test_a_replay_of_a_run_of_another_user_asks_for_a_folder(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "batches").mkdir()
    (run / "batches" / "000000.batch").touch()
    run.chmod(0o555)
    said = call_as_another(["replay", "--step", "1"], run)
    assert said.returncode == 2
    [line] = said.stderr.strip().splitlines()
    assert f"cannot write to {run}/replay_000001" in line and "give --out FOLDER" in line


@needs_rights
@pytest.mark.parametrize(
    ("name", "command"),
    [("lock", "status"), ("metrics.jsonl", "status"), ("config.toml", "report"),
     ("metrics.jsonl", "report"), ("rollouts", "view")],
)  # fmt: skip
def test_what_may_not_be_read_is_named_in_one_line(tmp_path: Path, name: str, command: str) -> None:
    run = make_run(tmp_path / "run")
    (run / name).chmod(0)
    arguments = [command, "--text"] if command == "report" else [command]
    said = call_as_another(arguments, run)
    assert said.returncode == 2
    [line] = said.stderr.strip().splitlines()
    assert name in line and "Permission denied" in line
