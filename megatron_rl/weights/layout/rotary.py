"""Rotary angles of a model. Used by trainer ranks."""

import math

import torch

from megatron_rl.weights.layout.rope import RopeScaling
from megatron_rl.weights.layout.shape import ModelShape


def inverse_frequencies(shape: ModelShape) -> torch.Tensor:
    """Rotary angles per position, [rotated dimensions / 2] float32.

    Source: the llama3 rule is that of the Llama 3.1 reference code, yarn's arXiv 2309.00071,
    section 3.2.
    """
    rotated = shape.rotated_dim
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    frequencies = 1.0 / shape.rope_theta**exponents
    scaling = shape.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "longrope":
        return 1.0 / (torch.tensor(scaling.short_factors) * shape.rope_theta**exponents)
    stretched = frequencies / scaling.factor
    match scaling.kind:
        case "linear":
            return stretched
        case "yarn":
            kept = _kept_by_yarn(shape, scaling)
        case _:
            turns = scaling.original_positions * frequencies / (2 * math.pi)
            span = scaling.high_freq_factor - scaling.low_freq_factor
            kept = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return (1 - kept) * stretched + kept * frequencies


def _kept_by_yarn(shape: ModelShape, scaling: RopeScaling) -> torch.Tensor:
    """Share of each frequency that is not stretched, [rotated dimensions / 2]."""
    rotated = shape.rotated_dim

    def dimension(turns: float) -> float:
        """Where a frequency makes so many turns within the original positions."""
        wave = scaling.original_positions / (turns * 2 * math.pi)
        return rotated * math.log(wave) / (2 * math.log(shape.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    # As transformers, where the two meet.
    span = (high - low) or 0.001
    places = torch.arange(rotated // 2, dtype=torch.float32)
    return 1 - ((places - low) / span).clamp(0, 1)


def softmax_scale(shape: ModelShape) -> float | None:
    """What attention multiplies scores by; None: 1 / sqrt(head_dim).

    The factor of cosines multiplies queries and keys, and so each score by its square. Where it is
    that of some layers alone, their queries are multiplied instead.
    """
    scaling = shape.rope_scaling
    is_elsewhere = shape.stretches_full_layers or shape.rotary_dim
    if scaling is None or scaling.attention_factor == 1 or is_elsewhere:
        return None
    return scaling.attention_factor**2 / math.sqrt(shape.head_dim)


def rotation_factor(shape: ModelShape) -> float:
    """What cosines and sines are multiplied by, where scores are not: part of a head has none."""
    scaling = shape.rope_scaling
    return scaling.attention_factor if scaling is not None and shape.rotary_dim else 1.0
