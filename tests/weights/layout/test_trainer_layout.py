"""Slices lie as Megatron's documentation says; bad folders are refused."""

import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import ParallelConfig
from megatron_rl.weights.folders.finite import faulty_tensors
from megatron_rl.weights.layout.entries import PADDED
from megatron_rl.weights.layout.local_names import local_name, named_parameters
from megatron_rl.weights.layout.place import Place
from megatron_rl.weights.layout.ranks import own_place
from megatron_rl.weights.layout.shape import ModelShape, check_parallel, read_shape
from megatron_rl.weights.layout.slices import Share, Slice, as_matrix, local_part
from megatron_rl.weights.layout.trainer_layout import copy_slices, hf_shapes, trainer_slices
from tests.distributed import RanksFailed, run_ranks
from tests.tiny_models import QWEN3_MOE, load_on_rank, write_model

SHAPE = ModelShape(
    architecture="LlamaForCausalLM",
    layers=2,
    hidden=6,
    ffn=4,
    heads=4,
    kv_heads=2,
    head_dim=1,
    vocab=130,
    max_positions=8,
    norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    is_tied=False,
    has_qkv_bias=False,
    has_qk_norm=False,
    sliding_window=None,
)


DENSE = replace(SHAPE, architecture="Qwen2ForCausalLM", has_qkv_bias=True)
TIED = replace(SHAPE, architecture="Qwen3ForCausalLM", has_qk_norm=True, is_tied=True, layers=4)
MIXED = replace(
    TIED, architecture="Qwen3MoeForCausalLM", experts=4, experts_per_token=2, moe_ffn=3, ffn=0
)
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"


def places(
    tensor: int = 1,
    pipeline: int = 1,
    expert: int = 1,
    *,
    expert_tensor: int = 1,
    chunks: int = 1,
) -> list[Place]:
    """All places of these sizes, whether or not there are ranks enough."""
    sizes = (tensor, pipeline, expert, expert_tensor)
    return [
        Place(*(Share(rank, size) for rank, size in zip(ranks, sizes, strict=True)), chunks)
        for ranks in itertools.product(*map(range, sizes))
    ]


def rows_of(slices: list[Slice], local: str) -> list[tuple[str, int]]:
    """HF tensor (its third last word) and row of each row of a parameter, in order."""
    rows = {
        part.local_row + i: (part.hf.split(".")[-2], part.row + i)
        for part in slices
        if part.local == local
        for i in range(part.rows)
    }
    assert sorted(rows) == list(range(len(rows)))
    return [rows[row] for row in sorted(rows)]


def test_qkv_holds_queries_key_value_of_each_group_in_turn() -> None:
    q, k, v = "q_proj", "k_proj", "v_proj"
    first = [(q, 0), (q, 1), (k, 0), (v, 0)]
    second = [(q, 2), (q, 3), (k, 1), (v, 1)]
    assert rows_of(trainer_slices(SHAPE, Place()), QKV) == first + second
    assert rows_of(trainer_slices(SHAPE, Place(tensor=Share(1, 2))), QKV) == second


def test_gate_stands_before_up_on_each_rank() -> None:
    rows = rows_of(
        trainer_slices(SHAPE, Place(tensor=Share(1, 2))), "decoder.layers.1.mlp.linear_fc1.weight"
    )
    assert rows == [("gate_proj", 2), ("gate_proj", 3), ("up_proj", 2), ("up_proj", 3)]


def test_vocabulary_is_padded_to_a_multiple_of_128_per_rank() -> None:
    assert [SHAPE.padded_vocab(ranks) for ranks in (1, 2, 4)] == [256, 256, 512]
    shape = replace(SHAPE, kv_heads=4)
    covered = []
    for place in places(tensor=4):
        table = [p for p in trainer_slices(shape, place) if p.hf == "model.embed_tokens.weight"]
        covered.append([(part.row, part.rows, part.local_row) for part in table])
    assert covered == [[(0, 128, 0)], [(128, 2, 0)], [], []]


