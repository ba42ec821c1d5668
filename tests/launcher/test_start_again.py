"""A folder that holds a run: which commands resume the run, begin it again, or go back in it."""

import json
import logging
import shutil
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.launcher import run
from megatron_rl.launcher.cold_start import is_due
from megatron_rl.launcher.last_words import last_words
from megatron_rl.launcher.preflight import PromptReport
from megatron_rl.launcher.run_folder import (
    CONFIG,
    SUMMARY,
    Beginning,
    check_run_folder,
    set_aside,
    write_config,
)
from megatron_rl.observe.facts import Configurations
from megatron_rl.observe.summary import RunFacts, summarize
from megatron_rl.protocol.checkpoint_folder import CHECKPOINTS, complete_checkpoints, find_resume
from megatron_rl.protocol.metrics import JsonlWriter, stream_rows
from megatron_rl.protocol.process import Interrupted
from megatron_rl.rollout_queue.record import Recorder
from tests.launcher.test_run_folder import make_checkpoint

STEPS = 20


def config(run_dir: Path, *overrides: str) -> Config:
    return load_config(None, [f"run.dir={run_dir}", f"train.steps={STEPS}", *overrides])


def begun(config: Config, found: Path | None) -> Config:
    """As the launcher leaves the folder before the first step."""
    config.run.dir.mkdir(exist_ok=True)
    write_config(config, found)
    return config


def write_steps(run_dir: Path, first: int, last: int) -> None:
    writer = JsonlWriter(run_dir / "metrics.jsonl", "trainer")
    for step in range(first, last + 1):
        writer.write(step, {"train/loss": 0.0})
    writer.close()


def begin(config: Config, monkeypatch: pytest.MonkeyPatch) -> str:
    """Begin as `megatron-rl run` does; returns what the screen shows."""
    # The log file's handler goes with the test.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    screen = Console(file=StringIO(), width=1000)
    with screen.capture() as shown:
        run.begin(config, check_run_folder(config), PromptReport([], []), screen)
    return shown.get()


def test_a_run_that_ended_after_its_newest_checkpoint_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with checkpoint.every_steps=0, once it was stopped after step 7 and resumed."""
    cfg = begun(config(tmp_path), None)
    write_steps(tmp_path, 1, 7)
    saved = make_checkpoint(tmp_path, 7)
    write_config(cfg, saved)
    write_steps(tmp_path, 8, STEPS)
    (tmp_path / SUMMARY).write_text(json.dumps({"steps": STEPS}))
    with pytest.raises(InputError, match=r"has ended: it is complete after step 20\. .* above 20"):
        check_run_folder(cfg)
    assert (tmp_path / SUMMARY).exists()
    # A command that names the checkpoint asks to take the later steps again.
    assert check_run_folder(config(tmp_path, f"checkpoint.resume={saved}")).checkpoint == saved
    shown = begin(config(tmp_path, "train.steps=21"), monkeypatch)
    assert "after step 7 of 21" in shown
    assert "The run had ended after step 20 and takes the later steps again" in shown


def test_the_end_of_a_run_that_began_at_another_ones_counts_the_steps_before(
    tmp_path: Path,
) -> None:
    other = make_checkpoint(tmp_path / "other", 6)
    cfg = begun(config(tmp_path / "new", f"checkpoint.resume={other}"), other)
    make_checkpoint(tmp_path / "new", 12)
    # 13 of 14 steps in this folder: 19 of 20.
    (cfg.run.dir / SUMMARY).write_text(json.dumps({"steps": 13}))
    assert check_run_folder(cfg).ended_after == 19
    (cfg.run.dir / SUMMARY).write_text(json.dumps({"steps": 14}))
    with pytest.raises(InputError, match="has ended: it is complete after step 20"):
        check_run_folder(cfg)


def test_a_run_that_goes_back_and_ends_early_stays_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its later checkpoints lack the steps that the start has superseded."""
    begun(config(tmp_path), None)
    write_steps(tmp_path, 1, 15)
    (tmp_path / "rollouts").mkdir()
    for step in (5, 10, 15):
        make_checkpoint(tmp_path, step)
    named = tmp_path / CHECKPOINTS / "step_000005"
    begin(config(tmp_path, f"checkpoint.resume={named}"), monkeypatch)
    Recorder(tmp_path).resume_at(5)
    # It ends before its trainer has loaded the checkpoint.
    again = check_run_folder(config(tmp_path))
    assert again.checkpoint == named
    write_config(config(tmp_path), again.checkpoint)
    write_steps(tmp_path, 6, STEPS)
    assert summarize(stream_rows(tmp_path / "metrics.jsonl"), RunFacts())["steps"] == STEPS
    aside = [path.name for path in (tmp_path / CHECKPOINTS).glob("*.set-aside-*")]
    assert sorted(name[:11] for name in aside) == ["step_000010", "step_000015"]


