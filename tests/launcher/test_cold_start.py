"""What an attempt left of its cold start is kept, and the rest is set aside."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import dump_toml, load_config
from megatron_rl.config.tree import Config
from megatron_rl.launcher.cold_start import (
    begin_with,
    first_model,
    is_due,
    is_evaluated,
    is_trained,
    steps_left_behind,
)
from megatron_rl.launcher.last_words import last_words
from megatron_rl.launcher.run import begin_anew
from megatron_rl.launcher.run_folder import Beginning, check_run_folder, locked
from megatron_rl.observe.choice import CHOSEN, SET, Candidate
from megatron_rl.protocol.checkpoint_folder import CHECKPOINTS, SFT_CHECKPOINTS, seal
from megatron_rl.protocol.metrics import read_jsonl


def config(run_dir: Path, *overrides: str) -> Config:
    return load_config(None, [f"run.dir={run_dir}", "sft.steps=9", *overrides])


def make_checkpoint(run_dir: Path, step: int) -> None:
    partial = run_dir / SFT_CHECKPOINTS / "step.partial"
    partial.mkdir(parents=True)
    (partial / "sft.json").write_text("{}")
    seal(partial, step, {})


def make_model(run_dir: Path, name: str, content: str = "weights") -> Path:
    folder = run_dir / "hf" / name
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text(content)
    return folder


def write_rows(run_dir: Path) -> None:
    rows = [{"source": "sft", "step": step, "train/loss": 1.0} for step in range(1, 10)]
    rows += [
        {"source": "queue", "step": 0, "label": "cold_start_step_3", "eval/accuracy": 0.5},
        {"source": "launch", "step": 0, CHOSEN: 3, SET: ""},
        {"source": "queue", "step": 0, "label": "before", "eval/accuracy": 0.5},
        {"source": "trainer", "step": 1, "train/loss": 1.0},
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """What a run left that was killed in its reinforcement learning before its first checkpoint."""
    run_dir = tmp_path / "run"
    (run_dir / "rollouts").mkdir(parents=True)
    for name in ("step_000001.jsonl", "eval_before.jsonl", "eval_cold_start_step_3.jsonl",
                 "dropped_eval_cold_start_step_3.jsonl"):  # fmt: skip
        (run_dir / "rollouts" / name).write_text("")
    (run_dir / "config.toml").write_text("")
    write_rows(run_dir)
    return run_dir


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (["sft.optimizer.lr=0.5"], "sft.optimizer.lr"),
        (["sft.steps=12", "sft.optimizer.lr=0.5"], "sft.optimizer.lr, sft.steps"),
    ],
)
def test_a_cold_start_is_resumed_by_its_own_values_and_a_changed_key_is_named(
    tmp_path: Path, changes: list[str], named: str
) -> None:
    run_dir = tmp_path / "run"
    make_checkpoint(run_dir, 3)
    make_checkpoint(run_dir, 6)
    own = config(run_dir)
    # The folder has moved since.
    moved = own.run.model_copy(update={"dir": tmp_path / "before"})
    (run_dir / "config.toml").write_text(dump_toml(own.model_copy(update={"run": moved})))
    assert check_run_folder(own) == Beginning(None, is_again=True)
    with pytest.raises(InputError) as raised:
        check_run_folder(config(run_dir, *changes))
    text = str(raised.value)
    assert f"with other values of {named}, and" in text
    assert (
        f"The command with the values of {run_dir}/config.toml starts it again, except for its "
        "cold start, which resumes after step 6 of 9. Name another folder" in text
    )
    every = own.sft.checkpoint_every_steps
    assert last_words(own) == (
        "Only the cold start is saved, up to step 6 of 9: the cold start is not over "
        f"(sft.checkpoint_every_steps={every}). The same command starts the run again, except for "
        "its cold start, which resumes after step 6 of 9."
    )


def test_the_refusal_of_other_values_says_how_to_begin_with_the_trained_model(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "the run"
    make_checkpoint(run_dir, 6)
    (run_dir / "config.toml").write_text(dump_toml(config(run_dir)))
    changed = config(run_dir, "sampling.max_new_tokens=24")
    with pytest.raises(InputError, match=r"with other values of sampling.*\(or run\.dir=DIR\)$"):
        check_run_folder(changed)
    make_model(run_dir, "cold_start")
    with pytest.raises(InputError) as raised:
        check_run_folder(changed)
    assert str(raised.value).endswith(
        f"DIR). There, model.path='{run_dir}/hf/cold_start' and sft.steps=0 begin with its model"
    )


HOLDER = """
import sys
from pathlib import Path
from megatron_rl.launcher.run_folder import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_command_that_never_had_the_folder_does_not_speak_of_the_run_in_it(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.toml").write_text("")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run_dir)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    assert last_words(config(run_dir)) == (
        f"Another launcher has the folder: a run is running in {run_dir}: end it first, or name "
        "another folder with --run-dir DIR."
    )
    holder.communicate(timeout=60)
    # Its own words, as those of a run that has ended.
    assert last_words(config(run_dir)).startswith("Nothing is saved: the cold start is not over")
    with locked(run_dir):
        assert last_words(config(run_dir)).startswith("Nothing is saved: the cold start")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_finished_cold_start_is_kept_with_what_is_known_of_it(run_dir: Path) -> None:
    for name in ("cold_start", "cold_start_step_3", "sft_baseline", "cold_start_step_6.partial"):
        make_model(run_dir, name)
    cfg = config(run_dir)
    text = begin_anew(cfg)
    assert "starts again, except for its cold start, which is complete; the attempt" in text
    aside = run_dir / "attempt_1"
    assert names(run_dir / "hf") == {"cold_start", "cold_start_step_3"}
    assert names(aside / "hf") == {"sft_baseline", "cold_start_step_6.partial"}
    assert names(run_dir / "rollouts") == {
        "eval_cold_start_step_3.jsonl", "dropped_eval_cold_start_step_3.jsonl",
    }  # fmt: skip
    assert names(aside / "rollouts") == {"step_000001.jsonl", "eval_before.jsonl"}
    rows = read_jsonl(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows if row["source"] == "sft"] == list(range(1, 10))
    assert [row.get("label", row.get(CHOSEN)) for row in rows[9:]] == ["cold_start_step_3", 3]
    assert len(read_jsonl(aside / "metrics.jsonl")) == 13
    assert (run_dir / "config.toml").exists() and (aside / "config.toml").exists()
    assert not is_due(cfg, is_resumed=False)
    assert first_model(cfg, is_resumed=False) == run_dir / "hf" / "cold_start"
    # Killed once more: the rows of the cold start stay.
    (run_dir / "config.toml").write_text("")
    begin_anew(cfg)
    assert len(read_jsonl(run_dir / "metrics.jsonl")) == 11


