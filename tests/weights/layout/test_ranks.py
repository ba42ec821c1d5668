"""World ranks stand where Megatron's groups say."""

import pytest
import torch.distributed as dist

from megatron_rl.backend.device import select_backend
from megatron_rl.config.tree import ModelConfig, ParallelConfig
from megatron_rl.weights.layout.place import Place
from megatron_rl.weights.layout.ranks import all_places, own_place, place_of
from megatron_rl.weights.layout.slices import Share
from tests.distributed import run_ranks


def places_on_rank(parallel: ParallelConfig) -> tuple[Place, tuple[Place, ...]]:
    backend = select_backend(ModelConfig())
    backend.init_distributed(parallel, seed=0, timeout_s=30)
    # Rank 0 holds the store through which the others may still connect.
    dist.barrier()
    return own_place(), all_places()


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(tensor=2, data=2, expert=4),
        ParallelConfig(pipeline=2, data=2, expert=2),
        ParallelConfig(tensor=2, data=2, expert=2),
        ParallelConfig(tensor=2, pipeline=2, expert=2),
        ParallelConfig(pipeline=2, virtual_stages=3, data=2),
        ParallelConfig(tensor=2, context=2, expert=2, expert_tensor=2),
        ParallelConfig(context=2, data=2, expert=2),
    ],
)
def test_every_rank_knows_the_place_of_all(parallel: ParallelConfig) -> None:
    found = run_ranks(places_on_rank, 4, parallel)
    own = tuple(place for place, _ in found)
    assert all(everyone == own for _, everyone in found)


def test_replicas_have_equal_places() -> None:
    like = Place(Share(0, 2), Share(0, 2), Share(0, 4))
    places = [place_of(rank, 16, like) for rank in range(16)]
    assert places[:4] == places[4:8] and len(set(places)) == 8
    assert places[13] == Place(Share(1, 2), Share(1, 2), Share(1, 4), Share(0, 1))
