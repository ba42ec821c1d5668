"""A start continues the ledger of a killed launcher where queue and trainer can go on from it."""

import logging
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from megatron_rl.config.files import dump_toml, load_config
from megatron_rl.config.layers import changed_keys
from megatron_rl.config.tree import Config
from megatron_rl.launcher import run
from megatron_rl.launcher.continuation import changed_lines, failure_noted, why_not_continued
from megatron_rl.launcher.node_errors import NodeFailed, NodeLost
from megatron_rl.launcher.preflight import PromptReport
from megatron_rl.launcher.run_folder import CONFIG, check_run_folder
from megatron_rl.observe.deaths import RoleDied
from megatron_rl.protocol.checkpoint_folder import CHECKPOINTS
from megatron_rl.protocol.ledger import FOLDER, LOG, STATE, Began, segment_path, write_state
from megatron_rl.protocol.metrics import CONTINUED, RESUMED, read_jsonl
from megatron_rl.protocol.stop_request import request_stop
from megatron_rl.protocol.stored_batches import BATCHES, stored_steps
from megatron_rl.rollout_queue.states import program_digest
from tests.launcher.test_run_folder import make_checkpoint


def config(run_dir: Path, *overrides: str) -> Config:
    given = ["train.steps=20", "checkpoint.every_steps=3", *overrides]
    return load_config(None, [f"run.dir={run_dir}", *given])


def store(run_dir: Path, *steps: int) -> None:
    for path in (run_dir / BATCHES).glob("*"):
        path.unlink()
    for step in steps:
        (run_dir / BATCHES / f"{step:06d}.batch").touch()