def test_experts_are_whole_and_dealt_in_order() -> None:
    place = Place(tensor=Share(1, 2), expert=Share(1, 2))
    slices = [part for part in trainer_slices(MIXED, place) if "layers.1.mlp.experts" in part.hf]
    local, hf = "decoder.layers.1.mlp.experts.local_experts", "model.layers.1.mlp.experts"
    expected = []
    for mine, theirs in ((0, 2), (1, 3)):
        fc1, fc2 = (f"{local}.{mine}.linear_fc{number}.weight" for number in (1, 2))
        expected += [
            Slice(f"{hf}.{theirs}.gate_proj.weight", 0, 0, 3, 6, fc1, 0, 0),
            Slice(f"{hf}.{theirs}.up_proj.weight", 0, 0, 3, 6, fc1, 3, 0),
            Slice(f"{hf}.{theirs}.down_proj.weight", 0, 0, 6, 3, fc2, 0, 0),
        ]
    assert slices == expected


SPLITS = [
    (DENSE, places()),
    (DENSE, places(tensor=2)),
    (DENSE, places(pipeline=2)),
    (TIED, places(tensor=2, pipeline=2)),
    (TIED, places(pipeline=2, chunks=2)),
    (MIXED, places(expert=2)),
    (MIXED, places(tensor=2, pipeline=2, expert=2)),
    (MIXED, places(tensor=2, expert=2, expert_tensor=3)),
    (replace(MIXED, architecture="MixtralForCausalLM"), places(pipeline=4, expert=4)),
    (replace(MIXED, layers=8), places(pipeline=2, expert=2, chunks=4)),
]


@pytest.mark.parametrize(("shape", "ranks"), SPLITS)
def test_every_element_is_held_once_by_each_kind_of_rank(
    shape: ModelShape, ranks: list[Place]
) -> None:
    counts = {name: torch.zeros(size, dtype=torch.int64) for name, size in hf_shapes(shape).items()}
    for place in ranks:
        for part in trainer_slices(shape, place):
            area = as_matrix(counts[part.hf])[part.row : part.row + part.rows]
            area[:, part.column : part.column + part.columns] += 1
    tensor, expert = ranks[0].tensor.size, ranks[0].expert.size
    for name, count in counts.items():
        is_common = count.dim() == 1 and not name.endswith("bias") or name.endswith("gate.weight")
        if ".experts." in name:
            held = tensor
        else:
            held = expert * ranks[0].expert_tensor.size * (tensor if is_common else 1)
        assert (count == held).all(), name


@pytest.mark.parametrize(("shape", "ranks"), SPLITS)
def test_parameters_are_covered_once_but_for_padding(shape: ModelShape, ranks: list[Place]) -> None:
    for place in ranks:
        taken: dict[str, set[tuple[int, int]]] = defaultdict(set)
        for part in trainer_slices(shape, place):
            cells = itertools.product(
                range(part.local_row, part.local_row + part.rows),
                range(part.local_column, part.local_column + part.columns),
            )
            for cell in cells:
                assert cell not in taken[part.local], part
                taken[part.local].add(cell)
        for name, cells in taken.items():
            height, width = (max(cell[axis] for cell in cells) + 1 for axis in (0, 1))
            assert len(cells) == height * width, name


