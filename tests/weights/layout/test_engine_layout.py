"""Slices of an engine's parameters, against numbers worked by hand and transformers' models."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_rl.config.errors import InputError
from megatron_rl.weights.layout.engine_checks import check_slices
from megatron_rl.weights.layout.engine_layout import (
    engine_slices,
    expert_place,
    hf_slices,
    paired,
    trained_parameters,
)
from megatron_rl.weights.layout.families import FAMILIES
from megatron_rl.weights.layout.shape import ModelShape, read_shape
from megatron_rl.weights.layout.slices import Share, Slice, as_matrix, local_part
from megatron_rl.weights.layout.trainer_layout import untrained
from tests.family_cases import ENDING, family_cases
from tests.tiny_models import write_model

SHAPE = ModelShape(
    architecture="Qwen2ForCausalLM", layers=1, hidden=8, ffn=12, heads=4, kv_heads=2, head_dim=2,
    vocab=100, max_positions=64, norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, is_tied=True,
    has_qkv_bias=True, has_qk_norm=False, sliding_window=None,
)  # fmt: skip
MOE = replace(
    SHAPE, architecture="Qwen3MoeForCausalLM", is_tied=False, has_qkv_bias=False, has_qk_norm=True,
    experts=4, experts_per_token=2, moe_ffn=6,
)  # fmt: skip
ATTENTION = "model.layers.0.self_attn"
EXPERTS = "model.layers.0.mlp.experts"


def slices_in(slices: list[Slice], local: str) -> list[tuple]:
    """The slices of one parameter: HF name after the last two dots, then the six numbers."""
    return [
        (part.hf.rsplit(".", 2)[-2], *part[1:5], *part[6:])
        for part in slices
        if part.local == local
    ]


def test_the_second_of_two_ranks_holds_these_slices() -> None:
    slices = engine_slices(SHAPE, Share(1, 2))
    rows = [("q_proj", 4, 0, 4), ("k_proj", 2, 0, 2), ("v_proj", 2, 0, 2)]
    places = [0, 4, 6]
    assert slices_in(slices, f"{ATTENTION}.qkv_proj.weight") == [
        (*row, 8, place, 0) for row, place in zip(rows, places, strict=True)
    ]
    assert slices_in(slices, f"{ATTENTION}.qkv_proj.bias") == [
        (*row, 1, place, 0) for row, place in zip(rows, places, strict=True)
    ]
    assert slices_in(slices, f"{ATTENTION}.o_proj.weight") == [("o_proj", 0, 4, 8, 4, 0, 0)]
    assert slices_in(slices, "model.layers.0.mlp.gate_up_proj.weight") == [
        ("gate_proj", 6, 0, 6, 8, 0, 0),
        ("up_proj", 6, 0, 6, 8, 6, 0),
    ]
    assert slices_in(slices, "model.layers.0.mlp.down_proj.weight") == [
        ("down_proj", 0, 6, 8, 6, 0, 0)
    ]
    # 100 tokens are padded to 128: 64 rows a rank, of which the second has 36.
    assert slices_in(slices, "model.embed_tokens.weight") == [("embed_tokens", 64, 0, 36, 8, 0, 0)]
    assert slices_in(slices, "lm_head.weight") == []


def test_ranks_beyond_the_key_value_heads_share_them() -> None:
    rows = []
    for rank in range(4):
        slices = engine_slices(SHAPE, Share(rank, 4))
        rows.append(slices_in(slices, f"{ATTENTION}.qkv_proj.weight"))
    assert [part[0][1:3] for part in rows] == [(0, 0), (2, 0), (4, 0), (6, 0)]
    assert [part[1] for part in rows] == [
        ("k_proj", head * 2, 0, 2, 8, 2, 0) for head in (0, 0, 1, 1)
    ]


def test_ranks_divide_key_value_heads_that_are_normed_together() -> None:
    shape = replace(SHAPE, has_qk_norm=True, norms_all_heads=True, norms_behind=True)
    slices = engine_slices(shape, Share(1, 2))
    # Whole on each rank: 4 and 2 heads of 2.
    for part, rows in (("q_norm", 8), ("k_norm", 4)):
        name = f"{ATTENTION}.{part}.weight"
        assert slices_in(slices, name) == [(part, 0, 0, rows, 1, 0, 0)]
    norms = [part.hf for part in slices if part.hf.endswith("layernorm.weight")]
    assert norms == [f"model.layers.0.post_{part}_layernorm.weight"
                     for part in ("feedforward", "attention")]  # fmt: skip
    with pytest.raises(InputError, match="= 4 .* 2 key-value heads, which are normed .*: 2$"):
        engine_slices(shape, Share(0, 4))


def test_padded_units_leave_room_between_gate_and_up() -> None:
    slices = engine_slices(SHAPE, Share(1, 2), ffn_multiple=4)
    # 12 units are padded to 16: 8 a rank, of which the second has 4.
    assert slices_in(slices, "model.layers.0.mlp.gate_up_proj.weight") == [
        ("gate_proj", 8, 0, 4, 8, 0, 0),
        ("up_proj", 8, 0, 4, 8, 8, 0),
    ]


def test_every_rank_holds_its_units_of_every_expert() -> None:
    by_units = engine_slices(MOE, Share(1, 2))
    assert slices_in(by_units, f"{EXPERTS}.w13_weight")[2:4] == [
        ("gate_proj", 3, 0, 3, 8, 6, 0),
        ("up_proj", 3, 0, 3, 8, 9, 0),
    ]
    assert slices_in(by_units, f"{EXPERTS}.w2_weight")[1] == ("down_proj", 0, 3, 8, 3, 8, 0)
    held = {part.hf.split(".")[5] for part in by_units if ".experts." in part.hf}
    assert held == {"0", "1", "2", "3"}


def test_neighbours_share_the_units_of_the_experts_that_they_hold() -> None:
    """Four ranks, experts divided among two: rank 3 has the second half of experts 2 and 3."""
    four = replace(MOE, heads=4)
    held = engine_slices(four, Share(3, 4), expert_parallel=2)
    assert slices_in(held, f"{EXPERTS}.w13_weight") == [
        ("gate_proj", 3, 0, 3, 8, 0, 0),
        ("up_proj", 3, 0, 3, 8, 3, 0),
        ("gate_proj", 3, 0, 3, 8, 6, 0),
        ("up_proj", 3, 0, 3, 8, 9, 0),
    ]
    assert slices_in(held, f"{EXPERTS}.w2_weight") == [
        ("down_proj", 0, 3, 8, 3, 0, 0), ("down_proj", 0, 3, 8, 3, 8, 0)
    ]  # fmt: skip
    experts = [
        {int(part.hf.split(".")[5]) for part in parts if ".experts." in part.hf}
        for parts in (engine_slices(four, Share(rank, 4), expert_parallel=2) for rank in range(4))
    ]
    assert experts == [{0, 1}, {0, 1}, {2, 3}, {2, 3}]
    whole = engine_slices(four, Share(3, 4), expert_parallel=4)
    assert slices_in(whole, f"{EXPERTS}.w13_weight") == [
        ("gate_proj", 0, 0, 6, 8, 0, 0), ("up_proj", 0, 0, 6, 8, 6, 0)
    ]  # fmt: skip
    # What is no expert lies as it does without.
    plain = engine_slices(replace(four, moe_ffn=8), Share(3, 4))
    assert [part for part in whole if ".experts." not in part.hf] == [
        part for part in plain if ".experts." not in part.hf
    ]


def test_ranks_lie_as_sglangs_own_arithmetic_says() -> None:
    """(rank of experts, rank of units) of its derive_spawn_ranks, for every possible division."""
    source = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
    text = (source / "srt/runtime_context.py").read_text()
    assert '"moe_tp_rank": tp_rank % (tp_size // moe_dp_size // moe_ep_size)' in text
    assert "// (tp_size // moe_dp_size // moe_ep_size)" in text
    layer = (source / "srt/layers/moe/fused_moe_triton/layer.py").read_text()
    assert "self._num_local_routed = self._num_global_routed // storage_ep_size" in layer
    shape = replace(MOE, heads=8, kv_heads=8, experts=8, moe_ffn=8, vocab=1000)
    for size in (1, 2, 4, 8):
        for expert in (n for n in (1, 2, 4, 8) if n <= size):
            for rank in range(size):
                parts = engine_slices(shape, Share(rank, size), expert_parallel=expert)
                gates = [part for part in parts if part.hf.endswith("gate_proj.weight")]
                units = size // expert
                ep_rank, tp_rank = rank % size // units, rank % units
                assert [int(part.hf.split(".")[5]) for part in gates] == list(
                    range(8 // expert * ep_rank, 8 // expert * (ep_rank + 1))
                )
                assert {(part.row, part.rows) for part in gates} == {
                    (8 // units * tp_rank, 8 // units)
                }


@pytest.mark.parametrize(
    ("shape", "size", "expert", "words"),
    [
        (SHAPE, 2, 2, "expert_parallel = 2, but the model has no experts: use 1"),
        (replace(MOE, experts=6), 4, 4, "divide the model's 6 experts .* nearest possible: 2"),
        (replace(MOE, moe_ffn=7), 4, 2, "2 ranks for each expert, .* 7 units: use 4"),
    ],
)
def test_experts_that_ranks_cannot_divide_are_refused(
    shape: ModelShape, size: int, expert: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        engine_slices(shape, Share(0, size), expert_parallel=expert)


@pytest.mark.parametrize(
    ("shape", "size", "words"),
    [
        (SHAPE, 3, "= 3 does not divide .* 4 attention heads; nearest possible: 2"),
        (replace(SHAPE, heads=12, kv_heads=4, vocab=1000), 6, "do not divide 4 key-value heads"),
        (replace(SHAPE, vocab=40), 4, "rank 3 of 4 would hold only padding"),
        (replace(MOE, is_tied=True), 1, "no tied embeddings"),
    ],
)
def test_ranks_that_do_not_fit_the_model_are_refused(
    shape: ModelShape, size: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        engine_slices(shape, Share(size - 1, size))


@pytest.mark.parametrize(
    ("family", "options"),
    [case for case in family_cases() if not FAMILIES[case[0] + ENDING].pairs_units],
)
def test_plain_slices_find_every_tensor_of_the_folder(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = write_model(tmp_path, family=family, **options)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    shape = read_shape(tmp_path)
    slices = hf_slices(shape)
    check_slices(slices, parameters)
    held = load_file(tmp_path / "model.safetensors")
    assert {part.hf for part in slices} == set(held) - untrained(shape)
    for part in slices:
        assert torch.equal(local_part(parameters, part), as_matrix(held[part.hf])), part.hf


def parameters() -> dict[str, Tensor]:
    return {
        "w": torch.zeros(4, 3),
        "v": torch.zeros(5),
        "lm_head.weight": torch.zeros(6, 3),
        "experts": torch.zeros(2, 2, 3),
    }


def whole() -> list[Slice]:
    return [
        Slice("a", 0, 0, 2, 3, "w", 0, 0),
        Slice("b", 0, 0, 2, 1, "w", 2, 0),
        Slice("c", 0, 0, 2, 2, "w", 2, 1),
        Slice("d", 0, 0, 5, 1, "v", 0, 0),
        Slice("e", 0, 0, 5, 3, "lm_head.weight", 0, 0),
        Slice("f", 0, 0, 4, 3, "experts", 0, 0),
    ]


def test_gate_and_up_side_by_side_are_columns_of_a_row() -> None:
    shape = replace(
        MOE, architecture="GptOssForCausalLM", has_qkv_bias=True, has_qk_norm=False,
        has_biases=True, has_sinks=True, experts=2,
    )  # fmt: skip
    parts = {rank: engine_slices(shape, Share(rank, 2)) for rank in range(2)}
    # Each rank has 3 of the 6 units of both experts; gate is left of up, 8 columns each.
    assert slices_in(parts[1], f"{EXPERTS}.w13_weight") == [
        ("gate_proj", 3, 0, 3, 8, 0, 0),
        ("up_proj", 3, 0, 3, 8, 0, 8),
        ("gate_proj", 3, 0, 3, 8, 3, 0),
        ("up_proj", 3, 0, 3, 8, 3, 8),
    ]
    assert slices_in(parts[1], f"{EXPERTS}.w13_weight_bias") == [
        ("gate_proj", 3, 0, 3, 1, 0, 0),
        ("up_proj", 3, 0, 3, 1, 0, 1),
        ("gate_proj", 3, 0, 3, 1, 3, 0),
        ("up_proj", 3, 0, 3, 1, 3, 1),
    ]
    assert slices_in(parts[1], f"{EXPERTS}.w2_weight") == [
        ("down_proj", 0, 3, 8, 3, 0, 0),
        ("down_proj", 0, 3, 8, 3, 8, 0),
    ]
    # The first rank alone adds the bias.
    biases = [("down_proj", 0, 0, 8, 1, 0, 0), ("down_proj", 0, 0, 8, 1, 8, 0)]
    assert slices_in(parts[0], f"{EXPERTS}.w2_weight_bias") == biases
    assert slices_in(parts[1], f"{EXPERTS}.w2_weight_bias") == []
    assert slices_in(parts[1], f"{ATTENTION}.sinks") == [("self_attn", 2, 0, 2, 1, 0, 0)]
    held = {
        f"{EXPERTS}.w13_weight": torch.arange(2 * 6 * 8).view(2, 6, 8),
        f"{EXPERTS}.w13_weight_bias": torch.arange(12).view(2, 6),
        f"{EXPERTS}.w2_weight_bias": torch.zeros(2, 8),
    }
    seen = paired(shape.architecture, held)
    for part in parts[0]:
        if part.local.endswith("w13_weight") and ".1.up_proj" in part.hf:
            # Rows 1, 3 and 5 of the second expert.
            expected = held[part.local][1, 1::2]
            assert torch.equal(local_part(seen, part), expected)
            local_part(seen, part).fill_(7)
            assert (held[part.local][1, 1::2] == 7).all()
        if part.local.endswith("w13_weight_bias") and ".0.gate_proj" in part.hf:
            assert local_part(seen, part).flatten().tolist() == [0, 2, 4]
    places = [expert_place(Share(rank, 2), 1) for rank in range(2)]
    names = [set(trained_parameters(shape, held, place)) for place in places]
    assert names == [set(held), set(held) - {f"{EXPERTS}.w2_weight_bias"}]


def test_slices_that_fill_the_parameters_pass() -> None:
    held = parameters()
    held["tied"] = held["w"].view(3, 4)
    check_slices(whole(), held)


@pytest.mark.parametrize(
    ("index", "part", "words"),
    [
        (1, Slice("b", 0, 0, 3, 1, "w", 1, 0), "w: .* overlaps"),
        (2, Slice("c", 0, 0, 2, 3, "w", 2, 0), "w: .* overlaps"),
        (3, Slice("d", 0, 0, 5, 1, "v", 1, 0), r"v: .* reaches outside of \(5,\)"),
        (3, Slice("d", 0, 0, 5, 1, "v", -1, 0), "v: .* reaches outside"),
        (4, Slice("e", 0, 0, 5, 4, "lm_head.weight", 0, 0), "lm_head.weight: .* reaches outside"),
        (1, Slice("b", 0, 0, 1, 1, "w", 2, 0), "w: 1 of its elements are in no slice"),
        (5, Slice("f", 0, 0, 4, 3, "expert", 0, 0), "not take: expert; .* covers: experts$"),
    ],
)
def test_slices_that_do_not_fit_are_refused(index: int, part: Slice, words: str) -> None:
    slices = whole()
    slices[index] = part
    with pytest.raises(ValueError, match=words):
        check_slices(slices, parameters())


@pytest.mark.parametrize("prefix", ["", "language_model.language_model."])
def test_names_behind_another_prefix_are_refused_with_both_lists(prefix: str) -> None:
    """Multimodal wrappers have the names of a text model behind `language_model.`, once."""
    slices = [part._replace(local=prefix + part.local) for part in engine_slices(SHAPE, Share())]
    layer = ("input_layernorm", "mlp.down_proj", "mlp.gate_up_proj", "post_attention_layernorm")
    own = ["embed_tokens", *(f"layers.0.{name}" for name in layer)]
    local = {part.local.removeprefix(prefix) for part in slices}
    with pytest.raises(ValueError, match="not take") as refusal:
        check_slices(slices, {f"language_model.{name}": torch.zeros(0) for name in local})
    # Embedding, final norm, two norms; matrix and bias of qkv, o_proj, gate_up, down.
    taken, covered = (
        ", ".join(f"{given}model.{name}.weight" for name in own)
        for given in (prefix, "language_model.")
    )
    assert str(refusal.value) == (
        f"9 names that the engine does not take: {taken}, ...; "
        f"9 parameters that nothing covers: {covered}, ..."
    )


def test_padded_units_are_allowed_only_where_they_are_expected() -> None:
    slices = [Slice("up", 0, 0, 2, 3, "gate_up_proj.weight", 0, 0)]
    held = {"gate_up_proj.weight": torch.zeros(3, 3)}
    check_slices(slices, held, may_pad_ffn=True)
    with pytest.raises(ValueError, match="3 of its elements are in no slice"):
        check_slices(slices, held)


def test_a_parameter_without_slices_is_refused() -> None:
    with pytest.raises(ValueError, match="^1 parameters that nothing covers: lm_head.weight$"):
        check_slices([part for part in whole() if part.hf != "e"], parameters())


def test_a_transposed_parameter_is_refused() -> None:
    held = parameters() | {"w": torch.zeros(3, 4).t()}
    with pytest.raises(ValueError, match="w: .* is no plain matrix"):
        check_slices(whole(), held)


def test_quantised_parameters_stand_for_themselves_without_memory() -> None:
    held = parameters() | {"w": torch.zeros(4, 3, device="meta")}
    check_slices(whole(), held)
    # All of them have the address 0: one that is covered does not cover another.
    with pytest.raises(ValueError, match="^1 parameters that nothing covers: other$"):
        check_slices(whole(), held | {"other": torch.zeros(2, 3, device="meta")})
