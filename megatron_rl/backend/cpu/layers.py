"""Attention for hosts without TransformerEngine, and the spec of layers that uses it.

Used by trainer ranks. Megatron's own local layers refuse packed sequences (attention) and sequence
parallelism (RMSNorm); these run on any device, in plain torch except for `packed_attention.py` and
`pointwise.py`, whose loops are for the CPU.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    RowParallelLinear,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig,
    TransformerConfig,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

from megatron_rl.backend.context import gathered_places, own_chunks
from megatron_rl.backend.cpu.folding import FoldedSeqParams
from megatron_rl.backend.cpu.packed_attention import (
    Attention,
    PackedSelfAttention,
    attend,
    can_attend,
)
from megatron_rl.backend.cpu.pointwise import GatedMLP, RMSNorm

_SINK_DIMS = 8
"""Dimensions that sinks add to each head: kernels take multiples of 8."""


class CausalAttention(MegatronModule):
    """Causal core attention through torch's scaled_dot_product_attention.

    Grouped queries, an optional sliding window, trained sinks, packed sequences, context ranks; no
    dropout, no explicit mask.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise ValueError(
                f"attention mask {attn_mask_type} is not implemented on the CPU: only causal is"
            )
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        # Positions before its own that a query sees.
        windows = (config.window_size, config.window_attn_skip_freq)
        has_window = is_layer_window_attention(*windows, layer_number)
        self.window = config.window_size[0] if has_window else None
        self._context = pg_collection.cp if pg_collection is not None else None
        self._groups = pg_collection
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: FoldedSeqParams | None = None,
    ) -> Tensor:
        """Attend within each sequence.

        query is [length, batch, heads, dim] and the result [length, batch, heads * dim]; with
        packed sequences [tokens, heads, dim] and [tokens, heads * dim]. key and value have fewer
        heads when queries are grouped; a value may be narrower than a key. Context ranks share
        packed sequences alone.
        """
        assert attention_mask is None and attention_bias is None
        is_shared = self._context is not None and self._context.size() > 1
        if packed_seq_params is not None:
            attend = self._attend_shared if is_shared else self._attend_packed
            return attend(query, key, value, packed_seq_params)
        assert not is_shared, "context parallelism needs packed sequences"
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
        return self._attend(query, key, value).transpose(0, 1).flatten(2)

    def _attend_packed(
        self, query: Tensor, key: Tensor, value: Tensor, packed: FoldedSeqParams
    ) -> Tensor:
        if can_attend(query) and value.shape[-1] == query.shape[-1]:
            _, heads, dim = query.shape
            bounds = packed.cu_seqlens_q
            sizes = Attention(heads, key.shape[1], dim, self.scale, bounds, self.window)
            return attend(sizes, query, key, value, sinks=self.softmax_offset)
        parts = (tensor.split(packed.lengths) for tensor in (query, key, value))
        attended = [self._attend(q[None], k[None], v[None]) for q, k, v in zip(*parts, strict=True)]
        return torch.cat(attended, dim=1)[0].flatten(1)

    def _attend_shared(
        self, query: Tensor, key: Tensor, value: Tensor, packed: FoldedSeqParams
    ) -> Tensor:
        """The same where context ranks hold positions: own queries, the keys of all.

        `packed` is of whole sequences; the tensors hold `shard_positions` of them. The gradient of
        keys and values goes back to the ranks that they came from.
        """
        rank, ranks = self._context.rank(), self._context.size()
        gathered = gather_from_sequence_parallel_region(
            torch.cat([key, value], dim=2), group=self._context
        )
        order = gathered_places(packed.cu_seqlens_q, len(gathered), ranks)
        keys, values = gathered[order].split([key.shape[2], value.shape[2]], dim=2)
        pieces: list[tuple[int, int, int]] = []
        start = 0
        for whole in packed.lengths:
            length = whole // (2 * ranks)
            pieces += [
                (length, start, start + (chunk + 1) * length) for chunk in own_chunks(rank, ranks)
            ]
            start += whole
        queries = query.split([length for length, *_ in pieces])
        attended = [
            self._attend(own[None], keys[None, start:end], values[None, start:end])
            for own, (_, start, end) in zip(queries, pieces, strict=True)
        ]
        return torch.cat(attended, dim=1)[0].flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[batch, length, heads, dim] in and out; queries are the last positions of the keys."""
        dtype = query.dtype
        if query.device.type == "cpu":
            # torch 2.13's kernel takes four times as long in bfloat16 as in float32.
            query, key, value = query.float(), key.float(), value.float()
        mask = None
        length = key.shape[1]
        is_cut = self.window is not None and self.window + 1 < length
        if is_cut or query.shape[1] != length:
            positions = torch.arange(length, device=query.device)
            distance = positions[length - query.shape[1] :, None] - positions
            mask = distance >= 0
            if is_cut:
                mask &= distance <= self.window
        rows, width = query.shape[1], value.shape[3]
        if self.softmax_offset is not None:
            query, key, value, mask = self._with_sinks(query, key, value, mask)
        if mask is not None or query.dtype == torch.float32:
            # torch's CUDA kernel for a mask or float32 knows no grouped queries. Without it torch
            # keeps the scores of all pairs (sdp_utils.cpp: can_use_mem_efficient_attention).
            each = query.shape[2] // key.shape[2]
            key, value = (tensor.repeat_interleave(each, dim=2) for tensor in (key, value))
        attended = F.scaled_dot_product_attention(
            *(tensor.transpose(1, 2) for tensor in (query, key, value)),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        # Sinks add a row before the others, and dimensions after the others.
        return attended.transpose(1, 2)[:, -rows:, :, :width].to(dtype)

    def _with_sinks(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The same after one more key, whose score is the head's sink and whose value is zeros.

        A float mask would hold the scores of all heads and pairs. Instead, each head has more
        dimensions: the sink over the scale in a query, 1 in the new key, and 0 in all other keys.
        """
        assert self.softmax_offset is not None
        sinks = F.pad((self.softmax_offset / self.scale)[:, None], (0, _SINK_DIMS - 1))
        query = torch.cat([query, sinks.to(query.dtype).expand(*query.shape[:2], -1, -1)], dim=3)
        batch, length, groups, _ = key.shape
        marks = key.new_zeros(batch, length + 1, groups, _SINK_DIMS)
        marks[:, 0, :, 0] = 1
        key = torch.cat([F.pad(key, (0, 0, 0, 0, 1, 0)), marks], dim=3)
        # As wide as keys, which torch's fastest kernel asks for.
        value = F.pad(value, (0, _SINK_DIMS, 0, 0, 1, 0))
        if mask is not None:
            return query, key, value, F.pad(mask, (1, 0), value=True)
        # A query before all others sees the new key alone: attention stays causal without a mask.
        return F.pad(query, (0, 0, 0, 0, 1, 0)), key, value, None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Sinks in checkpoints, divided among tensor ranks, as Megatron's own layers write them."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=None if self._groups is None else self._groups.tp,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )


