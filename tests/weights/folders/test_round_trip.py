"""Conversions there and back change no bit, whatever the family, the files or the dtype."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.config.errors import InputError
from megatron_rl.weights.folders import conversion
from megatron_rl.weights.folders.conversion import Request, VerificationFailed, convert
from megatron_rl.weights.folders.model_files import carried_files
from tests.family_cases import family_cases
from tests.tiny_models import (
    GLM4_MOE,
    LATENT,
    MIXED_WINDOWS,
    write_model,
)

SHARD_BYTES = 150_000
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    *family_cases(),
    ("Qwen3", {"head_dim": 32, "num_key_value_heads": 1}),
    ("SmolLM3", MIXED_WINDOWS),
    ("Phi3", {"head_dim": 24, "tie_word_embeddings": True}),
    ("Glm4Moe", {**GLM4_MOE, "first_k_dense_replace": 0, "use_qk_norm": False}),
    ("DeepseekV3", {**LATENT, "first_k_dense_replace": 0, "q_lora_rank": None}),
]


def silent(done: int, total: int) -> None:
    """No progress is shown."""


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a HF folder."""
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found.update(load_file(file))
    return found


def assert_equal_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(
            found[name].view(torch.uint8), tensor.view(torch.uint8)
        ), name


def write_with_hostile_numbers(folder: Path, family: str, options: dict[str, Any]) -> None:
    """A random model in bfloat16, with numbers that arithmetic would not keep."""
    write_model(folder, family=family, dtype=torch.bfloat16, **options)
    tensors = load_file(folder / "model.safetensors")
    for tensor in tensors.values():
        bits = tensor.view(torch.int16).flatten()
        # Negative zero, a subnormal, infinity, and a NaN with a payload.
        bits[:4] = torch.tensor([-0x8000, 1, 0x7F80, 0x7FA5], dtype=torch.int16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(("family", "options"), FAMILIES)
def test_round_trip_keeps_every_bit_of_every_family(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    source, megatron, back = (tmp_path / name for name in ("source", "megatron", "back"))
    write_with_hostile_numbers(source, family, options)
    expected = load_file(source / "model.safetensors")
    done = convert(Request(source, megatron, verify=True, shard_bytes=SHARD_BYTES), silent)
    assert (done.kind, done.to, done.tensors) == ("hf", "megatron", len(expected))
    done = convert(Request(megatron, back, verify=True, shard_bytes=SHARD_BYTES), silent)
    assert (done.kind, done.to, done.tensors) == ("megatron", "hf", len(expected))
    assert_equal_bits(tensors_of(back), expected)
    for name in ("config.json", "generation_config.json"):
        assert (back / name).read_bytes() == (source / name).read_bytes()
    assert len(list((megatron / "release").glob("*.distcp"))) > 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "megatron", "source"]


def test_shards_are_bounded_and_the_index_names_each_tensor_once(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_model(tmp_path / "a")
    convert(Request(tmp_path / "a", tmp_path / "b", to="hf", shard_bytes=SHARD_BYTES), silent)
    index = json.loads((tmp_path / "b" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "b").glob("*.safetensors"))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, 1 + 6)]
    expected = load_file(tmp_path / "a" / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    for name in files:
        found = load_file(tmp_path / "b" / name)
        assert sum(tensor.nbytes for tensor in found.values()) <= SHARD_BYTES
        assert {key for key, file in index["weight_map"].items() if file == name} == found.keys()
    assert index["weight_map"].keys() == expected.keys()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "b").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_every_file_but_weights_comes_along_byte_for_byte(tmp_path: Path) -> None:
    write_model(tmp_path / "a")
    kept = {
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt", "notes.md",
        "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
        "modeling_own.py", "own.json", "params.json", "sentencepiece.bpe.model", "code/layers.py",
        "additional_chat_templates/tool_use.jinja", "code/deep/norm.py",
    }  # fmt: skip
    weights = {
        "pytorch_model.bin", "pytorch_model-00001-of-2.bin", "pytorch_model.bin.index.json",
        "tf_model.h5", "model.gguf", "consolidated.00.pth", "optimizer.pt", "adapter_config.json",
        "original/consolidated.00.pth", "original/params.json", "onnx/model.onnx", ".gitattributes",
        "__pycache__/own.pyc", "adapter_model.safetensors",
    }  # fmt: skip
    for name in kept | weights:
        (tmp_path / "a" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "a" / name).write_bytes(b"\r\n\0content of " + name.encode())
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    convert(Request(tmp_path / "a", tmp_path / "m"), silent)
    convert(Request(tmp_path / "m", tmp_path / "b"), silent)
    found = {str(p.relative_to(tmp_path / "b")) for p in (tmp_path / "b").rglob("*") if p.is_file()}
    assert found == kept | {"config.json", "generation_config.json", "model.safetensors"}
    for name in kept | {"config.json", "generation_config.json"}:
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "a" / name).read_bytes(), name
    # The export of a run copies the same ones.
    assert {p.name for p in carried_files(tmp_path / "a")} == {
        name.partition("/")[0] for name in kept | {"config.json", "generation_config.json"}
    }


