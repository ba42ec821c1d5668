"""Trainer ranks that hold the whole model once: by hand, and by counting elements."""

import math
from collections import Counter

import pytest

from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.weights.layout.copies import copies_of, model_copies, places_of
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.layout.slices import Share
from megatron_rl.weights.layout.trainer_layout import Place, hf_shapes, trainer_slices
from tests.weights.made_up import SHAPE

EXPERTS = ModelShape(
    architecture="Qwen3MoeForCausalLM", layers=4, hidden=4, ffn=8, heads=4, kv_heads=4, head_dim=2,
    vocab=131, max_positions=8, norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, is_tied=False,
    has_qkv_bias=False, has_qk_norm=True, sliding_window=None, experts=8, experts_per_token=2,
    moe_ffn=4,
)  # fmt: skip


def test_copies_of_a_small_trainer_are_those_worked_out_by_hand() -> None:
    # Stages 0..7 and 8..15; in a stage tensor ranks are neighbours, then come data ranks.
    sizes = ParallelConfig(tensor=2, pipeline=2, data=4)
    assert copies_of(places_of(sizes)) == (
        (0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15)
    )  # fmt: skip
    # Context ranks repeat parameters as data ranks do.
    assert copies_of(places_of(ParallelConfig(tensor=2, context=2))) == ((0, 1), (2, 3))
    # Four experts' shares need four ranks, which hold the rest of the model twice.
    experts = ParallelConfig(tensor=2, data=4, expert=4)
    assert copies_of(places_of(experts)) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert copies_of(places_of(ParallelConfig())) == ((0,),)


def test_a_24b_trainer_has_copies_of_16_ranks() -> None:
    # TP8 x PP2 x DP4, the 64 trainer ranks of examples/magistral_24b.
    copies = copies_of(places_of(ParallelConfig(tensor=8, pipeline=2, data=4)))
    assert [len(ranks) for ranks in copies] == [16] * 4
    assert copies[1] == (*range(8, 16), *range(40, 48))


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        (SHAPE, {"tensor": 2, "pipeline": 2, "data": 2}),
        (SHAPE, {"tensor": 1, "context": 2, "data": 3}),
        (EXPERTS, {"tensor": 2, "pipeline": 2, "data": 4, "expert": 8}),
        (EXPERTS, {"tensor": 4, "data": 2, "expert": 2, "expert_tensor": 1}),
        (EXPERTS, {"tensor": 2, "data": 4, "expert": 2, "expert_tensor": 2}),
        (EXPERTS, {"tensor": 4, "pipeline": 4, "data": 2, "expert": 8, "expert_tensor": 1}),
    ],
)
def test_each_copy_holds_every_element_and_no_rank_is_in_two(
    shape: ModelShape, sizes: dict[str, int]
) -> None:
    parallel = ParallelConfig(**sizes)
    places = places_of(parallel)
    copies = model_copies(shape, places)
    assert sorted(rank for ranks in copies.ranks for rank in ranks) == list(
        range(parallel.world_size)
    )
    sizes_of = {name: math.prod(size) for name, size in hf_shapes(shape).items()}
    for ranks in copies.ranks:
        # What the plan assumes of every copy.
        assert [trainer_slices(shape, places[rank]) for rank in ranks] == list(copies.slices)
        held = {rank: elements(shape, places[rank]) for rank in ranks}
        found = Counter(name for name, _, _ in set().union(*held.values()))
        assert found == sizes_of
        # Without any of its ranks a copy would not be whole.
        for lost in ranks:
            assert held[lost] - set().union(*(held[rank] for rank in ranks if rank != lost))


def elements(shape: ModelShape, place: Place) -> set[tuple[str, int, int]]:
    return {
        (part.hf, row, column)
        for part in trainer_slices(shape, place)
        for row in range(part.row, part.row + part.rows)
        for column in range(part.column, part.column + part.columns)
    }


def test_places_that_are_not_equally_frequent_are_refused() -> None:
    with pytest.raises(ValueError, match="not equally frequent"):
        copies_of([Place(Share(0, 2)), Place(Share(1, 2)), Place(Share(0, 2))])