class WholeLinear(torch.nn.Module):
    """A product with a matrix that is whole on every tensor rank."""

    def __init__(self, inputs: int, outputs: int, config: MLATransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        # finalize_model_grads sums the gradients of marked parameters over the tensor group.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[..., outputs], and no bias that is left to add."""
        return F.linear(x, self.weight), None


class LatentAttention(MLASelfAttention):
    """Megatron's, with the projections to latents as in TransformerEngine's layers.

    Its local layers divide them among tensor ranks and gather the result. In megatron-core 0.16.1
    the gradient of the rotated keys would then be that of a rank's own heads alone.
    """

    config: MLATransformerConfig

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config.hidden_size, config.q_lora_rank, config)
        width = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = WholeLinear(config.hidden_size, width, config)


class ExpertOutput(RowParallelLinear):
    """The last product of an expert with biases.

    megatron-core 0.16.1 adds the bias in place (mlp.py), which autograd forbids with what the
    reduction over a single rank returns.
    """

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """[tokens, hidden], and the bias that is left to add."""
        output, bias = super().forward(input_)
        return output.clone(), bias


def block_spec(config: TransformerConfig, chunk: int) -> TransformerBlockSubmodules:
    """Megatron's local layers of one chunk, with the norms and the attention of this file."""
    layers = experts_of(config, chunk)
    specs = {experts: layer_spec(config, experts) for experts in set(layers)}
    return TransformerBlockSubmodules(
        layer_specs=[specs[experts] for experts in layers], layer_norm=RMSNorm
    )


def experts_of(config: TransformerConfig, chunk: int) -> list[int | None]:
    """The experts of each layer of one chunk; None for a dense layer."""
    first = get_transformer_layer_offset(config, chunk)
    layers = range(first, first + get_num_layers_to_build(config, chunk))
    pattern = config.moe_layer_freq
    if not isinstance(pattern, list):
        return [config.num_moe_experts for _ in layers]
    return [config.num_moe_experts if pattern[layer] else None for layer in layers]


def layer_spec(config: TransformerConfig, experts: int | None) -> ModuleSpec:
    """A layer with or without experts."""
    # get_gpt_layer_local_spec takes no provider of modules, so they are replaced afterwards.
    spec = get_gpt_layer_local_spec(
        num_experts=experts,
        normalization=config.normalization,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
    )
    layer = spec.submodules
    layer.input_layernorm = RMSNorm
    layer.pre_mlp_layernorm = RMSNorm
    if experts:
        # A norm before experts is fused with nothing, so that TransformerEngine's layers write it
        # to checkpoints under its own name; the local ones of megatron-core 0.16.1 do not.
        layer.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
        if config.add_bias_linear:
            layer.mlp.submodules.experts.submodules.linear_fc2 = ExpertOutput
    else:
        layer.sharded_state_dict_keys_map["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
        layer.mlp = GatedMLP
    attention = layer.self_attention.submodules
    attention.core_attention = CausalAttention
    if config.multi_latent_attention:
        _use_latents(layer)
        return spec
    layer.self_attention.module = PackedSelfAttention
    if config.qk_layernorm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    return spec


def _use_latents(submodules: Any) -> None:
    attention = submodules.self_attention
    attention.module = LatentAttention
    attention.submodules.q_layernorm = RMSNorm
    attention.submodules.kv_layernorm = RMSNorm
    # TransformerEngine's names in checkpoints, which Megatron sets for ordinary attention alone.
    submodules.sharded_state_dict_keys_map.update(
        {
            "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
            "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
        }
    )
