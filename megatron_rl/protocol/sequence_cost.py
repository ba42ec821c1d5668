"""What a sequence costs to train on, in FLOPs: products grow with its length, attention with its
square.

Used by the rollout queue and by supervised fine-tuning, which deal sequences to data-parallel
ranks. A model's folder is read here for the few numbers that this takes; what a model may be at
all, `weights/layout/shape.py` decides before a run. A product of [m, k] and [k, n] is 2 m k n FLOPs
(Narayanan et al., arXiv 2104.04473, eq. 3); a backward pass is twice a forward pass for all of
them, so forward passes are compared.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_rl.config.errors import InputError

Packing = Literal["tokens", "flops"]


@dataclass(frozen=True)
class SequenceCost:
    """Cost of a forward pass through all layers and the output matrix."""

    per_token: int
    per_pair: int
    """Of a query and a key that it sees."""
    window: int | None = None
    """Tokens that a query sees at most, itself included."""

    def of(self, length: int) -> int:
        """Cost of a sequence of that number of tokens."""
        seen = min(length, self.window or length)
        pairs = seen * (seen + 1) // 2 + (length - seen) * seen
        return self.per_token * length + self.per_pair * pairs


TOKENS = SequenceCost(per_token=1, per_pair=0)
"""Every token costs the same."""


def find_cost(packing: Packing, model: Path) -> SequenceCost:
    """By `train.packing`; model: the policy's folder. Raises InputError for one without sizes."""
    return TOKENS if packing == "tokens" else read_cost(model)


def read_cost(model: Path) -> SequenceCost:
    """FLOPs of the model in a Hugging Face folder."""
    try:
        values = json.loads((model / "config.json").read_text())
        hidden, heads = values["hidden_size"], values["num_attention_heads"]
        dim = values.get("head_dim") or hidden // heads
        projections = hidden * dim * 2 * (heads + values.get("num_key_value_heads", heads))
        layer = projections + _mlp_elements(values, hidden)
        return SequenceCost(
            per_token=2 * (values["num_hidden_layers"] * layer + hidden * values["vocab_size"]),
            per_pair=4 * values["num_hidden_layers"] * heads * dim,
            window=_window(values),
        )
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"train.packing='flops': {model}/config.json does not give the model's sizes ({error!r}"
            "); give model.path a Hugging Face folder, or set train.packing='tokens'"
        ) from error


def _mlp_elements(values: dict[str, Any], hidden: int) -> int:
    """Of the matrices that one token passes through in a layer's MLP, or router and experts."""
    experts = values.get("num_local_experts") or values.get("num_experts")
    if not experts:
        return 3 * hidden * values["intermediate_size"]
    ffn = values.get("moe_intermediate_size") or values["intermediate_size"]
    return values["num_experts_per_tok"] * 3 * hidden * ffn + experts * hidden


def _window(values: dict[str, Any]) -> int | None:
    """Qwen's folders name a window that is used only if they say so."""
    if not values.get("use_sliding_window", True):
        return None
    return values.get("sliding_window")
