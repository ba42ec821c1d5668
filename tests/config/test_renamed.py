"""Former names of keys: refused with today's name, rewritten by `config migrate`."""

import io
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from megatron_rl.cli import config as config_command
from megatron_rl.config.errors import ConfigError
from megatron_rl.config.files import load_config
from megatron_rl.config.reference import tables
from megatron_rl.config.renamed import RENAMED, migrate, new_name

OLD = """\
# Kept as it is: algorithm.surrogate
[train]
steps = 10
groups_per_batch = 8  # prompts
[algorithm.surrogate]
eps_high = 0.3
[algorithm]
flat_groups = "keep"
[[stages]]
name = "one"
at_step = 5
[stages.train]
groups_per_batch = 4
[reward.tasks.mine]
gate = "box"
compare = "exact"
"""


def run_migrate(path: Path) -> str:
    out = io.StringIO()
    options = config_command.MigrateOptions([path])
    assert config_command.migrate_files(options, Console(file=out, width=200)) == 0
    return out.getvalue()


def test_each_former_name_is_refused_with_todays(tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    file.write_text(OLD)
    with pytest.raises(ConfigError) as refused:
        load_config(file)
    told = str(refused.value)
    for old, new in {
        "train.groups_per_batch": "train.prompts_per_batch",
        "stages.0.train.groups_per_batch": "stages.0.train.prompts_per_batch",
        "algorithm.surrogate": "algorithm.policy_loss",
        "algorithm.flat_groups": "algorithm.zero_variance_groups",
        "reward.tasks.mine.gate": "reward.tasks.mine.format_check",
    }.items():
        assert f"'{old}' is named {new!r} now" in told
    assert "megatron-rl config migrate" in told


def test_a_migrated_file_loads_and_keeps_comments(tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    file.write_text(OLD)
    assert "train.groups_per_batch -> train.prompts_per_batch" in run_migrate(file)
    text = file.read_text()
    assert "# Kept as it is: algorithm.surrogate\n" in text and "prompts_per_batch = 8  # p" in text
    config = load_config(file)
    assert config.train.prompts_per_batch == 8 and config.algorithm.policy_loss.eps_high == 0.3
    assert config.stages[0].train.prompts_per_batch == 4
    assert config.reward.tasks["mine"].format_check == "box"
    assert "nothing to change" in run_migrate(file) and file.read_text() == text


def test_overrides_of_a_sweep_are_rewritten() -> None:
    text = 'overrides = ["algorithm.surrogate.eps_high=0.2", "train.groups_per_batch=4"]\n'
    migrated, changes = migrate(text)
    assert tomllib.loads(migrated)["overrides"] == [
        "algorithm.policy_loss.eps_high=0.2", "train.prompts_per_batch=4"
    ]  # fmt: skip
    assert len(changes) == 2


def test_what_cannot_be_rewritten_safely_is_left_and_said() -> None:
    with pytest.raises(ConfigError, match=r"inline table.*reward\.tasks"):
        migrate('[reward.tasks]\nmine = {gate = "box", compare = "exact"}\n')


@pytest.mark.parametrize("old", RENAMED)
def test_each_former_name_is_rewritten_to_a_name_of_as_many_parts(old: str) -> None:
    given, now = old.replace("*", "mine"), RENAMED[old].replace("*", "mine")
    assert len(given.split(".")) == len(now.split("."))
    migrated, changes = migrate(f"{given} = 1\n")
    found = [line.removesuffix(" = 1") for line in migrated.splitlines()]
    assert found in ([now], [f"expert.{now}"]) and changes == [f"{given} -> {found[0]}"]


MOVED = """\
[train]
groups_per_batch = 4
[ports]
hosts = [
  5000, # the first
  5001,
]
label = "a"
[render]
system_prompt = '''
[train]
groups_per_batch = 9
'''
[expert.ports] # few need them
torchrun = 7000
[model]
fusions = ["x",
"y"]
"""


def test_values_of_several_lines_move_whole() -> None:
    migrated, changes = migrate(MOVED)
    assert changes == [
        "train.groups_per_batch -> train.prompts_per_batch",
        "ports.hosts -> expert.ports.nodes",
        "ports.label -> expert.ports.label",
        "model.fusions -> expert.model.fusions",
    ]
    assert tomllib.loads(migrated) == {
        "train": {"prompts_per_batch": 4},
        "ports": {},
        "render": {"system_prompt": "[train]\ngroups_per_batch = 9\n"},
        "model": {},
        "expert": {
            "ports": {"torchrun": 7000, "nodes": [5000, 5001], "label": "a"},
            "model": {"fusions": ["x", "y"]},
        },
    }
    assert "  5000, # the first\n" in migrated


def test_a_valid_file_whose_key_cannot_be_moved_is_not_called_invalid() -> None:
    with pytest.raises(ConfigError, match=r"by hand: ports.label -> expert.ports.label;"):
        migrate('expert.ports.torchrun = 7000\n[ports]\nlabel = "a"\n')


def test_every_new_name_is_a_key() -> None:
    known = {entry.key for table in tables() for entry in table.entries}
    known |= {table.key for table in tables()}
    assert new_name("algorithm.surrogate.eps_low") == "algorithm.policy_loss.eps_low"
    for new in RENAMED.values():
        stem = new.replace("stages.*.", "stages.0.").replace(
            "reward.tasks.*.", "reward.tasks.NAME."
        )
        assert stem in known or f"expert.{stem}" in known, stem


@pytest.mark.parametrize(
    ("method", "now"), [("host", "folder"), ("disk", "folder"), ("broadcast", "reshard")]
)
def test_a_removed_method_of_weight_sync_names_its_successor(method: str, now: str) -> None:
    with pytest.raises(ConfigError, match=f"weights.method.*'{method}' was removed: give '{now}'"):
        load_config(None, [f"weights.method={method}"])