def test_a_repeated_command_goes_back_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a job that Slurm queues again."""
    begun(config(tmp_path), None)
    for step in (5, 10):
        make_checkpoint(tmp_path, step)
    named = tmp_path / CHECKPOINTS / "step_000005"
    back = config(tmp_path, f"checkpoint.resume={named}")
    assert "after step 5 of 20" in begin(back, monkeypatch)
    newest = make_checkpoint(tmp_path, 8)
    assert f"The same command resumes the run after step 8 of 20, from {newest}" in last_words(back)
    shown = begin(back, monkeypatch)
    assert f"after step 8 of 20, from {newest}, its newest one since it began at {named}" in shown
    # Another one goes back.
    make_checkpoint(tmp_path, 12)
    other = config(tmp_path, f"checkpoint.resume={newest}")
    assert check_run_folder(other).checkpoint == newest


def test_a_run_that_began_at_another_ones_is_resumed_by_its_own_command(tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", 6)
    third = make_checkpoint(tmp_path / "third", 3)
    cfg = begun(config(tmp_path / "new", f"checkpoint.resume={other}"), other)
    begins = f"Nothing is saved: no checkpoint is complete yet (checkpoint.every_steps={STEPS}). "
    assert last_words(cfg) == f"{begins}The same command begins at {other} again."
    assert check_run_folder(cfg) == Beginning(other, is_again=True)
    for given, refusal in (
        ([], r"other values of checkpoint\.resume, .*config\.toml starts it again"),
        ([f"checkpoint.resume={other}", "optimizer.lr=0.5"], r"other values of optimizer\.lr"),
        ([f"checkpoint.resume={third}"], "names a checkpoint of another folder"),
        (["checkpoint.resume=never"], 'checkpoint.resume is "never"'),
    ):
        with pytest.raises(InputError, match=refusal):
            check_run_folder(config(tmp_path / "new", *given))
    own = make_checkpoint(tmp_path / "new", 12)
    # As the other run thins its checkpoints. Launcher, trainer and queue ask the same function.
    shutil.rmtree(other)
    assert find_resume(cfg.checkpoint, cfg.run.dir) == own
    assert check_run_folder(cfg) == Beginning(own, is_again=True)
    assert last_words(cfg) == f"The same command resumes the run after step 12 of 20, from {own}."
    # With more steps too, and without the key.
    longer = config(tmp_path / "new", f"checkpoint.resume={other}", "train.steps=30")
    assert check_run_folder(longer).checkpoint == own
    assert check_run_folder(config(tmp_path / "new")).checkpoint == own
    with pytest.raises(InputError, match="names a checkpoint of another folder"):
        check_run_folder(config(tmp_path / "new", f"checkpoint.resume={third}"))
    # Its damaged checkpoints do not send it back to its beginning.
    (own / "queue.json").unlink()
    make_checkpoint(tmp_path / "other", 6)
    with pytest.raises(InputError, match="every checkpoint of the run .* is damaged"):
        check_run_folder(cfg)


def test_checkpoints_that_lie_in_a_new_folder_are_not_of_the_run(tmp_path: Path) -> None:
    """The trainer takes the newest one of the folder, whatever its step."""
    other = make_checkpoint(tmp_path / "other", 6)
    for resume, found in ((str(other), other), ("never", None)):
        new = tmp_path / f"new-{resume[-1]}"
        for step in (4, 9):
            make_checkpoint(new, step)
        cfg = config(new, f"checkpoint.resume={resume}")
        assert check_run_folder(cfg) == Beginning(found)
        begun(cfg, found)
        assert complete_checkpoints(new / CHECKPOINTS) == {}
        assert find_resume(cfg.checkpoint, new) == found


def test_a_run_that_never_resumes_is_resumed_without_the_key(tmp_path: Path) -> None:
    never = begun(config(tmp_path, "checkpoint.resume=never"), None)
    assert last_words(never).endswith(
        ". The same command without checkpoint.resume starts the run again."
    )
    assert check_run_folder(config(tmp_path)) == Beginning(None, is_again=True)
    with pytest.raises(InputError, match=r"config\.toml without checkpoint\.resume starts it"):
        check_run_folder(config(tmp_path, "optimizer.lr=0.5"))
    own = make_checkpoint(tmp_path, 10)
    assert last_words(never).startswith(
        "The same command without checkpoint.resume resumes the run after step 10 of 20, from"
    )
    assert check_run_folder(config(tmp_path)).checkpoint == own
    # A trainer that is restarted takes it up, and the command is refused.
    assert find_resume(never.checkpoint, tmp_path) == own
    with pytest.raises(InputError, match='checkpoint.resume is "never"'):
        check_run_folder(never)


def test_only_the_same_command_follows_a_new_start_that_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one would begin with the cold start that this one has left."""
    for name in ("some", "others"):
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    run_dir = tmp_path / "run"
    cold = [f"sft.dataset={tmp_path / 'some.jsonl'}", "sft.steps=50"]
    cfg = begun(config(run_dir, *cold), None)
    (run_dir / "hf" / "cold_start").mkdir(parents=True)
    (run_dir / "rollouts").mkdir()
    (run_dir / "rollouts" / "step_000000.jsonl").touch()
    content = (run_dir / CONFIG).read_text()

    def interrupt(config: Config) -> list[str]:
        raise Interrupted(143)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(run, "prepare_datasets", interrupt)
        begin(cfg, monkeypatch)
    assert list((run_dir / "rollouts").iterdir()) == []
    assert (run_dir / CONFIG).read_text() == content
    assert (run_dir / "attempt_1" / CONFIG).read_text() == content
    with pytest.raises(InputError, match=r"other values of sft\.dataset, sft\.steps"):
        dataset = f"sft.dataset={tmp_path / 'others.jsonl'}"
        check_run_folder(config(run_dir, dataset, "sft.steps=500"))
    assert check_run_folder(cfg) == Beginning(None, is_again=True)
    assert not is_due(cfg, is_resumed=False)


def test_an_attempts_earlier_configurations_go_with_it(tmp_path: Path) -> None:
    begun(config(tmp_path, "optimizer.lr=0.1"), None)
    write_steps(tmp_path, 1, 10)
    write_config(config(tmp_path, "optimizer.lr=0.2"), make_checkpoint(tmp_path, 10))
    # Its user moves the damaged checkpoint away, to start again.
    shutil.rmtree(tmp_path / CHECKPOINTS / "step_000010")
    aside = set_aside(tmp_path)
    assert {path.name for path in aside.iterdir()} == {
        "metrics.jsonl", CONFIG, "config.until_step_000010.toml",
    }  # fmt: skip
    write_config(config(tmp_path, "optimizer.lr=0.2"), None)
    write_steps(tmp_path, 1, 10)
    write_config(config(tmp_path, "optimizer.lr=0.4"), make_checkpoint(tmp_path, 10))
    parts = Configurations(tmp_path)
    assert [parts.at(step).optimizer.lr for step in (3, 12)] == [0.2, 0.4]
