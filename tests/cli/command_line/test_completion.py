"""What a shell is offered."""

from pathlib import Path

import pytest

from megatron_rl.cli.command_line.parameters import (
    complete_config,
    complete_key,
    complete_override,
    complete_run_folder,
)
from megatron_rl.cli.main import main
from megatron_rl.config.presets import PRESETS
from megatron_rl.config.reference import tables
from megatron_rl.config.shipped import shipped


def test_keys_are_offered() -> None:
    assert "train.group_size=" in complete_override("trai")
    assert complete_override("train.group_s") == ["train.group_size="]
    assert complete_override("nonsense.") == []
    assert complete_key("train.group_s") == ["train.group_size"]


def test_every_key_is_offered_for_itself() -> None:
    keys = [entry.key.replace("NAME", "mine") for table in tables() for entry in table.entries]
    assert len(keys) > 250
    assert all(f"{key}=" in complete_override(key) for key in keys)


def test_items_of_lists_and_names_of_the_users_are_taken_as_typed() -> None:
    assert "prompts.3.path=" in complete_override("prompts.3.")
    assert "reward.tasks.mine.format_check=" in complete_override("reward.tasks.mine.")


def test_values_of_a_fixed_set_are_offered() -> None:
    assert complete_override("expert.generator.wait_for_weight_sync=") == [
        "expert.generator.wait_for_weight_sync=true", "expert.generator.wait_for_weight_sync=false",
    ]  # fmt: skip
    assert "weights.method=folder" in complete_override("weights.method=")
    assert complete_override("algorithm.preset=x") == [f"algorithm.preset={n}" for n in PRESETS]
    assert "reward.tasks.mine.format_check=think_box" in complete_override(
        "reward.tasks.mine.format_check="
    )
    assert complete_override("train.group_size=") == []


def test_configurations_and_runs_are_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/one", "runs/none"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "runs/one/config.toml").write_text("")
    assert complete_config("") == list(shipped())
    assert complete_config("mi") == ["miniature"]
    assert complete_run_folder("") == complete_run_folder("runs/o") == ["runs/one"]
    assert complete_run_folder("nowhere/") == []


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["conf"], ["config"]),
        (["run", "--conf"], ["--config"]),
        (["run", "--config", "tiny_s"], ["tiny_skills"]),
        (["run", "--config", "tiny", "train.group_s"], ["train.group_size="]),
        (["data", "ded"], ["dedupe"]),
    ],
)
def test_the_program_answers_a_shell(
    words: list[str], offered: list[str], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("_MEGATRON_RL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(["megatron-rl", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    assert capsys.readouterr().out.split() == offered
