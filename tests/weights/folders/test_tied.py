"""A tied model that stores its output matrix too: transformers decides what model it is."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_rl.config.errors import InputError
from megatron_rl.launcher.model_checks import check_weights
from megatron_rl.weights.folders.conversion import Request, convert
from megatron_rl.weights.layout.shape import read_shape
from tests.tiny_models import VOCAB, write_model
from tests.weights.folders.test_round_trip import silent

IDS = torch.arange(7, 27).unsqueeze(0)


def store_head(folder: Path, change: float, dtype: torch.dtype) -> None:
    """A tied model whose files also hold an output matrix: the embedding with one value changed."""
    write_model(folder, is_tied=True, dtype=dtype)
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1, -1] += change
    tensors["lm_head.weight"] = head
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def logits(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        found: Tensor = model(IDS).logits
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_of_its_own_in_a_tied_folder_is_refused_by_every_reader(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    store_head(source, 0.5, dtype)
    refusal = r"tie_word_embeddings is true, but lm_head\.weight differs from model\.embed_tokens"
    targets: list[Any] = ["hf", "megatron"]
    for to in targets:
        with pytest.raises(InputError, match=refusal):
            convert(Request(source, tmp_path / to, to=to, verify=True), silent)
        with pytest.raises(InputError, match=refusal):
            convert(Request(source, tmp_path / to, to=to), silent, is_dry=True)
        assert not (tmp_path / to).exists()
    with pytest.raises(InputError, match=f"model.path: .*{refusal}"):
        check_weights(source, "model.path", read_shape(source))
    # transformers uses the stored head: its logits are those of the untied model.
    meant = logits(source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    check_weights(source, "model.path", read_shape(source))
    convert(Request(source, tmp_path / "megatron", verify=True), silent)
    convert(Request(tmp_path / "megatron", tmp_path / "back", verify=True), silent)
    assert torch.equal(logits(tmp_path / "back"), meant)
    tensors = load_file(source / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    # The tied model is another one, by the one logit of the changed row.
    differs = (logits(source) != meant)[0].any(0)
    assert differs.nonzero().tolist() == [[VOCAB - 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_equal_head_is_left_out_and_the_model_stays(dtype: torch.dtype, tmp_path: Path) -> None:
    source = tmp_path / "source"
    store_head(source, 0.0, dtype)
    check_weights(source, "model.path", read_shape(source))
    convert(Request(source, tmp_path / "megatron", verify=True), silent)
    convert(Request(tmp_path / "megatron", tmp_path / "back", verify=True), silent)
    kept = load_file(tmp_path / "back" / "model.safetensors")
    assert kept.keys() == load_file(source / "model.safetensors").keys() - {"lm_head.weight"}
    assert torch.equal(logits(tmp_path / "back"), logits(source))


def test_a_head_of_another_size_is_refused(tmp_path: Path) -> None:
    store_head(tmp_path, 0.0, torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = torch.cat([tensors["lm_head.weight"], torch.zeros(2, 64)])
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"lm_head.weight has shape \(252, 64\), .* \(250, 64\)"):
        check_weights(tmp_path, "model.path", read_shape(tmp_path))
