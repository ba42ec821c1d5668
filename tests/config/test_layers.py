from pathlib import Path
from typing import get_args, get_origin

import pytest

from megatron_rl.config.errors import ConfigError
from megatron_rl.config.files import load_config, read_layers, resolve
from megatron_rl.config.layers import DEFAULT, OVERRIDE
from megatron_rl.config.paths import PATH_KEYS
from megatron_rl.config.section import Section
from megatron_rl.config.shipped import config_path, shipped
from megatron_rl.config.tree import Config

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
    assert [source.path for source in config.prompts] == [tmp_path / "c.jsonl"]
    other_way = load_config(write(tmp_path, base=BASE, mine=MINE)[::-1])
    assert other_way.train.steps == 5
    assert [source.path for source in other_way.prompts] == [
        tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    ]  # fmt: skip


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
    text = '[algorithm]\npreset = "grpo"\npolicy_loss.eps_low = 0.1\n'
    layers = read_layers(write(tmp_path, base=text))
    config = resolve(layers)
    assert (config.algorithm.policy_loss.eps_low, config.algorithm.policy_loss.eps_high) == (
        0.1,
        0.2,
    )
    assert layers.origin_of("algorithm.policy_loss.eps_low").endswith("base.toml")
    assert layers.origin_of("algorithm.policy_loss.eps_high") == "preset grpo"


def test_a_later_preset_forgets_what_an_earlier_file_said_of_another(tmp_path: Path) -> None:
    first = '[algorithm]\npreset = "grpo"\npolicy_loss.eps_high = 0.5\n'
    files = write(tmp_path, base=first, mine='[algorithm]\npreset = "dr_grpo"\n')
    layers = read_layers(files)
    assert resolve(layers) == load_config(None, ["algorithm.preset=dr_grpo"])
    assert layers.origin_of("algorithm.policy_loss.eps_high") == "preset dr_grpo"
    # The same preset again changes nothing, also where the default was not named before.
    files = write(tmp_path, base=first, mine='[algorithm]\npreset = "grpo"\n')
    assert load_config(files).algorithm.policy_loss.eps_high == 0.5
    files = write(tmp_path, base="[algorithm.policy_loss]\neps_high = 0.5\n")
    again = load_config(files, ["algorithm.preset=magistral"])
    assert again.algorithm.policy_loss.eps_high == 0.5


def test_an_override_appends_a_table_to_a_list(tmp_path: Path) -> None:
    files = write(tmp_path, base="[train]\nsteps = 5\n")
    given = [f"prompts.0.path={tmp_path / 'a'}", "prompts.1.path=/b", "eval.sets.0.name=x"]
    config = load_config(files, [*given, "eval.sets.0.prompts.path=/c", "prompts.0.weight=2"])
    assert [(one.path, one.weight) for one in config.prompts] == [
        (tmp_path / "a", 2.0), (Path("/b"), 1.0)
    ]  # fmt: skip
    assert config.eval.sets[0].prompts.path == Path("/c")
    with pytest.raises(ConfigError, match="there is no item 2; the next new one is 1"):
        load_config(files, ["prompts.0.path=/a", "prompts.2.path=/b"])


PATHS = """
[model]
path = "model"
megatron_path = "~/megatron"
[algorithm.reference]
policy = "../teacher"
[sft]
dataset = "/abs/sft.jsonl"
[replay]
share = 0.5
datasets = ["a.jsonl", "b/c.jsonl"]
[checkpoint]
resume = "checkpoints/step_000001"
[ports]
keys_dir = "keys"
[[prompts]]
path = "a.jsonl"
[[eval.sets]]
name = "x"
prompts = { path = "x.jsonl" }
[run]
dir = "runs/mine"
"""


def test_relative_paths_are_those_beside_the_file_and_overrides_those_of_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell, files = tmp_path / "shell", tmp_path / "files"
    shell.mkdir()
    files.mkdir()
    monkeypatch.chdir(shell)
    monkeypatch.setenv("HOME", "/home/me")
    tree = read_layers(write(files, mine=PATHS), ["eval.sets.0.prompts.path=y.jsonl"]).tree
    assert tree["model"] == {"path": f"{files}/model", "megatron_path": "/home/me/megatron"}
    assert tree["algorithm"]["reference"]["policy"] == f"{tmp_path}/teacher"
    assert tree["sft"]["dataset"] == "/abs/sft.jsonl"
    assert tree["replay"]["datasets"] == [f"{files}/a.jsonl", f"{files}/b/c.jsonl"]
    assert tree["checkpoint"]["resume"] == f"{files}/checkpoints/step_000001"
    assert tree["ports"]["keys_dir"] == f"{files}/keys"
    assert tree["prompts"] == [{"path": f"{files}/a.jsonl"}]
    assert tree["eval"]["sets"][0]["prompts"] == {"path": f"{shell}/y.jsonl"}
    assert tree["run"]["dir"] == "runs/mine"
    # The Hub's names stay, until a folder of that name is there.
    text = '[model]\npath = "Qwen/Qwen3-8B"\n[checkpoint]\nresume = "auto"\n'
    tree = read_layers(write(files, hub=text)).tree
    assert (tree["model"]["path"], tree["checkpoint"]["resume"]) == ("Qwen/Qwen3-8B", "auto")
    (files / "Qwen" / "Qwen3-8B").mkdir(parents=True)
    tree = read_layers(write(files, hub=text)).tree
    assert tree["model"]["path"] == f"{files}/Qwen/Qwen3-8B"
    given = ["openai/gsm8k", "data/train.jsonl", "data/x.parquet"]
    text = "".join(f'[[prompts]]\npath = "{path}"\n' for path in given)
    found = [one["path"] for one in read_layers(write(files, data=text)).tree["prompts"]]
    assert found == ["openai/gsm8k", f"{files}/data/train.jsonl", f"{files}/data/x.parquet"]
    (files / "openai/gsm8k").mkdir(parents=True)
    [first, *_] = read_layers(write(files, data=text)).tree["prompts"]
    assert first["path"] == f"{files}/openai/gsm8k"


def test_every_path_of_the_configuration_is_known_to_be_one() -> None:
    def paths(model: type[Section], prefix: str) -> set[str]:
        found = set()
        for name, field in model.model_fields.items():
            kinds = [field.annotation, *get_args(field.annotation)]
            item = f"{prefix}{name}" + (".*" if get_origin(field.annotation) is list else "")
            if Path in kinds:
                found.add(prefix + name)
            for kind in kinds:
                if isinstance(kind, type) and issubclass(kind, Section):
                    found |= paths(kind, f"{item}.")
        return found

    texts = {"algorithm.reference.policy", "checkpoint.resume", "render.chat_template"}
    assert paths(Config, "") - {"run.dir"} | texts == set(PATH_KEYS)


def test_an_override_of_a_whole_table_replaces_it(tmp_path: Path) -> None:
    files = write(tmp_path, base='[reward.tasks.own]\nformat_check = "box"\ncompare = "exact"\n')
    layers = read_layers(files, ['reward.tasks={mine = {compare = "math"}}'])
    assert set(resolve(layers).reward.tasks) == {"mine"}
    assert layers.origin_of("reward.tasks.mine.compare") == OVERRIDE
    assert layers.origin_of("reward.tasks.own.format_check") == DEFAULT


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


def test_a_folder_called_like_a_shipped_configuration_does_not_shadow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, file in shipped().items():
        (tmp_path / name).mkdir(parents=True)
        assert config_path(name) == file
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match="other: neither a file nor one of the shipped"):
        config_path("other")
