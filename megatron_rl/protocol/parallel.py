"""Which expert-parallel sizes are possible. Used by the launcher and by trainer ranks."""

import math

from megatron_rl.protocol.config import ParallelConfig
from megatron_rl.protocol.process import InputError


def check_expert_ranks(parallel: ParallelConfig, experts: int) -> None:
    """Raise InputError unless the ranks can share `experts` experts a layer; 0 is a dense model."""
    if not experts:
        if parallel.expert > 1:
            raise InputError(
                f"parallel.expert = {parallel.expert}, but the model has no experts: use 1"
            )
        return
    ranks = parallel.tensor * parallel.data
    if experts % parallel.expert or ranks % parallel.expert:
        nearest = nearest_divisor(math.gcd(experts, ranks), parallel.expert)
        raise InputError(
            f"parallel.expert = {parallel.expert} must divide the model's {experts} experts and "
            f"parallel.tensor x parallel.data = {ranks}; nearest possible: {nearest}"
        )
    if parallel.tensor > 1 and not parallel.sequence:
        # Tensor ranks then route tokens of their own; without it each would route all of them.
        raise InputError(
            f"parallel.tensor = {parallel.tensor} with experts needs parallel.sequence = true"
        )


def nearest_divisor(count: int, wanted: int) -> int:
    """The divisor of `count` that is nearest to `wanted`; the smaller of two as near."""
    divisors = (size for size in range(1, count + 1) if count % size == 0)
    return min(divisors, key=lambda size: (abs(size - wanted), size))
