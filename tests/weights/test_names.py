"""Layouts split and join as Megatron's documentation says; bad folders are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.protocol.config import ParallelConfig
from megatron_rl.protocol.process import InputError
from megatron_rl.weights.names import (
    COLUMNS,
    GATE_UP,
    QKV,
    ROWS,
    VOCAB,
    WHOLE,
    Layout,
    Share,
    named_parameters,
)
from megatron_rl.weights.shape import ModelShape, check_parallel, read_shape
from tests.distributed import RanksFailed, run_ranks
from tests.tiny_models import load_on_rank, write_model

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


def test_qkv_holds_queries_key_value_of_each_group_in_turn() -> None:
    queries, keys, values = torch.arange(4.0), torch.tensor([10.0, 11]), torch.tensor([20.0, 21])
    whole = QKV.split([queries, keys, values], Share(0, 1), SHAPE)
    assert whole.tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    second = QKV.split([queries, keys, values], Share(1, 2), SHAPE)
    assert second.tolist() == [2, 3, 11, 21]


def test_gate_stands_before_up_on_each_rank() -> None:
    gate, up = torch.arange(4.0)[:, None], torch.arange(10.0, 14)[:, None]
    assert GATE_UP.split([gate, up], Share(1, 2), SHAPE).flatten().tolist() == [2, 3, 12, 13]


def test_vocabulary_is_padded_to_a_multiple_of_128_per_rank() -> None:
    assert [SHAPE.padded_vocab(ranks) for ranks in (1, 2, 4)] == [256, 256, 512]
    table = torch.arange(130.0)[:, None].expand(130, 6)
    last = VOCAB.split([table], Share(1, 4), SHAPE)
    assert last.shape == (128, 6)
    assert last[:, 0].tolist() == [128, 129] + [0] * 126
    assert not VOCAB.split([table], Share(3, 4), SHAPE).any()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        (ROWS, [(4, 6)]),
        (COLUMNS, [(6, 4)]),
        (WHOLE, [(6,)]),
        (VOCAB, [(130, 6)]),
        (GATE_UP, [(4, 6), (4, 6)]),
        (QKV, [(4, 6), (2, 6), (2, 6)]),
        (QKV, [(4,), (2,), (2,)]),
    ],
)
def test_join_undoes_split(layout: Layout, sizes: list[tuple[int, ...]], ranks: int) -> None:
    torch.manual_seed(0)
    sources = [torch.randn(size) for size in sizes]
    parts = [layout.split(sources, Share(rank, ranks), SHAPE) for rank in range(ranks)]
    joined = layout.join(parts, SHAPE)
    assert all(map(torch.equal, joined, sources)) and len(joined) == len(sources)


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
    assert list(named_parameters(wrapper)) == ["decoder.layers.0.input_layernorm.weight"]


def _set(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set(architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel is not supported.*Qwen3"),
        (_set(rope_parameters={"rope_type": "yarn"}), "'yarn' is not supported.*llama3"),
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


def test_missing_folder_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no folder .*nowhere"):
        read_shape(tmp_path / "nowhere")
    with pytest.raises(InputError, match="has no config.json"):
        read_shape(tmp_path)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (ParallelConfig(tensor=3), "tensor=3 does not divide the model's 4 attention heads"),
        (ParallelConfig(tensor=4), "tensor=4 does not divide the model's 2 key-value heads"),
        (ParallelConfig(pipeline=4), "pipeline=4 does not divide the model's 2 layers"),
    ],
)
def test_split_that_does_not_divide_is_an_input_error(
    parallel: ParallelConfig, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        check_parallel(SHAPE, parallel)


def load(folder: Path) -> None:
    load_on_rank(folder, ParallelConfig())


@pytest.mark.parametrize(
    ("change", "message"),
    [
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
