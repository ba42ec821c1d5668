"""Bad folders: one clear error each, and nothing is left where the target would be."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.cli.main import main
from megatron_rl.config.errors import InputError
from megatron_rl.weights.folders import conversion
from megatron_rl.weights.folders.conversion import Request, convert
from tests.tiny_models import write_model
from tests.weights.folders.test_round_trip import silent

Damage = Callable[[Path], Any]


def refuse(source: Path, message: str, **options: Any) -> None:
    """The conversion of `source` raises InputError with the message and leaves nothing."""
    target = source.parent / "target"
    with pytest.raises(InputError, match=message) as raised:
        convert(Request(source, target, **options), silent)
    assert "\n" not in str(raised.value)
    assert not list(source.parent.glob("target*"))


def edit(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    """Damage to the tensors of a HF folder."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return damage


def configure(**changes: Any) -> Damage:
    """Damage to config.json."""

    def damage(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**values, **changes}))

    return damage


def truncate(name: str, share: float) -> Damage:
    """Damage that cuts a file off."""

    def damage(folder: Path) -> None:
        file = folder / name
        os.truncate(file, int(file.stat().st_size * share))

    return damage


def index_of(content: str) -> Damage:
    """Damage that puts an index in the place of the one file."""

    def damage(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
        (folder / "model.safetensors.index.json").write_text(content)

    return damage


MISSING = "model.layers.1.mlp.up_proj.weight"
HF_DAMAGE: list[tuple[Damage, str]] = [
    (edit(lambda t: t.pop(MISSING)), f"lacks 1 tensors .*: {MISSING}"),
    (
        edit(lambda t: t.update(other=t.pop(MISSING))),
        f"lacks 1 tensors .*: {MISSING}; it has unexpected 1 tensors .*: other",
    ),
    (edit(lambda t: t.update(adapter=torch.zeros(1))), "has unexpected 1 tensors .*: adapter"),
    (
        edit(lambda t: t.update({MISSING: torch.zeros(64, 160)})),
        r"has shape \(64, 160\), but config.json means \(160, 64\)",
    ),
    (
        edit(lambda t: t.update({MISSING: t[MISSING].to(torch.float8_e4m3fn)})),
        "is F8_E4M3, but only F32, F16, BF16 are supported",
    ),
    (configure(architectures=["GPT2LMHeadModel"]), "architecture GPT2LMHeadModel is not supported"),
    (configure(quantization_config={"quant_method": "gptq"}), "quantised weights"),
    (truncate("model.safetensors", 0.5), "model.safetensors, of .* is no whole file"),
    (truncate("model.safetensors", 0), "model.safetensors, of .* is no whole file"),
    (truncate("config.json", 0.5), "config.json is not JSON"),
    (lambda folder: (folder / "config.json").write_text("[]"), "config.json is no object"),
    (lambda folder: (folder / "config.json").unlink(), "has no config.json.*--files-from"),
    (lambda folder: (folder / "model.safetensors").unlink(), r"has no \*\.safetensors"),
    (
        lambda folder: (folder / "model.safetensors").rename(folder / "m-00001-of-2.safetensors"),
        "has m-00001-of-2.safetensors without model.safetensors.index.json: fetch it",
    ),
    (index_of("{"), "is no index of safetensors"),
    (index_of('{"weight_map": []}'), "is no index of safetensors"),
    (
        index_of('{"weight_map": {"a": "model-00002-of-00002.safetensors"}}'),
        "lacks 1 of 1 files of weights, such as model-00002-of-00002.safetensors",
    ),
]


@pytest.mark.parametrize("to", ["hf", "megatron"])
@pytest.mark.parametrize(("damage", "message"), HF_DAMAGE)
def test_bad_hf_folder_is_refused(damage: Damage, message: str, to: Any, tmp_path: Path) -> None:
    write_model(tmp_path / "source", num_hidden_layers=2)
    damage(tmp_path / "source")
    refuse(tmp_path / "source", message, to=to)


def blank_the_beginning(folder: Path) -> None:
    """Damage that no length shows, to the header of the first tensor."""
    with (folder / "release" / "__0_0.distcp").open("r+b") as file:
        file.write(bytes(1000))


def forget(name: str) -> Damage:
    """Damage that deletes a file."""
    return lambda folder: (folder / name).unlink()


MEGATRON_DAMAGE: list[tuple[Damage, str]] = [
    (forget("release/.metadata"), "says 'release', but .*.metadata is missing"),
    (truncate("release/.metadata", 0.5), ".metadata cannot be read.*cut off"),
    (truncate("release/.metadata", 0), ".metadata cannot be read.*cut off"),
    (truncate("release/__0_0.distcp", 0.99), "__0_0.distcp is cut off or missing: [0-9]+ bytes"),
    (forget("release/__0_0.distcp"), "__0_0.distcp is cut off or missing: 0 bytes"),
    (blank_the_beginning, "embedding.word_embeddings.weight cannot be read"),
    (configure(num_hidden_layers=3), r"has shape \(2, .*, but config.json means \(3, "),
    (configure(architectures=["Qwen3ForCausalLM"]), "lacks 2 tensors .*k_layernorm"),
    (configure(tie_word_embeddings=True), "has unexpected 1 tensors .*: output_layer.weight"),
    (configure(vocab_size=251), r"has shape \(250, 64\), but config.json means \(251, 64\)"),
    (forget("config.json"), "has no config.json.*--files-from"),
]


@pytest.mark.parametrize(("damage", "message"), MEGATRON_DAMAGE)
def test_bad_megatron_folder_is_refused(damage: Damage, message: str, tmp_path: Path) -> None:
    write_model(tmp_path / "hf", num_hidden_layers=2)
    convert(Request(tmp_path / "hf", tmp_path / "source"), silent)
    damage(tmp_path / "source")
    refuse(tmp_path / "source", message)


def test_folders_that_are_no_models_are_refused(tmp_path: Path) -> None:
    refuse(tmp_path / "nowhere", "there is no folder .*nowhere")
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", "has no config.json")
    (tmp_path / "empty" / "params.json").write_text("{")
    (tmp_path / "empty" / "tokenizer.json").write_text("{}")
    refuse(tmp_path / "empty", "params.json is not JSON")
    (tmp_path / "empty" / "params.json").write_text("{}")
    refuse(tmp_path / "empty", "has params.json but no consolidated")
    refuse(tmp_path / "empty", "--files-from: there is no folder", files_from=tmp_path / "no")


def test_a_folder_of_pickles_names_the_command_that_writes_safetensors(tmp_path: Path) -> None:
    write_model(tmp_path / "a", num_hidden_layers=1)
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    (tmp_path / "a" / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "a" / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"has pytorch_model\*\.bin and no \*\.saf") as raised:
        convert(Request(tmp_path / "a", tmp_path / "target"), silent)
    command = str(raised.value).split("`")[1].replace("python", sys.executable, 1)
    subprocess.run(command, shell=True, check=True, timeout=300)
    written = load_file(tmp_path / "a" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())
    convert(Request(tmp_path / "a", tmp_path / "target"), silent)


def test_target_that_exists_is_left_alone(tmp_path: Path) -> None:
    write_model(tmp_path / "source", num_hidden_layers=1)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "mine").write_text("kept")
    with pytest.raises(InputError, match="target exists already"):
        convert(Request(tmp_path / "source", tmp_path / "target"), silent)
    assert (tmp_path / "target" / "mine").read_text() == "kept"
    with pytest.raises(InputError, match="mine is no folder"):
        inside = tmp_path / "target" / "mine" / "below"
        convert(Request(tmp_path / "source", inside), silent)


def test_disk_without_room_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_model(tmp_path / "source", num_hidden_layers=1)
    usage = conversion.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda path: usage._replace(free=200_000))
    refuse(tmp_path / "source", r"needs 0.0 GB, but .* has 0.0 GB free")


def test_leftover_of_a_killed_conversion_does_not_stand_in_the_way(tmp_path: Path) -> None:
    write_model(tmp_path / "source", num_hidden_layers=1)
    (tmp_path / "target.partial").mkdir()
    (tmp_path / "target.partial" / "part-0.safetensors").write_text("cut off")
    convert(Request(tmp_path / "source", tmp_path / "target", to="hf"), silent)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]
    assert not (tmp_path / "target" / "part-0.safetensors").exists()


@pytest.mark.parametrize("to", ["hf", "megatron"])
def test_interrupted_conversion_leaves_nothing(to: conversion.Kind, tmp_path: Path) -> None:
    write_model(tmp_path / "source", num_hidden_layers=2)

    def interrupt(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(Request(tmp_path / "source", tmp_path / "target", to=to), interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_command_says_one_line_and_exits_with_2(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    write_model(tmp_path / "source", num_hidden_layers=2)
    truncate("model.safetensors", 0.9)(tmp_path / "source")
    caplog.clear()
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "target")]) == 2
    [said] = caplog.messages
    assert said.count("\n") == 0 and "is no whole file of safetensors" in said
    assert main(["convert", "a", "b", "--shard-gb", "0"]) == 2


def test_disk_that_fails_is_one_line_and_exits_with_1(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_model(tmp_path / "source", num_hidden_layers=2)
    caplog.clear()

    def fail(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conversion, "write_tensors", fail)
    source, target = tmp_path / "source", tmp_path / "target"
    assert main(["convert", str(source), str(target), "--to", "hf"]) == 1
    assert caplog.messages == [f"{target} is not made: [Errno 28] No space left on device"]
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_command_converts_there_and_back(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_model(tmp_path / "a", num_hidden_layers=2)
    a, m, b = (str(tmp_path / name) for name in "amb")
    assert main(["convert", a, m, "--verify", "--dtype", "bfloat16"]) == 0
    assert main(["convert", m, b, "--to", "hf", "--shard-gb", "0.0001"]) == 0
    said = capsys.readouterr().out
    assert "LlamaForCausalLM, hf to megatron, 21 tensors" in said
    assert "every digest compared" in said and "megatron to hf, 21 tensors" in said
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 1
