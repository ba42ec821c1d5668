from pathlib import Path

import pytest

from megatron_rl.config.errors import ConfigError
from megatron_rl.config.files import load_config, read_layers, resolve
from megatron_rl.config.layers import DEFAULT, OVERRIDE
from megatron_rl.config.shipped import config_path, shipped

BASE = """
[train]
steps = 5
group_size = 4

[[prompts]]
path = "a.jsonl"

[[prompts]]
path = "b.jsonl"
"""
MINE = """
[train]
steps = 9

[[prompts]]
path = "c.jsonl"
"""


def write(folder: Path, **texts: str) -> list[Path]:
    files = [folder / f"{name}.toml" for name in texts]
    for file, text in zip(files, texts.values(), strict=True):
        file.write_text(text)
    return files


def test_later_files_win_key_by_key_and_lists_are_replaced_whole(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, base=BASE, mine=MINE))
    assert (config.train.steps, config.train.group_size) == (9, 4)
    assert [source.path for source in config.prompts] == [Path("c.jsonl")]
    other_way = load_config(write(tmp_path, base=BASE, mine=MINE)[::-1])
    assert other_way.train.steps == 5
    assert [str(source.path) for source in other_way.prompts] == ["a.jsonl", "b.jsonl"]


def test_every_value_knows_its_origin(tmp_path: Path) -> None:
    base, mine = write(tmp_path, base=BASE, mine=MINE)
    layers = read_layers([base, mine], ["train.minibatches=2", "prompts.0.weight=3"])
    resolve(layers)
    assert layers.origin_of("train.group_size") == str(base)
    assert layers.origin_of("train.steps") == str(mine)
    assert layers.origin_of("train.minibatches") == OVERRIDE
    assert layers.origin_of("train.microbatch_tokens") == DEFAULT
    assert layers.origin_of("prompts.0.path") == str(mine)
    assert layers.origin_of("prompts.0.weight") == OVERRIDE
    # The base's second source is gone with its list.
    assert layers.origin_of("prompts.1.path") == DEFAULT


def test_what_a_preset_fills_in_comes_from_the_preset(tmp_path: Path) -> None:
    text = '[algorithm]\npreset = "grpo"\nsurrogate.eps_low = 0.1\n'
    layers = read_layers(write(tmp_path, base=text))
    config = resolve(layers)
    assert (config.algorithm.surrogate.eps_low, config.algorithm.surrogate.eps_high) == (0.1, 0.2)
    assert layers.origin_of("algorithm.surrogate.eps_low").endswith("base.toml")
    assert layers.origin_of("algorithm.surrogate.eps_high") == "preset grpo"


def test_a_later_preset_forgets_what_an_earlier_file_said_of_another(tmp_path: Path) -> None:
    first = '[algorithm]\npreset = "grpo"\nsurrogate.eps_high = 0.5\n'
    files = write(tmp_path, base=first, mine='[algorithm]\npreset = "dr_grpo"\n')
    layers = read_layers(files)
    assert resolve(layers) == load_config(None, ["algorithm.preset=dr_grpo"])
    assert layers.origin_of("algorithm.surrogate.eps_high") == "preset dr_grpo"
    # The same preset again changes nothing.
    files = write(tmp_path, base=first, mine='[algorithm]\npreset = "grpo"\n')
    assert load_config(files).algorithm.surrogate.eps_high == 0.5


def test_an_override_of_a_whole_table_replaces_it(tmp_path: Path) -> None:
    files = write(tmp_path, base='[reward.tasks.own]\ngate = "box"\ncompare = "exact"\n')
    layers = read_layers(files, ['reward.tasks={mine = {compare = "math"}}'])
    assert set(resolve(layers).reward.tasks) == {"mine"}
    assert layers.origin_of("reward.tasks.mine.compare") == OVERRIDE
    assert layers.origin_of("reward.tasks.own.gate") == DEFAULT


def test_a_faulty_file_is_named_among_several(tmp_path: Path) -> None:
    files = write(tmp_path, base=BASE, mine="[train")
    with pytest.raises(ConfigError, match=r"mine\.toml is no valid TOML"):
        load_config(files)


def test_shipped_configurations_have_names_and_files_go_before_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {"tiny", "quickstart", "magistral_24b"} <= set(shipped())
    assert config_path("magistral_24b").name == "magistral_24b.toml"
    with pytest.raises(ConfigError, match="did you mean 'magistral_24b'"):
        config_path("magistral24b")
    # What looks like a path is one: its absence is told when it is read.
    assert config_path("some/where.toml") == Path("some/where.toml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").write_text(BASE)
    assert load_config(config_path("tiny")).train.steps == 5
