"""What a policy asks of microbatches, by how its ranks divide them."""

import pytest

from megatron_rl.config.tree import Config, ModelConfig, ParallelConfig
from megatron_rl.trainer.model.policy import Policy

SEQUENCE = ParallelConfig(tensor=2, sequence=True)


@pytest.mark.parametrize(
    ("parallel", "recipe", "multiple"),
    [
        (ParallelConfig(tensor=2), "none", 1),
        (ParallelConfig(tensor=2), "blockwise", 16),
        (SEQUENCE, "none", 2),
        (SEQUENCE, "tensorwise", 32),
        # Each of two ranks gathers whole blocks of 128.
        (SEQUENCE, "blockwise", 256),
        (ParallelConfig(context=2), "none", 4),
        (ParallelConfig(tensor=2, sequence=True, context=2), "blockwise", 512),
    ],
)
def test_positions_are_a_multiple_of_what_each_rank_needs(
    parallel: ParallelConfig, recipe: str, multiple: int
) -> None:
    cfg = Config(model=ModelConfig(fp8=recipe), parallel=parallel)
    policy = Policy(backend=None, shape=None, chunks=[], parallel=parallel, cfg=cfg)
    assert policy.position_multiple == multiple
