"""A run folder is new, or its run goes on from a checkpoint; one launcher at a time."""

import errno
import json
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import dump_toml, load_config
from megatron_rl.config.tree import Config, PortsConfig
from megatron_rl.launcher import run, run_folder
from megatron_rl.launcher.last_words import last_words
from megatron_rl.launcher.ports import draw_label
from megatron_rl.launcher.preflight import PromptReport
from megatron_rl.launcher.run_folder import (
    CONFIG,
    SUMMARY,
    Beginning,
    check_run_folder,
    checkpoints_passed_over,
    locked,
    set_aside,
    write_config,
    write_evaluation_config,
)
from megatron_rl.protocol.checkpoint_folder import CHECKPOINTS, SFT_CHECKPOINTS, seal, step_of
from megatron_rl.protocol.failure import FAILURE_VARIABLE, FAILURES
from megatron_rl.protocol.metrics import RESUMED, read_jsonl


def make_checkpoint(run_dir: Path, step: int) -> Path:
    partial = run_dir / CHECKPOINTS / "step.partial"
    partial.mkdir(parents=True)
    (partial / "queue.json").write_text("{}")
    return seal(partial, step, {})


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Folder of a run that saved step 6 of 10."""
    run_dir = tmp_path / "run"
    make_checkpoint(run_dir, 6)
    (run_dir / "config.toml").write_text("")
    return run_dir


def config(run_dir: Path, *overrides: str) -> Config:
    return load_config(None, [f"run.dir={run_dir}", "train.steps=10", *overrides])


def test_run_folder_with_a_complete_checkpoint_is_resumed(run_dir: Path) -> None:
    found = check_run_folder(config(run_dir)).checkpoint
    assert found == run_dir / CHECKPOINTS / "step_000006"
    (run_dir / "summary.json").write_text("{}")
    write_config(config(run_dir, "optimizer.lr=0.5"), found)
    assert load_config(run_dir / "config.toml").optimizer.lr == 0.5
    assert (run_dir / "config.until_step_000006.toml").read_text() == ""
    assert not (run_dir / "summary.json").exists()
    [row] = read_jsonl(run_dir / "metrics.jsonl")
    assert (row["source"], row["step"], row[RESUMED]) == ("launch", 6, 1)


def test_a_newer_checkpoint_that_is_passed_over_is_told_on_the_screen_and_in_the_log(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = make_checkpoint(run_dir, 9)
    (newer / "queue.json").unlink()
    # What the queue of an earlier start knew is later than the checkpoint.
    (run_dir / "ledger").mkdir()
    (run_dir / "ledger" / "000003.state").touch()
    (run_dir / "ledger" / "000003.log").touch()
    # The log file's handler goes with the test.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    screen = StringIO()
    cfg = config(run_dir)
    run.begin(cfg, check_run_folder(cfg), PromptReport([], []), Console(file=screen, width=400))
    assert list((run_dir / "ledger").iterdir()) == []
    told = f"{newer} is passed over: it has no file queue.json"
    assert f"warning: {told}" in screen.getvalue() and "after step 6 of 10" in screen.getvalue()
    assert (
        f"WARNING megatron_rl.launcher.run: {told}\n"
        in (run_dir / "logs" / "launch.log").read_text()
    )
    # Without any whole one the same command does not begin anew, and says why.
    shutil.rmtree(run_dir / CHECKPOINTS / "step_000006")
    (run_dir / "config.toml").write_text(dump_toml(cfg))
    with pytest.raises(InputError, match=rf"is damaged: {newer}: it has no file queue\.json\. The"):
        check_run_folder(cfg)
    newer.rename(run_dir / "elsewhere")
    (run_dir / CHECKPOINTS / "step_000012.partial").mkdir()
    assert check_run_folder(cfg) == Beginning(None, is_again=True)
    (run_dir / "elsewhere").rename(newer)
    (run_dir / CHECKPOINTS / "step_000012.partial").rmdir()
    cold = config(run_dir, "sft.steps=40")
    (run_dir / SFT_CHECKPOINTS / "step_000020").mkdir(parents=True)
    assert checkpoints_passed_over(cold, None)[1].endswith("step_000020 is passed over: it has no "
                                                           "file COMPLETE")  # fmt: skip


def test_a_line_that_a_crash_tore_does_not_swallow_the_next_row(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = check_run_folder(config(run_dir)).checkpoint
    whole = json.dumps({"time": 1.0, "source": "trainer", "step": 6, "x": "\u00e9"})
    (run_dir / "metrics.jsonl").write_bytes(f"{whole}\n".encode() + '{"source": "é'.encode()[:-1])
    write_config(config(run_dir), found)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert lines[0] == whole and [json.loads(line)["source"] for line in lines[1:]] == ["launch"]
    assert "torn last line" in caplog.text


def test_last_words_say_where_the_same_command_resumes(run_dir: Path, tmp_path: Path) -> None:
    resumes = last_words(config(run_dir))
    assert resumes.startswith("The same command resumes the run after step 6 of ")
    assert resumes.endswith(f"from {run_dir / CHECKPOINTS / 'step_000006'}.")
    new = tmp_path / "new"
    assert last_words(config(new)) == ""  # nothing was prepared
    new.mkdir()
    (new / CONFIG).write_text("")
    for every, why in (
        (0, "no checkpoints are made (checkpoint.every_steps=0)"),
        (5, "no checkpoint is complete yet (checkpoint.every_steps=5)"),
    ):
        said = last_words(config(new, f"checkpoint.every_steps={every}"))
        assert said == f"Nothing is saved: {why}. The same command starts the run again."
    (new / SUMMARY).write_text("{}")
    assert last_words(config(new)) == ""


def test_last_words_of_a_run_that_began_at_another_ones(run_dir: Path, tmp_path: Path) -> None:
    new, other = tmp_path / "new", run_dir / CHECKPOINTS / "step_000006"
    own = make_checkpoint(new, 8)
    (new / CONFIG).write_text("")
    # With the other's checkpoint the run's own folder is refused.
    begun = config(new, f"checkpoint.resume={other}")
    assert last_words(begun).startswith("The same command without checkpoint.resume resumes the")
    shutil.rmtree(own)
    assert last_words(begun).endswith(f" Another folder (run.dir) begins at {other} again.")
    gone = config(new, f"checkpoint.resume={own}")
    assert f"{own.name}: that is no complete checkpoint" in last_words(gone)


def test_new_folder_may_begin_at_a_checkpoint_of_another(run_dir: Path, tmp_path: Path) -> None:
    named = f"checkpoint.resume={run_dir / CHECKPOINTS / 'step_000006'}"
    assert step_of(check_run_folder(config(tmp_path / "new", named)).checkpoint) == 6
    assert check_run_folder(config(tmp_path / "new")) == Beginning(None)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["checkpoint.resume=never"], 'already holds a run .* checkpoint.resume is "never"'),
        (["checkpoint.resume={other}"], "names a checkpoint of another folder"),
        (["checkpoint.resume=nowhere"], "nowhere: that is no complete checkpoint"),
        (["train.steps=5"], "after step 6, beyond train.steps=5"),
    ],
)
def test_what_cannot_be_resumed_is_refused(
    run_dir: Path, tmp_path: Path, overrides: list[str], expected: str
) -> None:
    other = make_checkpoint(tmp_path / "other", 3)
    with pytest.raises(InputError, match=expected):
        check_run_folder(config(run_dir, *(text.format(other=other) for text in overrides)))


def test_a_resumed_run_keeps_its_chat_template(run_dir: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0].content }}")
    given = [f"render.chat_template={template}", "render.chat_template_kwargs.effort=low"]
    (run_dir / "config.toml").write_text(dump_toml(config(run_dir, *given)))
    assert check_run_folder(config(run_dir, *given)).checkpoint is not None
    template.write_text("{{ messages[-1].content }}")
    with pytest.raises(InputError, match="another text than .*config.toml has"):
        check_run_folder(config(run_dir, *given))
    # Its own configuration resumes it without the file.
    template.unlink()
    saved = load_config(run_dir / "config.toml")
    assert saved.render.chat_template == "{{ messages[0].content }}"
    assert saved.render.chat_template_kwargs == {"effort": "low"}
    assert check_run_folder(saved).checkpoint is not None


def test_a_resumed_run_keeps_its_model(run_dir: Path, tmp_path: Path) -> None:
    values = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 8,
              "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
              "vocab_size": 9, "max_position_embeddings": 64, "rms_norm_eps": 1e-6}  # fmt: skip
    for name, layers in (("old", 1), ("moved", 1), ("other", 2)):
        (tmp_path / name).mkdir()
        sizes = values | {"num_hidden_layers": layers}
        (tmp_path / name / "config.json").write_text(json.dumps(sizes))
    (run_dir / "config.toml").write_text(dump_toml(config(run_dir, f"model.path={tmp_path}/old")))
    for name in ("old", "moved"):
        assert check_run_folder(config(run_dir, f"model.path={tmp_path}/{name}")).checkpoint
    with pytest.raises(InputError, match="other is another model than .*old, with which the run"):
        check_run_folder(config(run_dir, f"model.path={tmp_path}/other"))
    # Without the old folder nothing can be compared.
    shutil.rmtree(tmp_path / "old")
    assert check_run_folder(config(run_dir, f"model.path={tmp_path}/other")).checkpoint


def test_run_that_ended_goes_on_only_with_more_steps(run_dir: Path) -> None:
    make_checkpoint(run_dir, 10)
    # Killed between its export and its summary.
    assert step_of(check_run_folder(config(run_dir)).checkpoint) == 10
    (run_dir / "summary.json").write_text("{}")
    with pytest.raises(InputError, match="has ended: it is complete after step 10.*train.steps"):
        check_run_folder(config(run_dir))
    assert step_of(check_run_folder(config(run_dir, "train.steps=12")).checkpoint) == 10


def test_run_without_a_complete_checkpoint_is_never_overwritten(run_dir: Path) -> None:
    (run_dir / CHECKPOINTS / "step_000006" / "COMPLETE").unlink()
    with pytest.raises(InputError, match=r"with other values of train\.steps, and no complete che"):
        check_run_folder(config(run_dir))
    (run_dir / "config.toml").write_text("[nowhere]")
    with pytest.raises(InputError, match="to resume from, nor can its config.toml be compared wit"):
        check_run_folder(config(run_dir))


def test_the_same_command_begins_anew_after_an_attempt_without_a_checkpoint(run_dir: Path) -> None:
    (run_dir / CHECKPOINTS / "step_000006" / "COMPLETE").unlink()
    # As the launcher saves it: places are absolute, ports are chosen.
    given = config(run_dir, "optimizer.lr=0.5")
    saved = given.model_copy(update={"ports": PortsConfig(prompts=4711)})
    (run_dir / "config.toml").write_text(dump_toml(saved))
    for name in ("hf/cold_start", "rollouts", "tasks"):
        (run_dir / name).mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text("{}\n")
    assert check_run_folder(given) == Beginning(None, is_again=True)
    with pytest.raises(InputError, match=r"config\.toml\) with other values of optimizer\.lr, and"):
        check_run_folder(config(run_dir, "optimizer.lr=0.25"))
    aside = set_aside(run_dir)
    assert load_config(aside / "config.toml") == saved
    assert {path.name for path in aside.iterdir()} == {
        "config.toml", "hf", "metrics.jsonl", "rollouts",
    }  # fmt: skip
    assert (aside / "hf" / "cold_start").is_dir() and (run_dir / "tasks").is_dir()
    assert check_run_folder(given) == Beginning(None, is_again=True)
    (run_dir / "rollouts").mkdir()
    assert set_aside(run_dir) == run_dir / "attempt_2"


def test_run_that_ended_without_a_checkpoint_says_so(run_dir: Path) -> None:
    shutil.rmtree(run_dir / CHECKPOINTS)
    given = config(run_dir)
    (run_dir / "config.toml").write_text(dump_toml(given))
    (run_dir / "summary.json").write_text("{}")
    with pytest.raises(InputError, match="has ended without a checkpoint to resume from"):
        check_run_folder(given)


def test_folder_is_locked_until_the_last_child_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "_LOCK_WAIT_S", 0.5)
    program = "import sys; sys.stdin.read()"
    with locked(tmp_path) as lock:
        child = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, pass_fds=(lock.descriptor,)
        )
        with pytest.raises(InputError, match="a run is running in"), locked(tmp_path):
            pass
    try:
        with pytest.raises(InputError, match="a run is running in"), locked(tmp_path):
            pass
    finally:
        child.communicate(timeout=60)
    with locked(tmp_path):
        pass


def test_what_was_stopped_when_its_launcher_died_does_not_keep_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "_LOCK_WAIT_S", 10.0)
    note = {FAILURE_VARIABLE: str(tmp_path / "logs" / FAILURES / "verifier")}
    other = {FAILURE_VARIABLE: str(tmp_path / "other" / FAILURES / "verifier")}

    def start(environment: dict[str, str], *descriptors: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["sleep", "600"], env=os.environ | environment, pass_fds=descriptors
        )

    with locked(tmp_path) as lock:
        holder = start(note, lock.descriptor)
        rank, running, stranger = start(note), start(note), start(other)
    try:
        for process in (holder, rank, stranger):
            process.send_signal(signal.SIGSTOP)
        with locked(tmp_path):
            assert holder.wait(60) == rank.wait(60) == -signal.SIGKILL
            # A running process ends itself, and the stranger belongs to another run.
            assert running.poll() is None and stranger.poll() is None
    finally:
        for process in (holder, rank, running, stranger):
            process.kill()
            process.wait(60)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_its_user_reads_a_run_folder_and_the_label_in_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    new = config(tmp_path / "shared" / "run", "expert.ports.label=secret")
    with locked(new.run.dir):
        write_config(new, None)
        evaluation = write_evaluation_config(new, "final", tmp_path)
    assert mode(new.run.dir) == 0o700
    assert mode(new.run.dir / CONFIG) == mode(evaluation) == 0o600
    # What a run makes has its user's own modes, so that opening the folder shares it.
    assert mode(new.run.dir.parent) & 0o055 and not caplog.records


def test_an_open_folder_of_a_resumed_run_is_closed_which_is_told_once(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir.chmod(0o2775)
    (run_dir / CONFIG).chmod(0o644)
    with locked(run_dir):
        write_config(config(run_dir), run_dir / CHECKPOINTS / "step_000006")
    assert mode(run_dir) == 0o2700
    assert mode(run_dir / "config.until_step_000006.toml") == mode(run_dir / CONFIG) == 0o600
    with locked(run_dir):
        pass
    [told] = [record.getMessage() for record in caplog.records]
    assert f"{run_dir} was open to other users (mode 2775)" in told
    assert "docs/run-folder.md" in told


def test_a_folder_that_cannot_be_closed_is_told_with_the_fix(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that a colleague has made."""

    def refuse(path: Path, mode: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    run_dir.chmod(0o777)
    monkeypatch.setattr(Path, "chmod", refuse)
    with locked(run_dir):
        pass
    [told] = [record.getMessage() for record in caplog.records]
    assert "Operation not permitted" in told and f"`chmod go= {run_dir}`" in told


def test_a_launcher_that_is_killed_while_it_resumes_leaves_a_configuration(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_dir / CONFIG).write_text("first")
    resumed, write_whole = run_dir / CHECKPOINTS / "step_000006", run_folder.write_whole

    def die(path: Path, content: str, *, is_private: bool = False) -> None:
        if path.name == CONFIG:
            raise KeyboardInterrupt
        write_whole(path, content, is_private=is_private)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_folder, "write_whole", die)
        write_config(config(run_dir), resumed)
    assert (run_dir / CONFIG).read_text() == "first"
    # Two more starts from the same step: its steps were taken with the first configuration.
    for _ in range(2):
        write_config(config(run_dir), resumed)
    assert (run_dir / "config.until_step_000006.toml").read_text() == "first"


def test_each_evaluation_of_a_start_has_a_tree_and_a_label_of_its_own(tmp_path: Path) -> None:
    settings = ["sft.steps=9", "sft.export_every_steps=5", "sft.baseline=true"]
    first, second = (draw_label(config(tmp_path, *settings)) for _ in range(2))
    labels = set()
    for start in (first, second):
        labels.add(start.ports.label)
        for label in ("cold_start_step_5", "cold_start_step_9", "sft_baseline"):
            path = write_evaluation_config(start, label, tmp_path / "hf" / label)
            assert path == tmp_path / f"config.{label}.toml"
            tree = load_config(path)
            assert tree.ports.label == f"{start.ports.label}.{label}"
            assert tree.model.path == tmp_path / "hf" / label
            assert not tree.generator.wait_for_weight_sync and start.generator.wait_for_weight_sync
            labels.add(tree.ports.label)
    # Nobody of one of these eight may be heard by another.
    assert len(labels) == 8 and "" not in labels
    named = config(tmp_path, "expert.ports.label=mine")
    assert draw_label(named) == named
