import re
from pathlib import Path

from megatron_rl.config.files import _known_keys, load_config
from megatron_rl.config.reference import commented_toml, find_entries, markdown, tables
from megatron_rl.config.tree import Config

ROOT = Path(__file__).resolve().parents[2]


def test_the_print_loads_and_equals_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "all.toml"
    # The default is a folder of the shell's, not one beside this file.
    path = f'path = "{Config().model.path}"'
    file.write_text(commented_toml().replace('path = "model"', path))
    assert load_config(file) == load_config(None)
    # Nothing is lost to comments but what has no default, or is the preset's: written again, all of
    # [algorithm] is what the preset says.
    file.write_text(re.sub(r"^# (?=\w+ = (?!\.\.\.))", "", algorithm_part(), flags=re.M))
    assert load_config(file) == load_config(None)


def algorithm_part() -> str:
    text = commented_toml()
    return text[text.index("#: The objective") : text.index("#: Steps and batch shape")]


def test_every_key_of_the_tree_is_there_with_a_meaning_and_lines_are_short() -> None:
    entries = [entry for table in tables() for entry in table.entries]
    plain = {re.sub(r"\.(0|NAME)(?=\.|$)", "", entry.key) for entry in entries}
    known = _known_keys(Config, "")
    values = {key for key in known if not any(k.startswith(f"{key}.") for k in known)}
    # Tables of tables: their own keys stand in their place. All keys of nodes are expert ones.
    assert (
        values - plain <= {"reward.tasks", "reward.extra", "nodes", "environments"}
        and len(values) > 200
    )
    assert [entry.key for entry in entries if not entry.meaning] == []
    assert [table.key for table in tables() if not table.meaning] == []
    comments = [line for line in commented_toml().splitlines() if line.startswith("#:")]
    assert max(map(len, comments)) <= 100


def test_kinds_say_limits_and_choices() -> None:
    kinds = {entry.key: entry.kind for table in tables() for entry in table.entries}
    assert kinds["train.group_size"] == "whole number at least 2"
    assert kinds["sampling.top_p"] == "number above 0 and at most 1"
    assert kinds["weights.method"] == '"reshard" | "ipc" | "folder"'
    assert kinds["eval.prompts"] == 'whole number at least 0 | "auto"'
    assert kinds["eval.sets.0.samples"] == "whole number at least 1 and at most 1024"
    assert kinds["replay.runs"] == "list of: path"


def test_a_section_is_explained_key_by_key() -> None:
    assert [entry.key for entry in find_entries("queue.max_staleness")] == ["queue.max_staleness"]
    inside = [entry.key for entry in find_entries("sft")]
    assert "sft.steps" in inside and "sft.optimizer.lr" in inside
    assert find_entries("sf") == []


def test_the_page_is_fresh() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == markdown(), "run: megatron-rl config --markdown > docs/configuration.md"
