"""Norms of OLMo 2 and 3: behind attention and the MLP, and of all heads together.

Used by trainer ranks, for Megatron's own layers and TransformerEngine's alike.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


@functools.cache
def normed(row: type, norm: type) -> type:
    """The row-parallel linear layer `row` with a norm of what it gives, `post_layernorm`."""

    class Normed(row):  # type: ignore[misc, valid-type]
        def __init__(
            self, inputs: int, outputs: int, *, config: TransformerConfig, **options: Any
        ) -> None:
            super().__init__(inputs, outputs, config=config, **options)
            self.post_layernorm = norm(config, outputs, config.layernorm_epsilon)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
            """[..., outputs], and no bias that is left to add."""
            result, bias = super().forward(x)
            assert bias is None, "a bias would be added behind the norm"
            return self.post_layernorm(result), None

    return Normed


@dataclass(frozen=True)
class Norms:
    """Placement of a layer's norms, and the dimensions that they normalise."""

    are_behind: bool = False
    """Whether they follow attention and the MLP, with no norm before."""
    are_of_all_heads: bool = False
    """Whether those of queries and keys are over all heads together, not over each."""


DEFAULT_NORMS = Norms()
Spec = TypeVar("Spec", ModuleSpec, TransformerBlockSubmodules)


def arrange(
    spec: Spec, norms: Norms, config: TransformerConfig, *, column: type, norm: type
) -> Spec:
    """The spec of a chunk, or of each of its layers, with its norms arranged.

    column: a column-parallel linear layer without a norm.
    """
    specs = [spec] if isinstance(spec, ModuleSpec) else spec.layer_specs
    for layer in {id(one): one.submodules for one in specs}.values():
        attention = layer.self_attention.submodules
        if norms.are_behind:
            layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
            attention.linear_qkv = column
            attention.linear_proj = normed(attention.linear_proj, norm)
            layer.mlp = _normed_mlp(layer.mlp, column, norm)
        if norms.are_of_all_heads:
            counts = (config.num_attention_heads, config.num_query_groups)
            attention.q_layernorm, attention.k_layernorm = (
                ModuleSpec(module=HeadsNorm, params={"heads": heads}) for heads in counts
            )
    return spec


def _normed_mlp(mlp: Any, column: type, norm: type) -> Any:
    """A dense MLP's spec, or class, with a norm of what it gives."""
    if isinstance(mlp, type):
        return type(mlp.__name__, (mlp,), {"row": normed(mlp.row, norm)})  # type: ignore[attr-defined]
    row = normed(mlp.submodules.linear_fc2, norm)
    parts = replace(mlp.submodules, linear_fc1=column, linear_fc2=row)
    return ModuleSpec(module=mlp.module, submodules=parts)


class HeadsNorm(torch.nn.Module):
    """RMSNorm over all heads of a position, which tensor ranks divide among them."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, *, heads: int
    ) -> None:
        super().__init__()
        self.eps, self.width = eps, heads * hidden_size
        own = self.width // config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(torch.empty(own, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight; x is [..., heads of the rank, dimensions]."""
        wide = x.float()
        squares = wide.square().sum((-2, -1), keepdim=True)
        # The sum over ranks, whose gradient is the sum over ranks too: each rank's result needs it.
        squares = copy_to_tensor_model_parallel_region(
            reduce_from_tensor_model_parallel_region(squares)
        )
        inverse = torch.rsqrt(squares / self.width + self.eps)
        return (wide * inverse * self.weight.view(x.shape[-2:])).to(x.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """As Megatron's column-parallel layers: divided along the first axis."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )
