"""Megatron folders are found in every place where they may lie, and regions read from them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.config.errors import InputError
from megatron_rl.weights.folders.conversion import Request, convert
from megatron_rl.weights.folders.megatron_folder import (
    RELEASE,
    TRACKER,
    MegatronFolder,
    find_tensors,
    is_megatron_folder,
)
from tests.tiny_models import write_model

QKV = "decoder.layers.self_attention.linear_qkv.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A converted model, as Megatron-LM would find it."""
    write_model(tmp_path / "hf", num_hidden_layers=2)
    convert(Request(tmp_path / "hf", tmp_path / "megatron"), lambda done, total: None)
    return tmp_path / "megatron"


def test_tensors_are_found_by_the_tracker_or_where_they_alone_are(folder: Path) -> None:
    release, tracker = folder / RELEASE, folder / TRACKER
    assert tracker.read_text() == "release"
    assert find_tensors(folder) == find_tensors(release) == release
    release.rename(folder / "iter_0000042")
    tracker.write_text("42\n")
    assert find_tensors(folder) == folder / "iter_0000042"
    tracker.unlink()
    (folder / "logs").mkdir()
    assert is_megatron_folder(folder) and find_tensors(folder) == folder / "iter_0000042"
    other = folder / "iter_0000043"
    other.mkdir()
    (other / ".metadata").touch()
    with pytest.raises(InputError, match="in one of its subfolders, found 2"):
        find_tensors(folder)


@pytest.mark.parametrize("word", ["", "7", "releases"])
def test_tracker_that_names_no_tensors_is_an_input_error(word: str, folder: Path) -> None:
    (folder / TRACKER).write_text(word)
    with pytest.raises(InputError, match=f"says '{word}', but .*.metadata is missing"):
        find_tensors(folder)


def test_hf_folder_is_no_megatron_folder(folder: Path) -> None:
    hf = folder.parent / "hf"
    assert not is_megatron_folder(hf)
    with pytest.raises(InputError, match="is no Megatron checkpoint.*found 0"):
        find_tensors(hf)
    (hf / "old").mkdir()
    (hf / "old" / ".metadata").touch()
    assert not is_megatron_folder(hf)


def test_region_of_a_layer_is_what_hf_holds(folder: Path) -> None:
    tensors = load_file(folder.parent / "hf" / "model.safetensors")
    q, k, v = (
        torch.stack([tensors[f"model.layers.{n}.self_attn.{name}_proj.weight"] for n in (0, 1)])
        for name in "qkv"
    )
    # Two groups of two queries, a key and a value, each of 16 rows.
    whole = torch.cat([q[:, :32], k[:, :16], v[:, :16], q[:, 32:], k[:, 16:], v[:, 16:]], dim=1)
    checkpoint = MegatronFolder(folder)
    assert torch.equal(checkpoint.read(QKV, (0, 0, 0), (1, 128, 64)), whole[:1])
    assert torch.equal(checkpoint.read(QKV, (1, 30, 5), (1, 40, 7)), whole[1:, 30:70, 5:12])
    for start, size in (((0, 120, 0), (1, 16, 64)), ((2, 0, 0), (1, 128, 64))):
        with pytest.raises(InputError, match=f"no file has all of {QKV}"):
            checkpoint.read(QKV, start, size)