def test_a_run_at_the_checkpoint_of_another_one_begins_with_its_cold_start(
    run_dir: Path, tmp_path: Path
) -> None:
    """The reference "start" and the SFT baseline are those of the other run."""
    partial = run_dir / CHECKPOINTS / "step.partial"
    partial.mkdir(parents=True)
    (partial / "queue.json").write_text("{}")
    given = [f"checkpoint.resume={seal(partial, 4, {})}", "algorithm.preset=grpo"]
    cfg = config(tmp_path / "new", *given)
    with pytest.raises(
        InputError, match=r"reference.policy=\"start\" needs .* no .*cold_start: set"
    ):
        check_run_folder(cfg)
    assert first_model(config(tmp_path / "new", given[0]), is_resumed=True) == cfg.model.path
    model = make_model(run_dir, "cold_start")
    assert first_model(cfg, is_resumed=True) == model
    assert check_run_folder(cfg).checkpoint == run_dir / CHECKPOINTS / "step_000004"
    # Without the key its model is not found, which is said before the folder changes.
    (tmp_path / "new" / CHECKPOINTS).mkdir(parents=True)
    shutil.copytree(
        run_dir / CHECKPOINTS / "step_000004", tmp_path / "new" / CHECKPOINTS / "step_000004"
    )
    (tmp_path / "new" / "config.toml").write_text(dump_toml(cfg))
    assert check_run_folder(cfg).checkpoint == tmp_path / "new" / CHECKPOINTS / "step_000004"
    with pytest.raises(InputError, match="give checkpoint.resume=.*/step_000004 again, or set"):
        check_run_folder(config(tmp_path / "new", given[1]))


def test_a_cold_start_that_was_cut_off_goes_on_at_its_newest_checkpoint(run_dir: Path) -> None:
    for step in (4, 6):
        make_checkpoint(run_dir, step)
    make_model(run_dir, "cold_start.partial")
    cfg = config(run_dir)
    assert steps_left_behind(cfg) == 6 and steps_left_behind(config(run_dir, "sft.steps=0")) == 0
    assert check_run_folder(config(run_dir / "new")).checkpoint is None
    assert "its cold start, which resumes after step 6 of 9" in begin_anew(cfg)
    rows = read_jsonl(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows if row["source"] == "sft"] == list(range(1, 7))
    assert is_due(cfg, is_resumed=False) and steps_left_behind(cfg) == 6
    assert names(run_dir / "attempt_1" / "hf") == {"cold_start.partial"}


def test_without_a_checkpoint_everything_is_set_aside(run_dir: Path) -> None:
    make_model(run_dir, "cold_start_step_3")
    cfg = config(run_dir, "sft.export_every_steps=3")
    assert "starts again; the attempt" in begin_anew(cfg)
    assert names(run_dir) == {"attempt_1", "config.toml"}
    assert {"hf", "rollouts", "metrics.jsonl"} < names(run_dir / "attempt_1")


def test_models_that_were_exported_wait_for_their_evaluation_alone(run_dir: Path) -> None:
    for step in (3, 6, 9):
        make_model(run_dir, f"cold_start_step_{step}", f"weights {step}")
    cfg = config(run_dir, "sft.export_every_steps=3")
    assert cfg.sft.candidates == [3, 6, 9]
    begin_anew(cfg)
    assert is_trained(cfg) and is_due(cfg, is_resumed=False)
    rows = read_jsonl(run_dir / "metrics.jsonl")
    rows[9]["eval/n"] = 64
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert is_evaluated(cfg, 3) and not is_evaluated(cfg, 6)
    begin_with(cfg, Candidate(6, 0.5, 0.1, 64))
    chosen = run_dir / "hf" / "cold_start" / "model.safetensors"
    assert chosen.read_text() == "weights 6"
    assert read_jsonl(run_dir / "metrics.jsonl")[-1][CHOSEN] == 6
    # No second copy of the weights.
    assert os.stat(chosen).st_nlink == 2
    assert not is_due(cfg, is_resumed=False)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["sft.export_every_steps=9"], "is not below sft.steps=9: there is one model"),
        (["sft.export_every_steps=3", "eval.prompts=0"], "chooses by an evaluation, and"),
        (["sft.export_every_steps=3", "sft.choose_by=few"], "'few' is none of eval.sets"),
    ],
)
def test_an_impossible_choice_is_refused(
    tmp_path: Path, overrides: list[str], expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        config(tmp_path, *overrides)
    assert config(tmp_path, *overrides, "sft.steps=0").sft.candidates == []