def leave_ledger(run_dir: Path, program: str, *, built: int = 20) -> None:
    began = Began("start", 0, 0.0, program, built=built)
    write_state(run_dir / FOLDER, 2, began, lambda file: None)
    segment_path(run_dir / FOLDER, 2, LOG).touch()


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a run that was killed in step 8, after the checkpoint of step 6."""
    # The log file's handler goes with the test.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    run_dir = tmp_path / "run"
    for name in (FOLDER, BATCHES):
        (run_dir / name).mkdir(parents=True)
    make_checkpoint(run_dir, 6)
    store(run_dir, 3, 4, 5, 6, 7)
    leave_ledger(run_dir, program_digest())
    (run_dir / CONFIG).write_text(dump_toml(config(run_dir, "expert.ports.batches=7001")))
    (run_dir / "metrics.jsonl").write_text('{"source": "queue", "step": 7}\n{"source": "que')
    return run_dir


def reason(run_dir: Path, *overrides: str) -> str:
    cfg = config(run_dir, *overrides)
    return why_not_continued(cfg, check_run_folder(cfg).checkpoint)


def begin(run_dir: Path, *overrides: str) -> str:
    """What a start tells on the screen."""
    cfg, screen = config(run_dir, *overrides), StringIO()
    run.begin(cfg, check_run_folder(cfg), PromptReport([], []), Console(file=screen, width=900))
    return screen.getvalue()


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_same_command_continues_the_ledger_with_the_stored_batches(run_dir: Path) -> None:
    told = begin(run_dir)
    assert "after step 6 of 20" in told and "The queue continues its ledger" in told
    assert files_of(run_dir / FOLDER) == ["000002.log", "000002.state"]
    assert stored_steps(run_dir / BATCHES) == [3, 4, 5, 6, 7]
    rows = read_jsonl(run_dir / "metrics.jsonl")
    assert [row["source"] for row in rows] == ["queue", "launch"]
    assert (rows[1]["step"], rows[1][RESUMED], rows[1][CONTINUED]) == (6, 1, 1)
    assert not list(run_dir.glob("config.until*"))
    # Ports and label are new.
    assert load_config(run_dir / CONFIG).ports.label


def test_an_attempt_without_a_checkpoint_is_continued_in_its_place(run_dir: Path) -> None:
    (run_dir / CHECKPOINTS / "step_000006").rename(run_dir / "elsewhere")
    store(run_dir, 0, 1, 2, 3)
    (run_dir / "rollouts").mkdir()
    told = begin(run_dir)
    assert "after step 0 of 20, from the beginning, because no checkpoint is complete" in told
    assert not list(run_dir.glob("attempt_*")) and (run_dir / "rollouts").exists()
    assert stored_steps(run_dir / BATCHES) == [0, 1, 2, 3]
    assert files_of(run_dir / FOLDER) == ["000002.log", "000002.state"]


def test_another_configuration_begins_at_the_checkpoint_and_says_why(run_dir: Path) -> None:
    told = begin(run_dir, "optimizer.lr=0.5", "queue.max_staleness=5")
    assert (
        "generated again, because the queue's ledger is not continued: the configuration has "
        "changed: optimizer.lr, queue.max_staleness."
    ) in told
    assert files_of(run_dir / FOLDER) == [] and stored_steps(run_dir / BATCHES) == [3, 4, 5]
    [_, row] = read_jsonl(run_dir / "metrics.jsonl")
    assert row[RESUMED] == 1 and CONTINUED not in row


def test_a_resume_names_each_changed_key_with_both_values(run_dir: Path) -> None:
    given = ["optimizer.lr=0.5", "queue.max_staleness=5", "expert.train.record_tokens=false",
             "stages.0.at_step=9", "expert.ports.batches=7002"]  # fmt: skip
    old = config(run_dir)
    lines = [line for line in begin(run_dir, *given).splitlines() if line.startswith("changed: ")]
    assert f"changed: optimizer.lr: {old.optimizer.lr} -> 0.5" in lines
    assert f"changed: queue.max_staleness: {old.queue.max_staleness} -> 5" in lines
    assert "changed: expert.train.record_tokens: true -> false" in lines
    assert "changed: stages.0.at_step: none -> 9" in lines
    assert not any("ports." in line or "run.dir" in line for line in lines)
    assert begin(run_dir, *given).count("changed: ") == 0


def test_a_changed_function_of_the_user_is_told_and_ends_the_ledger(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "mine" / "parts"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the launcher ran it')")
    rewards, other = package / "rewards.py", tmp_path / "mine" / "never.py"
    rewards.write_text("def near(): pass")
    other.write_text("")
    monkeypatch.syspath_prepend(tmp_path / "mine")
    given = ["reward.tasks.near.compare=parts.rewards:near", "run.seed=3"]
    begin(run_dir, *given)
    leave_ledger(run_dir, program_digest())
    store(run_dir, 3, 4, 5, 6, 7)
    other.write_text("not named")
    assert reason(run_dir, *given) == "" and changed_lines(config(run_dir, *given)) == []
    rewards.write_text("def near(): return 1")
    assert reason(run_dir, *given) == f"your code has changed: {rewards}"
    told = begin(run_dir, *given)
    assert f"changed: {rewards}: figures before and after this start may not compare" in told
    assert "changed: " not in begin(run_dir, *given)


def test_a_resume_with_many_changed_keys_names_nineteen_of_them(run_dir: Path) -> None:
    # Each source has a line for each of its keys.
    given = [f"prompts.{number}.path=p{number}" for number in range(3)]
    *named, last = changed_lines(config(run_dir, *given))
    everything = len(changed_keys(config(run_dir), config(run_dir, *given)))
    assert len(named) == 19 and last.startswith(f"changed: {everything - 19} more keys")


@pytest.mark.parametrize("given", ["metrics.tensorboard=true", "expert.ports.batches=7002"])
def test_keys_of_neither_queue_nor_trainer_may_change(run_dir: Path, given: str) -> None:
    assert reason(run_dir, given) == ""


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["generator.max_running=2", "train.group_size=2", "sampling.temperature=0.5",
          "train.steps=21"],
         "the configuration has changed: generator.max_running, sampling.temperature, "
         "train.group_size and 1 more keys"),
        (["expert.queue.ledger=false"], "the run stores no batches"),
        (["checkpoint.every_steps=0"], "the run stores no batches"),
        (["checkpoint.resume=RUN/checkpoints/step_000006"], "checkpoint.resume is "),
    ],
)  # fmt: skip
def test_reasons_in_the_configuration(run_dir: Path, overrides: list[str], why: str) -> None:
    given = [override.replace("RUN", str(run_dir)) for override in overrides]
    assert reason(run_dir, *given).startswith(why)


def test_reasons_in_the_run_folder(run_dir: Path) -> None:
    assert reason(run_dir) == ""
    # Two checkpoints were due after the complete one: the queue has one state.
    store(run_dir, *range(6, 11))
    assert reason(run_dir) == ""
    store(run_dir, *range(6, 13))
    assert reason(run_dir) == "the checkpoint of step 9 is not complete"
    store(run_dir, 6, 8)
    assert reason(run_dir) == "batches after step 6 are missing"
    store(run_dir)
    assert reason(run_dir) == ""
    leave_ledger(run_dir, program_digest(), built=7)
    assert reason(run_dir) == ""
    store(run_dir, 6, 7)
    lost = "the ledger knows 7 batches and the trainer 8: their node lost power"
    assert reason(run_dir) == lost
    leave_ledger(run_dir, program_digest(), built=5)
    store(run_dir)
    assert reason(run_dir) == lost.replace("7", "5").replace("8", "6")
    leave_ledger(run_dir, "another")
    assert reason(run_dir) == "another version of this program wrote it"
    segment_path(run_dir / FOLDER, 2, STATE).write_bytes(b"torn")
    assert reason(run_dir) == "its newest state is damaged"
    request_stop(run_dir)
    assert reason(run_dir) == "the run was asked to stop"


@pytest.mark.parametrize(
    ("error", "why"),
    [(RoleDied("trainer", 1, "it died"), "a role failed"), (NodeLost("node 2"), ""),
     (NodeFailed("node 2: it died"), "a role failed"), (KeyboardInterrupt(), "")],
)  # fmt: skip
def test_a_ledger_is_not_continued_after_the_failure_of_a_role(
    run_dir: Path, error: BaseException, why: str
) -> None:
    with pytest.raises(type(error)), failure_noted(run_dir):
        raise error
    assert reason(run_dir) == why
    begin(run_dir)
    assert files_of(run_dir / FOLDER) == ([] if why else ["000002.log", "000002.state"])
