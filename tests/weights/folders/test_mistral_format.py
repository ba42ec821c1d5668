"""Folders in mistral format become what transformers computes with, by an independent formula."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_rl.config.errors import InputError
from megatron_rl.weights.folders.conversion import Request, convert
from megatron_rl.weights.folders.mistral_format import reorder
from megatron_rl.weights.layout.shape import read_shape
from tests.tiny_models import VOCAB, write_model
from tests.weights.folders.test_round_trip import assert_equal_bits, silent, tensors_of

HEADS, GROUPS, WIDTH = 4, 2, 24
PARAMS = {
    "dim": 64,
    "n_layers": 4,
    "head_dim": WIDTH,
    "hidden_dim": 160,
    "n_heads": HEADS,
    "n_kv_heads": GROUPS,
    "norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "sliding_window": None,
    "moe": None,
    "model_type": "transformer",
}


def interleaved(matrix: Tensor, heads: int) -> Tensor:
    """Rows of each head in mistral's order: 2i is HF's row i, 2i + 1 its row i + half a head."""
    rows = []
    for head in range(heads):
        for i in range(WIDTH // 2):
            rows += [head * WIDTH + i, head * WIDTH + WIDTH // 2 + i]
    return matrix[rows]


def as_mistral(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """Name and content in mistral format of a tensor of HF's, spelled out layer by layer."""
    whole = {
        "model.embed_tokens.weight": "tok_embeddings.weight",
        "model.norm.weight": "norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name], tensor
    _, _, layer, rest = name.split(".", 3)
    short = {
        "self_attn.q_proj.weight": "attention.wq.weight",
        "self_attn.k_proj.weight": "attention.wk.weight",
        "self_attn.v_proj.weight": "attention.wv.weight",
        "self_attn.o_proj.weight": "attention.wo.weight",
        "mlp.gate_proj.weight": "feed_forward.w1.weight",
        "mlp.down_proj.weight": "feed_forward.w2.weight",
        "mlp.up_proj.weight": "feed_forward.w3.weight",
        "input_layernorm.weight": "attention_norm.weight",
        "post_attention_layernorm.weight": "ffn_norm.weight",
    }[rest]
    heads = {"self_attn.q_proj.weight": HEADS, "self_attn.k_proj.weight": GROUPS}.get(rest)
    return f"layers.{layer}.{short}", interleaved(tensor, heads) if heads else tensor


def write_mistral(folder: Path, hf: Path, *, files: int = 1, **changes: Any) -> torch.nn.Module:
    """Write the same random Mistral model to both folders, and return it."""
    model = write_model(
        hf, family="Mistral", head_dim=WIDTH, sliding_window=None, rope_theta=10000.0
    )
    tensors = dict(as_mistral(*item) for item in load_file(hf / "model.safetensors").items())
    folder.mkdir()
    names = sorted(tensors)
    for number in range(files):
        file = (
            "consolidated.safetensors" if files == 1 else f"consolidated.{number:02d}.safetensors"
        )
        save_file({name: tensors[name] for name in names[number::files]}, folder / file)
    (folder / "params.json").write_text(json.dumps({**PARAMS, **changes}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tekken.json").write_text("{}")
    return model


def rotated(rows: Tensor, position: int) -> Tensor:
    """Mistral's rotary embedding: neighbouring rows are a complex number, turned by an angle."""
    angles = position / 10000.0 ** (torch.arange(0, WIDTH, 2) / WIDTH)
    pairs = torch.view_as_complex(rows.float().view(-1, WIDTH // 2, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(1)


def test_reordered_rows_give_the_attention_scores_of_mistrals_own_formula(tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    write_model(hf, family="Mistral", head_dim=WIDTH)
    generator = torch.Generator().manual_seed(5)
    query, key = (torch.randn(n * WIDTH, 64, generator=generator) for n in (HEADS, GROUPS))
    inputs = torch.randn(2, 64, generator=generator)
    ours = rotated((query @ inputs[0])[None].view(HEADS, WIDTH), 3)
    theirs = rotated((key @ inputs[1])[None].view(GROUPS, WIDTH), 11)
    expected = [(ours[head] @ theirs[head // 2]).item() for head in range(HEADS)]

    shape = read_shape(hf)
    turned = [
        turned_by_halves(reorder("self_attn.q_proj.weight", query, shape) @ inputs[0], 3),
        turned_by_halves(reorder("self_attn.k_proj.weight", key, shape) @ inputs[1], 11),
    ]
    found = [(turned[0][head] @ turned[1][head // 2]).item() for head in range(HEADS)]
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-4)


def turned_by_halves(vector: Tensor, position: int) -> Tensor:
    """HF's rotary embedding: [heads, WIDTH]."""
    angles = position / 10000.0 ** (torch.arange(0, WIDTH, 2) / WIDTH)
    first, second = vector.view(-1, 2, WIDTH // 2).unbind(1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=1)


@pytest.mark.parametrize("files", [1, 3])
def test_mistral_format_becomes_the_hf_model(files: int, tmp_path: Path) -> None:
    model = write_mistral(tmp_path / "mistral", tmp_path / "hf", files=files)
    done = convert(Request(tmp_path / "mistral", tmp_path / "out", to="hf", verify=True), silent)
    assert (done.kind, done.to) == ("mistral", "hf")
    assert_equal_bits(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "hf"))
    assert read_shape(tmp_path / "out") == read_shape(tmp_path / "hf")
    ids = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits
        assert torch.equal(found, model(ids).logits)
    copied = {path.name for path in (tmp_path / "out").iterdir()}
    assert copied == {"config.json", "model.safetensors", "tokenizer.json", "tekken.json"}


def test_mistral_format_becomes_a_megatron_folder(tmp_path: Path) -> None:
    write_mistral(tmp_path / "mistral", tmp_path / "hf")
    convert(Request(tmp_path / "mistral", tmp_path / "megatron", verify=True), silent)
    convert(Request(tmp_path / "megatron", tmp_path / "out"), silent)
    assert_equal_bits(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "hf"))


def test_window_may_be_text_and_zero_switches_are_accepted(tmp_path: Path) -> None:
    changes = {"sliding_window": "32", "tied_embeddings": False, "quantization": {}, "yarn": None}
    write_mistral(tmp_path / "mistral", tmp_path / "hf", **changes)
    convert(Request(tmp_path / "mistral", tmp_path / "out", to="hf"), silent)
    assert read_shape(tmp_path / "out").sliding_window == 32


def test_hf_weights_beside_mistral_ones_are_preferred(tmp_path: Path) -> None:
    write_mistral(tmp_path / "mistral", tmp_path / "hf")
    for path in (tmp_path / "mistral").iterdir():
        path.rename(tmp_path / "hf" / path.name)
    done = convert(Request(tmp_path / "hf", tmp_path / "out", to="hf"), silent)
    assert done.kind == "hf"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe": {"num_experts": 8}}, "keys that are not supported: moe"),
        ({"vision_encoder": {"dim": 4}, "yarn": {"factor": 2}}, "not supported: vision_encoder, y"),
        ({"rope_theta": None}, "lacks the key 'rope_theta'"),
        ({"max_position_embeddings": None}, "none of max_position_embeddings, max_seq_len"),
        ({"sliding_window": [1, 2]}, r"sliding_window \[1, 2\] is not supported"),
        ({"activation": "gelu"}, "'gelu' is not supported"),
        ({"n_layers": 5}, "lacks 9 tensors for MistralForCausalLM with 5 layers"),
        ({"n_layers": 3}, "has unexpected 9 tensors .*: layers.3.attention.wk.weight, "),
        ({"head_dim": 16}, r"q_proj.weight has shape \(96, 64\), but config.json means \(64, 64\)"),
    ],
)
def test_params_that_cannot_be_served_are_an_input_error(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_mistral(tmp_path / "mistral", tmp_path / "hf", **changes)
    with pytest.raises(InputError, match=message):
        convert(Request(tmp_path / "mistral", tmp_path / "out"), silent)
    assert not list(tmp_path.glob("out*"))


def test_tokenizer_that_transformers_reads_is_demanded_or_taken_from_elsewhere(
    tmp_path: Path,
) -> None:
    write_mistral(tmp_path / "mistral", tmp_path / "hf")
    (tmp_path / "mistral" / "tokenizer.json").rename(tmp_path / "hf" / "tokenizer.json")
    with pytest.raises(InputError, match="no tokenizer that transformers reads.*--files-from"):
        convert(Request(tmp_path / "mistral", tmp_path / "out"), silent)
    request = Request(tmp_path / "mistral", tmp_path / "out", files_from=tmp_path / "hf", to="hf")
    convert(request, silent)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["head_dim"] == WIDTH
