"""Training cost of a sequence in FLOPs: linear for matrix products, quadratic for attention.

Used by the rollout queue and by supervised fine-tuning, which deal sequences to data-parallel
ranks. Reads sizes from a model's folder; `weights/layout/shape.py` checks models before a run. A
product of [m, k] and [k, n] is 2 m k n FLOPs (Narayanan et al., arXiv 2104.04473, eq. 3). Backward
passes always cost twice a forward pass, so only forward passes are compared.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron_rl.config.errors import InputError
from megatron_rl.config.hf_config import full_layers, mlp_sizes, text_values

Packing = Literal["tokens", "flops"]


@dataclass(frozen=True)
class SequenceCost:
    """Cost of a forward pass through all layers and the output matrix."""

    per_token: int
    per_pair: int
    """Cost of a query and a key that it sees."""
    window: int | None = None
    """Maximum number of tokens that a query sees, itself included."""
    per_full_pair: int = 0
    """Cost of a query and a key in layers for which the window does not hold."""

    def of(self, length: int) -> int:
        """Cost of a sequence of `length` tokens."""
        seen = min(length, self.window or length)
        pairs = seen * (seen + 1) // 2 + (length - seen) * seen
        full = self.per_full_pair * (length * (length + 1) // 2)
        return self.per_token * length + self.per_pair * pairs + full


TOKENS = SequenceCost(per_token=1, per_pair=0)
"""Every token costs the same."""


def find_cost(packing: Packing, model: Path) -> SequenceCost:
    """The cost for `train.packing`. Raises InputError if the model folder gives no sizes."""
    return TOKENS if packing == "tokens" else read_cost(model)


def read_cost(model: Path) -> SequenceCost:
    """FLOPs of the model in a Hugging Face folder."""
    try:
        values = text_values(json.loads((model / "config.json").read_text()))
        hidden = values["hidden_size"]
        attention = _attention(values)
        layers, sizes = values["num_hidden_layers"], mlp_sizes(values)
        routers = sizes.expert_layers * sizes.experts * hidden
        window = _window(values)
        full = len(full_layers(values)) if window else 0
        elements = layers * attention.projections + 3 * hidden * sizes.units_used() + routers
        return SequenceCost(
            per_token=2 * (elements + hidden * values["vocab_size"]),
            per_pair=2 * (layers - full) * attention.width,
            window=window,
            per_full_pair=2 * full * attention.width,
        )
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"train.packing='flops': {model}/config.json does not give the model's sizes ({error!r}"
            "); give model.path a Hugging Face folder, or set train.packing='tokens'"
        ) from error


class _Attention(NamedTuple):
    """Of one layer."""

    projections: int
    """Elements of the matrices."""
    width: int
    """Dimensions of the keys and of the values of all query heads."""


def _attention(values: dict[str, Any]) -> _Attention:
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    rank = values.get("kv_lora_rank")
    if not rank:
        dim = values.get("head_dim") or hidden // heads
        kv_heads = values.get("num_key_value_heads", heads)
        return _Attention(hidden * dim * 2 * (heads + kv_heads), 2 * heads * dim)
    rotated, plain, value = (
        values[key] for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    queries = values.get("q_lora_rank") or 0
    down = hidden * (queries + rank + rotated)
    up = (queries or hidden) * (plain + rotated) + rank * (plain + value) + value * hidden
    return _Attention(down + heads * up, heads * (plain + rotated + value))


def _window(values: dict[str, Any]) -> int | None:
    """Qwen's folders give a window that counts only with use_sliding_window."""
    if not values.get("use_sliding_window", True):
        return None
    return values.get("sliding_window")
