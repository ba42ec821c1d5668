"""Cost and possible gain of microbatches of one size (`expert.train.pad_microbatches`). Pure.

`expert.parallel.overlap_tensor` needs them. It hides the exchange of tensor ranks behind their
products, so it gains at most the time of the exchange; padding costs time.
"""

from dataclasses import dataclass

from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.config.trainer import ModelConfig
from megatron_rl.config.tree import Config
from megatron_rl.plan.flops import BACKWARD, StepFlops, product_flops
from megatron_rl.weights.layout.shape import ModelShape

LINK_BYTES_PER_S = {
    "a100-40g": 300e9,
    "a100-80g": 300e9,
    "l40s-48g": 32e9,
    "h100-80g": 450e9,
    "h200-141g": 450e9,
    "b200-180g": 900e9,
}
"""Bytes per second of NVLink one way, by NVIDIA's data sheets (SXM); l40s-48g has only PCIe."""
GATHERED, REDUCED = 8, 4
"""Buffers of each kind that TransformerEngine 2.12 opens (base.py: layers_all_gather_overlap,
layers_reduce_scatter_overlap), whether a model has layers for them or not. In FP8 the gathered ones
have a byte an element."""
BFLOAT16_BYTES = 2
_EXCHANGES = 5
"""In a training step, of two products whose input is gathered and whose output is reduced: both
forward, both of their gradients backward, and the input once more for the weight's gradient."""


@dataclass(frozen=True)
class Padding:
    """Padding of a step, over all ranks; all 0 if microbatches have no fixed size."""

    share: float
    """Lower bound of the share of all positions, by the best packing. First-fit decreasing takes
    some percent more microbatches if sequences are nearly as long as the budget."""
    positions: int
    flops: StepFlops
    """FLOPs of padding, without logits and attention within short pieces."""
    exchange_s: float
    """Seconds in which a rank receives from its tensor ranks, at the links' full rate."""


def find_padding(
    shape: ModelShape, config: Config, gpu: str, *, tokens: int, microbatches: int
) -> Padding:
    """tokens: of a step; microbatches: of each data-parallel rank and optimizer step."""
    train, parallel = config.train, config.parallel
    share = 0.0
    if train.pad_microbatches:
        if parallel.virtual_stages > 1:
            # The interleaved schedule needs a multiple of the stages: the rest is padding.
            microbatches += -microbatches % parallel.pipeline
        places = microbatches * train.minibatches * parallel.data * train.microbatch_tokens
        share = max(0.0, 1.0 - tokens / places)
    positions = round(tokens * share / (1.0 - share))
    return Padding(
        share=share,
        positions=positions,
        flops=StepFlops((1 + BACKWARD) * positions * product_flops(shape), attention=0, output=0),
        exchange_s=exchange_bytes(shape, parallel, tokens=tokens) / LINK_BYTES_PER_S[gpu],
    )


def exchange_bytes(shape: ModelShape, parallel: ParallelConfig, *, tokens: int) -> float:
    """Bytes that a rank receives from its tensor ranks in a step of these tokens, in bfloat16.

    Fewer in FP8. The exchange of experts, by their dispatcher, is not included.
    """
    # Attention, a dense MLP and shared experts exchange; the others have their dispatcher.
    pairs = sum(
        count * (2 if kind.shared_ffn or not kind.experts else 1)
        for kind, count in shape.kinds(range(shape.layers))
    )
    others = (parallel.tensor - 1) / parallel.tensor
    of_token = pairs / parallel.pipeline * _EXCHANGES * shape.hidden * BFLOAT16_BYTES * others
    return of_token * tokens / parallel.data


def overlap_buffer_bytes(model: ModelConfig, parallel: ParallelConfig, positions: int) -> int:
    """Bytes of the buffers of `expert.parallel.overlap_tensor` per element of a hidden state;
    0 without it."""
    if not parallel.overlap_tensor:
        return 0
    plain = BFLOAT16_BYTES * (GATHERED + REDUCED)
    if model.fp8 == "none":
        return plain * positions
    in_fp8 = GATHERED + BFLOAT16_BYTES * REDUCED
    # Layers at the edges have separate buffers.
    return (in_fp8 + (plain if model.fp8_bf16_edge_layers else 0)) * positions


def padding_advice(padding: Padding, flops: StepFlops, seconds: float) -> list[str]:
    """flops: of the model in a step; seconds: of a step, with padding."""
    padding_s = seconds * padding.flops.total / (flops.total + padding.flops.total)
    if padding_s <= padding.exchange_s:
        return []
    return [
        f"at least {padding.share:.0%} of all positions are padding "
        f"(expert.train.pad_microbatches), {padding_s:.1f} s of a step; all that tensor ranks "
        f"exchange takes {padding.exchange_s:.1f} s at the links' full rate, so that "
        "expert.parallel.overlap_tensor cannot pay: choose train.microbatch_tokens so that whole "
        "microbatches are filled, or set both to false"
    ]
