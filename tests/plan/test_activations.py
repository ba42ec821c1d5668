"""Predicted activations beside what Megatron's layers keep, and the schedules worked by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_rl.config.tree import ParallelConfig
from megatron_rl.plan.activations import (
    Microbatch,
    activation_bytes,
    layer_elements,
    logits_bytes,
    stored_microbatches,
)
from megatron_rl.plan.parameters import sequence_shards
from megatron_rl.trainer.model.build import packed
from megatron_rl.weights.layout.shape import ModelShape, read_shape
from tests.distributed import run_ranks
from tests.tiny_models import GPT_OSS, QWEN3_MOE, load_on_rank, write_model

TOKENS = 96


def kept_bytes(folder: Path, parallel: ParallelConfig) -> int:
    """Bytes that one forward pass keeps for the backward pass, parameters left out."""
    loaded = load_on_rank(folder, parallel)
    own = {parameter.untyped_storage().data_ptr() for parameter in loaded.model[0].parameters()}
    kept: dict[int, tuple[int, Tensor]] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    ids = torch.arange(TOKENS)[None] % loaded.shape.vocab
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loaded.model[0](ids, torch.arange(TOKENS)[None], None, packed_seq_params=packed([TOKENS]))
    return sum(size for size, _ in kept.values())


def cpu_difference(shape: ModelShape, parallel: ParallelConfig) -> float:
    """Elements for each token that layers without TransformerEngine keep beside, or spare.

    On a CPU a norm keeps one sum a row; attention its sums, and without norms of its own no rotated
    queries and keys; a gated MLP without experts only what stands before and behind its gate.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = 2 / sequence_shards(parallel)
    own = float(shape.heads)
    if shape.has_qk_norm:
        # Keys do not lie next to each other either; the angles of the unfused rotation.
        own += shape.heads + shape.kv_heads + keys + 4 * shape.head_dim * parallel.tensor
    else:
        own -= queries + keys
    if not shape.experts:
        own -= 2 * shape.ffn
    if shape.glu_limit:
        # The sigmoid in the gate, which a compiled gate computes again.
        own += shape.experts_per_token * shape.moe_ffn
    return norms + own / parallel.tensor


@pytest.mark.parametrize(
    ("family", "options", "parallel"),
    [
        ("Llama", {}, {}),
        ("Llama", {}, {"tensor": 2, "sequence": True}),
        ("Qwen3", {"head_dim": 32}, {}),
        ("Qwen3Moe", QWEN3_MOE, {}),
        ("GptOss", GPT_OSS, {}),
    ],
    ids=["dense", "dense-tp2-sequence", "qk-norm", "experts", "clamped-experts"],
)
def test_a_layer_keeps_what_is_predicted(
    tmp_path: Path, family: str, options: dict, parallel: dict
) -> None:
    sizes = ParallelConfig(**parallel)
    kept = []
    for layers in (1, 2):
        folder = tmp_path / str(layers)
        write_model(folder, family=family, num_hidden_layers=layers, **options)
        kept.append(run_ranks(kept_bytes, sizes.world_size, folder, sizes)[0])
    layer = (kept[1] - kept[0]) / (4 * TOKENS)
    shape = read_shape(folder)
    assert layer_elements(shape, sizes) + cpu_difference(shape, sizes) == pytest.approx(
        layer, rel=0.02
    )


# Small enough to be worked out by hand.
SHAPE = ModelShape(
    architecture="LlamaForCausalLM", layers=4, hidden=8, ffn=12, heads=4, kv_heads=2, head_dim=2,
    vocab=100, max_positions=64, norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, is_tied=False,
    has_qkv_bias=False, has_qk_norm=False, sliding_window=None,
)  # fmt: skip
# Two norms with input and output; projection, rotated queries and keys, result; five times 12.
LAYER = 4 * 8 + (8 + 2 * 4) + (8 + 4) + 8 + 5 * 12


def test_a_layer_worked_by_hand() -> None:
    assert layer_elements(SHAPE, ParallelConfig()) == LAYER == 128
    # Tensor ranks divide attention and MLP; the norms only with sequence parallelism.
    assert layer_elements(SHAPE, ParallelConfig(tensor=2)) == 32 + 96 / 2
    assert layer_elements(SHAPE, ParallelConfig(tensor=2, sequence=True)) == 16 + 96 / 2


def test_context_ranks_keep_copies_of_keys_and_values_alone() -> None:
    context = ParallelConfig(context=2)
    # Rotated queries, the copy, the result; the fused unit has three times 12.
    assert layer_elements(SHAPE, context, is_fused=True) == 4 * 8 + 8 + 2 * 4 + 8 + 3 * 12
    # A norm of queries and keys keeps the projection, and its copy of the queries.
    normed = replace(SHAPE, has_qk_norm=True)
    more = (8 + 2 * 4) + 8
    assert layer_elements(normed, context, is_fused=True) == 92 + more
    # The layers for the CPU exchange them otherwise.
    assert layer_elements(SHAPE, context) == LAYER


@pytest.mark.parametrize(
    ("stage", "virtual_stages", "count", "held"),
    [
        (0, 1, 32, 4),  # 1F1B: as many as there are stages
        (3, 1, 32, 1),
        (0, 1, 2, 2),  # never more than there are
        (0, 2, 32, 4 * (1 + 3 / (4 * 2))),  # arXiv 2205.05198, section 4.2.3
        (3, 2, 32, 2.5),  # 0 + 4 + 1 chunks of half a stage
    ],
)
def test_microbatches_held_by_a_stage(
    stage: int, virtual_stages: int, count: int, held: float
) -> None:
    parallel = ParallelConfig(pipeline=4, virtual_stages=virtual_stages)
    assert stored_microbatches(parallel, stage, count) == held


def test_full_recomputation_keeps_the_input_of_each_layer_and_one_layer() -> None:
    none, full = (
        activation_bytes(SHAPE, ParallelConfig(), Microbatch(10, 4), stage=0, item_bytes=2,
                         recompute=recompute)
        for recompute in ("none", "full")
    )  # fmt: skip
    # Embedding, final norm and its output; gradients of three times 12 units and twice the input.
    ends, gradients = 8 + 2 * 8, 3 * 12 + 2 * 8
    assert none == (10 * 2 * (4 * LAYER + ends), 10 * 2 * gradients)
    assert full == (10 * 2 * (4 * 8 + ends), 10 * 2 * (LAYER + gradients))


def test_context_ranks_share_the_tokens() -> None:
    whole, shared = (
        activation_bytes(SHAPE, ParallelConfig(context=context), Microbatch(16, 1), stage=0,
                         item_bytes=2, recompute="none")
        for context in (1, 2)
    )  # fmt: skip
    assert whole == (2 * shared.kept, 2 * shared.backward)


def test_logits_in_chunks_need_one_chunk() -> None:
    assert logits_bytes(4096, 16384) == 4096 * 16384 * 8
    assert logits_bytes(4096, 16384, chunk_rows=512) == 512 * 16384 * 4
    assert logits_bytes(100, 16384, chunk_rows=512) == 100 * 16384 * 4
