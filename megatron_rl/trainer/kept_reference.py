"""The kept part of the reference, to compute its logits again in an update with the policy's.

Used by trainer ranks of the last pipeline stage. It waits in host memory: it is as large as the
hidden states of all completion tokens of a batch, and one output layer.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl.trainer.loss_tokens import Known
from megatron_rl.trainer.model.divergence import ReferenceLayer
from megatron_rl.trainer.model.last_stage import output_weight
from megatron_rl.trainer.model.policy import Policy
from megatron_rl.weights.folders.load import unwrap


def kept_weight(policy: Policy) -> Tensor | None:
    """[padded vocabulary / tensor ranks, hidden], a copy of the output layer in place; on the host.

    None on stages that have none.
    """
    model = unwrap(policy.chunks[-1])
    if not model.post_process:
        return None
    return output_weight(model).detach().to("cpu", copy=True)


def kept_layer(hidden: Tensor, weight: Tensor) -> ReferenceLayer:
    """On the host. hidden: [completion tokens of this context rank, hidden]; weight: as kept."""
    return ReferenceLayer(hidden.detach().to("cpu", weight.dtype), weight)


def with_weight_on(device: torch.device, known: Sequence[Known]) -> list[Known]:
    """The same with the weight that all microbatches share on the device, once for them all."""
    layer = known[0].reference_layer if known else None
    if layer is None:
        return list(known)
    weight = layer.weight.to(device)
    return [
        replace(k, reference_layer=k.reference_layer and replace(k.reference_layer, weight=weight))
        for k in known
    ]
