"""Bytes of weights, gradients and optimizer state of a trainer rank. Pure.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(arXiv 2205.05198) leaves these out; the counts of bytes are those of ZeRO (arXiv 1910.02054,
section 3.1) with Megatron's float32 gradient buffer: 2 + 4 + 4 + 8 in bf16, 4 + 4 + 8 in float32.
"""

from dataclasses import dataclass

from megatron_rl.plan.division import Division
from megatron_rl.plan.parameters import RankParameters

GRADIENT_BYTES = 4
"""Gradients are accumulated and reduced in float32."""
MASTER_BYTES = 4
MOMENT_BYTES = 8
"""Adam's two moments, float32."""
FP8_COPY_BYTES = 2
"""TransformerEngine keeps a quantised weight and its transpose from microbatch to microbatch."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank."""

    weights: int
    gradients: int
    masters: int
    """float32 copies of bf16 parameters; float32 parameters are their own."""
    moments: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.masters + self.moments


def state_bytes(
    parameters: RankParameters,
    division: Division,
    *,
    item_bytes: int,
    is_fp8: bool = False,
    is_offloaded: bool = False,
) -> StateBytes:
    """What a rank holds between steps.

    item_bytes: of a parameter. is_offloaded: masters and moments are in host memory.
    """
    sharded = -(-parameters.dense // division.dense_shards)
    sharded += -(-parameters.expert // division.expert_shards)
    on_device = 0 if is_offloaded else sharded
    weight_bytes = item_bytes + (FP8_COPY_BYTES if is_fp8 else 0)
    return StateBytes(
        weights=parameters.total * weight_bytes,
        gradients=parameters.total * GRADIENT_BYTES,
        masters=on_device * MASTER_BYTES if item_bytes < MASTER_BYTES else 0,
        moments=on_device * MOMENT_BYTES,
    )
