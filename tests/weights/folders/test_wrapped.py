"""What a wrapper holds besides the text model goes from source to export, byte for byte."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import ParallelConfig
from megatron_rl.weights.folders import conversion
from megatron_rl.weights.folders.conversion import Request, VerificationFailed, convert
from megatron_rl.weights.layout.shape import read_shape
from tests.distributed import RanksFailed, run_ranks
from tests.tiny_models import load_on_rank
from tests.weights.folders.test_export import save_and_wait
from tests.weights.folders.test_round_trip import assert_equal_bits, silent, tensors_of
from tests.wrapped_models import RENAMED, WRAPPERS, respell, write_wrapped

TOWERS = ("visual.", "vision_tower.", "multi_modal_projector.", "model.visual.")


@pytest.mark.parametrize("is_other", [False, True])
@pytest.mark.parametrize("kind", WRAPPERS)
def test_round_trip_keeps_every_bit_and_name(kind: str, is_other: bool, tmp_path: Path) -> None:
    source, megatron, back = (tmp_path / name for name in ("source", "megatron", "back"))
    write_wrapped(source, kind, dtype=torch.bfloat16)
    if is_other and kind in RENAMED:
        respell(source, kind)
    (source / "preprocessor_config.json").write_text('{"size" : 28}\n')
    expected = load_file(source / "model.safetensors")
    convert(Request(source, megatron, verify=True), silent)
    done = convert(
        Request(megatron, back, verify=True, files_from=source, shard_bytes=90_000), silent
    )
    assert 0 < done.tensors < len(expected)
    assert_equal_bits(tensors_of(back), expected)
    for name in ("config.json", "preprocessor_config.json"):
        assert (back / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize("kind", WRAPPERS)
def test_an_export_of_ranks_names_and_holds_what_its_source_does(kind: str, tmp_path: Path) -> None:
    source, target = tmp_path / "m", tmp_path / "out"
    write_wrapped(source, kind, is_tied=kind == "Qwen3VL", dtype=torch.bfloat16)
    parallel = ParallelConfig(tensor=2, sequence=kind == "Qwen3VLMoe")
    run_ranks(save_and_wait, 2, source, target, parallel, "bfloat16")
    assert_equal_bits(tensors_of(target), tensors_of(source))
    written, given = (json.loads((one / "config.json").read_text()) for one in (target, source))
    assert written == given


def test_another_dtype_leaves_the_tower_alone(tmp_path: Path) -> None:
    write_wrapped(tmp_path / "a", "Mistral3")
    convert(Request(tmp_path / "a", tmp_path / "b", to="hf", dtype="bfloat16"), silent)
    given = load_file(tmp_path / "a" / "model.safetensors")
    found = load_file(tmp_path / "b" / "model.safetensors")
    assert found.keys() == given.keys()
    for name, tensor in found.items():
        is_tower = name.startswith(TOWERS)
        assert tensor.dtype == (torch.float32 if is_tower else torch.bfloat16)
        assert torch.equal(tensor, given[name].to(tensor.dtype)), name


def test_a_megatron_checkpoint_alone_is_no_wrapper(tmp_path: Path) -> None:
    write_wrapped(tmp_path / "a", "Qwen3VL")
    convert(Request(tmp_path / "a", tmp_path / "m"), silent)
    for options in ({}, {"files_from": tmp_path / "m"}):
        with pytest.raises(InputError, match="the text model.*--files-from"):
            convert(Request(tmp_path / "m", tmp_path / "b", **options), silent)
    write_wrapped(tmp_path / "other", "Qwen3VL", num_hidden_layers=2)
    with pytest.raises(InputError, match=r"other lacks 22 tensors.*with 4 layers"):
        convert(Request(tmp_path / "m", tmp_path / "b", files_from=tmp_path / "other"), silent)
    assert not (tmp_path / "b").exists()


def test_verification_sees_a_damaged_tower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wrapped(tmp_path / "a", "Mistral3")
    write = conversion.write_tensors

    def write_and_damage(folder: Path, *arguments: Any, **options: Any) -> None:
        write(folder, *arguments, **options)
        tensors = load_file(folder / "model.safetensors")
        tensors["vision_tower.ln_pre.weight"][3] += 1
        save_file(tensors, folder / "model.safetensors")

    monkeypatch.setattr(conversion, "write_tensors", write_and_damage)
    with pytest.raises(VerificationFailed, match=r"vision_tower\.ln_pre\.weight was written"):
        convert(Request(tmp_path / "a", tmp_path / "b", to="hf", verify=True), silent)
    assert not (tmp_path / "b").exists()


def without(folder: Path, *prefixes: str) -> None:
    """Take away the tensors that begin so."""
    tensors = load_file(folder / "model.safetensors")
    kept = {name: one for name, one in tensors.items() if not name.startswith(prefixes)}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("kind", "prefixes", "message"),
    [
        ("Mistral3", TOWERS, r"tensors that begin with one of vision_tower\., .*the whole folder"),
        ("Qwen2_5_VL", TOWERS, r"begin with one of visual\."),
        ("Mistral3", ("language_model.model.embed",), r"one of language_model\.model\., model\.l"),
        ("Qwen3VL", ("lm_head.",), r"lacks 1 tensors .*lm_head\.weight"),
    ],
)
def test_a_wrapper_without_a_part_is_refused(
    kind: str, prefixes: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    write_wrapped(tmp_path / "a", kind)
    without(tmp_path / "a", *prefixes)
    with pytest.raises(InputError, match=message):
        convert(Request(tmp_path / "a", tmp_path / "b"), silent)


def test_a_tensor_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    write_wrapped(tmp_path / "a", "Mistral3")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    tensors["audio_tower.weight"] = torch.zeros(2)
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    with pytest.raises(InputError, match=r"has unexpected 1 tensors .*audio_tower\.weight"):
        convert(Request(tmp_path / "a", tmp_path / "b"), silent)


def test_texts_that_the_table_does_not_describe_are_refused(tmp_path: Path) -> None:
    write_wrapped(tmp_path, "Mistral3")
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    for kind in ("mamba", None):
        path.write_text(json.dumps({**values, "text_config": {"model_type": kind}}))
        with pytest.raises(InputError, match=rf"is {kind!r} \(text_config.model_type\); supp"):
            read_shape(tmp_path)
    path.write_text(json.dumps({**values, "text_config": 3}))
    with pytest.raises(InputError, match="text_config is 3, not a table"):
        read_shape(tmp_path)


def test_the_hubs_flat_configuration_means_the_same(tmp_path: Path) -> None:
    # As Qwen2.5-VL's folders on the Hub: the text model's keys beside vision_config.
    write_wrapped(tmp_path, "Qwen2_5_VL", is_tied=True)
    path = tmp_path / "config.json"
    nested = json.loads(path.read_text())
    shape = read_shape(tmp_path)
    text = nested.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {**text, **nested, "rope_theta": rope["rope_theta"]}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    path.write_text(json.dumps(flat))
    assert read_shape(tmp_path) == shape and shape.is_tied and shape.has_qkv_bias


def loads(folder: Path) -> bool:
    return bool(load_on_rank(folder, ParallelConfig(tensor=2)).model)


def test_a_stored_output_matrix_of_a_tied_model_must_be_the_embedding(tmp_path: Path) -> None:
    # Mistral3's configuration is tied by default in transformers 5, and not in earlier releases.
    write_wrapped(tmp_path, "Mistral3", is_tied=True)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["language_model.model.embed_tokens.weight"].clone()
    save_file({**tensors, "language_model.lm_head.weight": head}, tmp_path / "model.safetensors")
    assert run_ranks(loads, 2, tmp_path) == [True, True]
    head[-1, -1] += 1
    save_file({**tensors, "language_model.lm_head.weight": head}, tmp_path / "model.safetensors")
    with pytest.raises(RanksFailed, match=r"rank 1: (?s:.*)tie_word_embeddings is true, but lm_"):
        run_ranks(loads, 2, tmp_path)