@pytest.mark.parametrize("to", ["hf", "megatron"])
def test_another_dtype_is_that_of_torch_and_config_says_so(
    to: conversion.Kind, tmp_path: Path
) -> None:
    write_model(tmp_path / "a")
    request = Request(tmp_path / "a", tmp_path / "b", to=to, dtype="bfloat16", verify=True)
    convert(request, silent)
    convert(Request(tmp_path / "b", tmp_path / "c", to="hf"), silent)
    expected = load_file(tmp_path / "a" / "model.safetensors")
    rounded = {name: tensor.bfloat16() for name, tensor in expected.items()}
    assert_equal_bits(tensors_of(tmp_path / "c"), rounded)
    for name in ("b", "c"):
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == "bfloat16"


def test_tensors_keep_dtypes_that_differ_where_megatron_does_not_stack_them(
    tmp_path: Path,
) -> None:
    write_model(tmp_path / "a", dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].float()
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    convert(Request(tmp_path / "a", tmp_path / "m"), silent)
    convert(Request(tmp_path / "m", tmp_path / "b"), silent)
    assert_equal_bits(tensors_of(tmp_path / "b"), tensors)
    name = "model.layers.2.mlp.up_proj.weight"
    tensors[name] = tensors[name].float()
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    with pytest.raises(InputError, match=r"layers.2.mlp.up_proj.weight is .*float32 and .*--dtype"):
        convert(Request(tmp_path / "a", tmp_path / "m2"), silent)
    assert not list(tmp_path.glob("m2*"))


def test_verification_finds_a_byte_that_changed_on_the_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_model(tmp_path / "a")
    write = conversion.write_tensors

    def write_and_damage(folder: Path, *arguments: Any) -> None:
        write(folder, *arguments)
        file = folder / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-1000] ^= 1
        file.write_bytes(content)

    monkeypatch.setattr(conversion, "write_tensors", write_and_damage)
    with pytest.raises(VerificationFailed, match="was written otherwise than it was read"):
        convert(Request(tmp_path / "a", tmp_path / "b", to="hf", verify=True), silent)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("verify", [False, True])
def test_progress_ends_at_the_bytes_of_every_pass(verify: bool, tmp_path: Path) -> None:
    write_model(tmp_path / "a")
    size = sum(t.nbytes for t in load_file(tmp_path / "a" / "model.safetensors").values())
    seen: list[tuple[int, int]] = []
    request = Request(tmp_path / "a", tmp_path / "b", verify=verify)
    convert(request, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (size * (1 + verify), size * (1 + verify))
    assert seen == sorted(seen)


@pytest.mark.parametrize("to", ["hf", "megatron"])
def test_values_beyond_float16_are_refused_and_no_others(
    to: conversion.Kind, tmp_path: Path
) -> None:
    write_model(tmp_path / "a")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    # 65520 is half way between 65504, the largest of float16, and 65536: it rounds up, to infinity.
    tensors[name][3, 4:7] = torch.tensor([-65519.0, torch.inf, torch.nan])
    save_file(tensors, tmp_path / "a" / "model.safetensors", metadata={"format": "pt"})
    convert(Request(tmp_path / "a", tmp_path / "b", to=to, dtype="float16"), silent)
    convert(Request(tmp_path / "b", tmp_path / "c", to="hf"), silent)
    found = tensors_of(tmp_path / "c")[name][3, 4:7]
    assert found[:2].tolist() == [-65504.0, torch.inf] and found[2].isnan()
    tensors[name][3, 4] = -65520.0
    save_file(tensors, tmp_path / "a" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"up_proj.weight holds 65520, .*float16 ends at 65504"):
        convert(Request(tmp_path / "a", tmp_path / "d", to=to, dtype="float16"), silent)
    assert not list(tmp_path.glob("d*"))
    convert(Request(tmp_path / "a", tmp_path / "d", to=to, dtype="bfloat16"), silent)