def test_chunks_of_a_stage_are_dealt_in_turn() -> None:
    # The example of megatron-core 0.16.1, transformer_block.py:get_num_layers_to_build.
    dealt = [place.layers(8) for place in places(pipeline=2, chunks=2)]
    assert dealt == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [place.layers(8) for place in places(pipeline=2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    first_rank = trainer_slices(TIED, places(pipeline=2, chunks=2)[0])
    third_layer = [part.local for part in first_rank if part.hf.startswith("model.layers.2.")]
    assert third_layer and all(name.startswith("decoder.layers.1.") for name in third_layer)


def test_tied_output_of_a_later_stage_is_a_copy() -> None:
    first, last = places(pipeline=2)
    owned = {part.local for part in trainer_slices(TIED, last)}
    assert "output_layer.weight" not in owned and not copy_slices(TIED, first)
    [copy] = copy_slices(TIED, last)
    assert copy == Slice("model.embed_tokens.weight", 0, 0, 130, 6, "output_layer.weight", 0, 0)
    assert copy_slices(TIED, Place()) == copy_slices(replace(TIED, is_tied=False), last) == []
    assert {"embedding.word_embeddings.weight", "output_layer.weight"} == PADDED


def test_large_model_is_described_within_seconds() -> None:
    shape = replace(MIXED, layers=400, experts=128)
    started = time.perf_counter()
    assert len(trainer_slices(shape, Place())) > 400 * 128 * 3
    assert time.perf_counter() - started < 60


@pytest.mark.parametrize("linear", ["linear_fc1", "linear_fc2"])
def test_grouped_experts_have_the_names_of_sequential_ones(linear: str) -> None:
    grouped = f"module.module.decoder.layers.3.mlp.experts.{linear}.weight17"
    ours = f"decoder.layers.3.mlp.experts.local_experts.17.{linear}.weight"
    assert local_name(grouped) == local_name(ours) == ours


def test_names_of_wrappers_and_of_transformer_engine_are_translated() -> None:
    module = torch.nn.Module()
    module.linear_qkv = torch.nn.Module()
    module.linear_qkv.layer_norm_weight = torch.nn.Parameter(torch.ones(1))
    layer = torch.nn.Module()
    layer.self_attention = module
    inner = torch.nn.Module()
    inner.decoder = torch.nn.Module()
    inner.decoder.layers = torch.nn.ModuleList([layer])
    wrapper = torch.nn.Module()
    wrapper.module = inner
    assert list(named_parameters([wrapper])) == ["decoder.layers.0.input_layernorm.weight"]


def chunk_of(layers: int, *others: str) -> torch.nn.Module:
    """A chunk with norms in its layers, and `others` beside them."""
    chunk = torch.nn.Module()
    chunk.decoder = torch.nn.Module()
    chunk.decoder.layers = torch.nn.ModuleList(torch.nn.RMSNorm(1) for _ in range(layers))
    for name in others:
        chunk.add_module(name, torch.nn.RMSNorm(1))
    return chunk


def test_layers_are_counted_over_all_chunks() -> None:
    chunks = [chunk_of(2, "embedding"), chunk_of(2, "output_layer")]
    assert set(named_parameters(chunks)) == {
        *(f"decoder.layers.{layer}.weight" for layer in range(4)),
        "embedding.weight",
        "output_layer.weight",
    }


def _set(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set(architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel is not supported.*Qwen3"),
        (_set(rope_parameters={"rope_type": "dynamic"}), "'dynamic' is not supported.*llama3"),
        (_set(hidden_act="gelu"), "'gelu' is not supported"),
        (_set(mlp_bias=True), "mlp_bias"),
        (lambda config: config.pop("hidden_size"), "lacks the key 'hidden_size'"),
    ],
)
def test_config_that_cannot_be_trained_is_an_input_error(
    change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    write_model(tmp_path / "llama")
    path = tmp_path / "llama" / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(InputError, match=message):
        read_shape(tmp_path / "llama")


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (
            "Qwen3Moe",
            {"decoder_sparse_step": 2},
            "decoder_sparse_step and moe_layer_freq must",
        ),
        ("Qwen3Moe", {"moe_layer_freq": 2}, "moe_layer_freq must be 1"),
        ("Qwen3Moe", {"mlp_only_layers": [0]}, "mlp_only_layers empty"),
        ("Qwen3Moe", {"shared_expert_intermediate_size": 8}, "shared experts are not supported"),
        ("Qwen3Moe", {"num_experts_per_tok": 5}, "num_experts_per_tok=5 of 4 experts"),
        ("Mixtral", {"num_experts_per_tok": 1}, "its router would get no gradient"),
    ],
)
def test_mixture_that_cannot_be_trained_is_an_input_error(
    family: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_model(tmp_path, family=family, **(QWEN3_MOE if family == "Qwen3Moe" else {}))
    path = tmp_path / "config.json"
    values = {**json.loads(path.read_text()), "num_local_experts": 4, **change}
    path.write_text(json.dumps(values))
    with pytest.raises(InputError, match=message):
        read_shape(tmp_path)


def test_experts_are_read_under_the_keys_of_either_transformers(tmp_path: Path) -> None:
    write_model(tmp_path, family="Qwen3Moe", **QWEN3_MOE)
    shape = read_shape(tmp_path)
    found = (shape.experts, shape.experts_per_token, shape.moe_ffn, shape.norm_topk_prob)
    assert found == (4, 2, 48, True)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    values["num_experts"] = values.pop("num_local_experts")
    path.write_text(json.dumps(values))
    assert read_shape(tmp_path) == shape


def test_missing_folder_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no folder .*nowhere"):
        read_shape(tmp_path / "nowhere")
    with pytest.raises(InputError, match="has no config.json"):
        read_shape(tmp_path)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (ParallelConfig(tensor=4), "4 does not divide .* 4 attention heads and 2 key-value heads"),
        (ParallelConfig(pipeline=4), "4 does not divide .* 2 layers; nearest possible: 2"),
        (ParallelConfig(data=2, expert=2), "the model has no experts"),
    ],
)
def test_split_that_does_not_divide_is_an_input_error(
    parallel: ParallelConfig, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        check_parallel(SHAPE, parallel)


def load(folder: Path) -> None:
    load_on_rank(folder, ParallelConfig())


def load_synced(folder: Path) -> list[str]:
    """The HF tensors that a sync is refused for, by what is spoilt."""
    loaded = load_on_rank(folder, ParallelConfig(tensor=2))
    parameters = named_parameters(loaded.model)
    slices = partial(trainer_slices, loaded.shape, own_place(loaded.model[0].config))
    found = [faulty_tensors(parameters, slices)]
    for name, value in (("model.layers.1.self_attn.k_proj.weight", "nan"),
                        ("lm_head.weight", "-inf")):  # fmt: skip
        part = next(part for part in slices() if part.hf == name)
        with torch.no_grad():
            local_part(parameters, part)[-1, -1] = float(value)
        found.append(faulty_tensors(parameters, slices))
    return found


def test_a_nan_or_inf_is_found_by_name_and_rank_before_a_weight_sync(tmp_path: Path) -> None:
    write_model(tmp_path / "llama")
    for rank, found in enumerate(run_ranks(load_synced, 2, tmp_path / "llama")):
        keys, where = "model.layers.1.self_attn.k_proj.weight", f"on trainer rank {rank}"
        assert found == ["", f"{keys} {where}", f"lm_head.weight, {keys} {where}"]


def spoil(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].view(-1)[7].fill_(value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spoil(float("nan")), "llama has NaN or Inf, .* in model.layers.1.mlp.up_proj.weight on "),
        (spoil(float("-inf")), "llama has NaN or Inf, .* in model.layers.1.mlp.up_proj.weight on "),
        (lambda tensors: tensors.pop("model.norm.weight"), "lacks 1 tensors.*model.norm.weight"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "has unexpected 1 tensors.*extra"),
        (
            lambda tensors: tensors.update({"lm_head.weight": torch.zeros(4, 64)}),
            r"lm_head.weight has shape \(4, 64\), but config.json means \(250, 64\)",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_an_input_error(
    change: Callable[[dict[str, torch.Tensor]], Any], message: str, tmp_path: Path
) -> None:
    write_model(tmp_path / "llama")
    file = tmp_path / "llama" / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(RanksFailed, match=f"InputError: .*{message}"):
        run_ranks(load, 1, tmp_path / "llama")
