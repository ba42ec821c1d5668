"""Rotary angles of a model. Used by trainer ranks."""

import math

import torch

from megatron_rl.weights.layout.shape import ModelShape


def inverse_frequencies(shape: ModelShape) -> torch.Tensor:
    """Rotary angles per position, [head_dim / 2] float32.

    Source: the llama3 rule is that of the Llama 3.1 reference code.
    """
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    frequencies = 1.0 / shape.rope_theta**exponents
    scaling = shape.rope_scaling
    if scaling is None:
        return frequencies
    stretched = frequencies / scaling.factor
    if scaling.kind == "linear":
        return stretched
    turns = scaling.original_positions * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    blend = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return (1 - blend) * stretched + blend * frequencies
