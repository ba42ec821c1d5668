"""What a shell is offered, and that bash itself puts it where it belongs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.cli.command_line.bash_script import BASH_SCRIPT
from megatron_rl.cli.command_line.completion import (
    complete_config,
    complete_key,
    complete_override,
    complete_run_folder,
)
from megatron_rl.config.presets import PRESETS
from megatron_rl.config.reference import tables
from megatron_rl.config.shipped import shipped

ROOT = Path(__file__).resolve().parents[3]


def test_keys_are_offered_part_by_part() -> None:
    assert complete_override("trai") == ["train."]
    assert "train.group_size=" in complete_override("train.")
    assert complete_override("train.group_s") == ["train.group_size="]
    assert complete_override("sft.opt") == ["sft.optimizer."]
    assert complete_override("nonsense.") == []
    assert complete_key("train.group_s") == ["train.group_size"]


def test_every_key_can_be_reached_from_nothing() -> None:
    keys = [entry.key.replace("NAME", "mine") for table in tables() for entry in table.entries]
    assert len(keys) > 250
    for key in keys:
        parts = key.split(".")
        assert f"{key}=" in complete_override(key)
        # Up to where only the user knows how it goes on.
        known = parts[: parts.index("mine")] if "mine" in parts else parts[:-1]
        for count in range(len(known)):
            offers = complete_override(".".join([*known[:count], ""]) if count else "")
            assert ".".join([*known[: count + 1], ""]) in offers, key


def test_items_of_lists_and_names_of_the_users_are_taken_as_typed() -> None:
    assert "prompts.3.path=" in complete_override("prompts.3.")
    assert "reward.tasks.mine.format_check=" in complete_override("reward.tasks.mine.")
    assert complete_override("reward.ta") == ["reward.tasks."]


def test_values_of_a_fixed_set_are_offered() -> None:
    assert complete_override("expert.generator.wait_for_weight_sync=") == [
        "expert.generator.wait_for_weight_sync=true", "expert.generator.wait_for_weight_sync=false",
    ]  # fmt: skip
    assert "weights.method=disk" in complete_override("weights.method=")
    assert complete_override("algorithm.preset=x") == [f"algorithm.preset={n}" for n in PRESETS]
    assert "reward.tasks.mine.format_check=think_box" in complete_override(
        "reward.tasks.mine.format_check="
    )
    assert complete_override("train.group_size=") == []


def test_configurations_and_runs_are_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/one", "runs/none", "elsewhere/two"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("runs/one/config.toml", "elsewhere/two/config.toml", "mine.toml"):
        (tmp_path / name).write_text("")
    assert set(complete_config("")) == {*shipped(), "mine.toml", "runs/", "elsewhere/"}
    assert complete_config("mi") == ["miniature", "mine.toml"]
    assert complete_run_folder("") == ["runs/one", "elsewhere/", "runs/"]
    assert complete_run_folder("elsewhere/t") == ["elsewhere/two"]
    assert complete_run_folder("nowhere/") == []


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("megatron-rl conf", ["config"]),
        ("megatron-rl run --conf", ["--config"]),
        ("megatron-rl run --config tiny_s", ["tiny_skills"]),
        ("megatron-rl run --config tiny train.group_s", ["train.group_size="]),
        # Bash replaces what is behind `=` alone.
        ("megatron-rl run --config tiny weights.method=d", ["disk"]),
        ("megatron-rl run --config tiny train.steps=4 sft.optimizer.lr_schedule=",
         ["constant", "linear", "cosine"]),
        ("megatron-rl data ded", ["dedupe"]),
    ],
)  # fmt: skip
def test_bash_is_given_what_belongs_at_the_cursor(
    line: str, offered: list[str], tmp_path: Path
) -> None:
    program = tmp_path / "megatron-rl"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -m megatron_rl.cli.main\n")
    program.chmod(0o755)
    names = {"complete_func": "_complete", "prog_name": "megatron-rl",
             "autocomplete_var": "_MEGATRON_RL_COMPLETE"}  # fmt: skip
    script = (
        f"{BASH_SCRIPT % names}\nCOMP_WORDBREAKS=$' \\t\\n=:'\ncompopt() {{ :; }}\n"
        f"COMP_LINE='{line}' COMP_POINT={len(line)}\n_complete {program}\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout.split("\n")[:-1] == offered, done.stderr
