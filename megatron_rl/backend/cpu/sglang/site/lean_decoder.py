"""The layers of a plain decoder in as few calls as they need.

Imported by SGLang's scheduler processes on the CPU. SGLang 0.5.23 leads each layer through modules,
boundaries and backends that choose among devices and parallel layouts: a tenth of a decode step.
Here Llama and Qwen2 models whose layers are plain, on one rank, go from product to product; all
others keep SGLang's path, which computes the same.
"""

from types import ModuleType
from typing import Any

import batched_attention
import torch
from fused_layers import can_rotate, is_plain_norm
from packed_linear import multiply

from megatron_rl.backend.cpu.kernels import engine_loops


def install_llama(module: ModuleType) -> None:
    """Let `sglang.srt.models.llama` run plain models here."""
    _install(module.LlamaModel, module.LlamaDecoderLayer)


def install_qwen2(module: ModuleType) -> None:
    """Let `sglang.srt.models.qwen2` run plain models here."""
    _install(module.Qwen2Model, module.Qwen2DecoderLayer)


def _install(model_type: type, layer_type: type) -> None:
    forward = model_type.forward

    def lean_or_forward(
        self: Any,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        if (
            input_embeds is None
            and pp_proxy_tensors is None
            and not self.layers_to_capture
            and is_plain_batch(forward_batch)
            and is_plain_model(self, model_type, layer_type)
        ):
            from sglang.srt.model_executor.forward_context import get_attn_backend

            backend = get_attn_backend()
            if can_attend(self.layers[0].self_attn, backend, positions):
                return run(self, input_ids, positions, forward_batch, backend)
        return forward(
            self, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors
        )  # fmt: skip

    if engine_loops.are_available():
        model_type.forward = lean_or_forward


def is_plain_batch(forward_batch: Any) -> bool:
    """Whether it decodes or extends requests of text, on this rank alone."""
    mode = forward_batch.forward_mode
    return (
        (mode.is_decode() or mode.name == "EXTEND")
        and forward_batch.spec_info is None
        and forward_batch.encoder_lens is None
        and forward_batch.global_num_tokens_cpu is None
        and forward_batch.input_ids.shape[0] > 0
    )


def is_plain_model(model: Any, model_type: type, layer_type: type) -> bool:
    """Whether `run` computes what SGLang would; found out once."""
    known = model.__dict__.get("_is_plain_model")
    if known is None:
        from sglang.srt.runtime_context import get_parallel

        known = (
            type(model) is model_type
            and get_parallel().tp_size == 1
            and model.pp_group.world_size == 1
            and all(type(layer) is layer_type and is_plain_layer(layer) for layer in model.layers)
            and is_plain_norm(model.norm)
            and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        )
        model.__dict__["_is_plain_model"] = known
    return known


def is_plain_layer(layer: Any) -> bool:
    """Whether products, norms, rotation and attention of a layer are the usual ones."""
    attention, mlp = layer.self_attn, layer.mlp
    radix = attention.attn
    weight = layer.input_layernorm.weight
    return (
        all(
            type(linear.quant_method).__name__ == "UnquantizedLinearMethod"
            and linear.weight.dtype == weight.dtype
            and not linear.skip_bias_add
            for linear in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
        )
        and all(
            type(norm).__name__ == "RMSNorm"
            and is_plain_norm(norm)
            and engine_loops.can_run(norm.weight)
            and norm.weight.shape[0] <= engine_loops.WIDTH_MAX
            for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        )
        and type(mlp.act_fn).__name__ == "SiluAndMul"
        and mlp.down_proj.weight.shape[1] % engine_loops.WIDTH_MULTIPLE == 0
        and not hasattr(attention, "q_norm")
        and is_plain_rotation(attention.rotary_emb)
        and type(radix).__name__ == "RadixAttention"
        and radix.sliding_window_size <= -1
        and not radix.is_cross_attention
        and radix.attn_type.value == "decoder"
        and radix.qk_head_dim == radix.v_head_dim == attention.head_dim
    )


def is_plain_rotation(rotary: Any) -> bool:
    """Whether a layer has the usual rotary embedding, which the loops replace."""
    native = getattr(type(rotary), "forward_native", None)
    return getattr(native, "__qualname__", "").startswith("install_rotary")


def can_attend(attention: Any, backend: Any, positions: torch.Tensor) -> bool:
    """Whether the loops know this cache of keys and values."""
    pool = backend.token_to_kv_pool
    if type(backend).__name__ != "TorchNativeAttnBackend" or (
        type(pool).__name__ != "MHATokenToKVPool" or pool.is_quantized_kv_cache
    ):
        return False
    keys, values = pool.get_kv_buffer(attention.attn.layer_id)
    heads, size = attention.num_heads, attention.head_dim
    query = torch.empty(1, heads, size, dtype=attention.qkv_proj.weight.dtype)
    return batched_attention.can_loop(query, keys, values) and can_rotate(
        attention.rotary_emb, positions, query.view(1, -1)
    )


def run(
    model: Any,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: Any,
    backend: Any,
) -> torch.Tensor:
    """[tokens, hidden size] normalised output of the last layer."""
    is_decode = forward_batch.forward_mode.is_decode()
    requests = batched_attention.locate(
        backend.req_to_token_pool.req_to_token,
        forward_batch.req_pool_indices,
        None if is_decode else forward_batch.extend_seq_lens,
        forward_batch.seq_lens,
    )
    slots = forward_batch.out_cache_loc.to(torch.int64).contiguous()
    hidden = model.embed_tokens(input_ids)
    residual = None
    for layer in model.layers:
        norm = layer.input_layernorm
        x = engine_loops.add_norm(hidden, residual, norm.weight, norm.variance_epsilon)
        # The loops add to it in place; nobody else holds the embeddings.
        residual = hidden if residual is None else residual
        pools = backend.token_to_kv_pool.get_kv_buffer(layer.self_attn.attn.layer_id)
        attended = _attend(layer.self_attn, x, positions, pools, slots, requests)
        norm = layer.post_attention_layernorm
        x = engine_loops.add_norm(attended, residual, norm.weight, norm.variance_epsilon)
        mlp = layer.mlp
        gate_up = multiply(mlp.gate_up_proj, x, mlp.gate_up_proj.bias)
        hidden = multiply(mlp.down_proj, engine_loops.silu_multiply(gate_up), mlp.down_proj.bias)
    return engine_loops.add_norm(hidden, residual, model.norm.weight, model.norm.variance_epsilon)


def _attend(
    attention: Any,
    x: torch.Tensor,
    positions: torch.Tensor,
    pools: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    requests: engine_loops.Requests,
) -> torch.Tensor:
    size, rotary = attention.head_dim, attention.rotary_emb
    qkv = multiply(attention.qkv_proj, x, attention.qkv_proj.bias)
    # Queries and keys lie side by side: heads of one size, turned alike.
    turned = attention.q_size + attention.kv_size
    engine_loops.rotate(qkv[:, :turned], size, rotary.cos_sin_cache, positions)
    heads = qkv.view(qkv.shape[0], -1, size)
    first, second = attention.num_heads, attention.num_heads + attention.num_kv_heads
    engine_loops.store(heads[:, first:second], heads[:, second:], *pools, slots)
    output = torch.empty(qkv.shape[0], first, size, dtype=qkv.dtype)
    engine_loops.attend(heads[:, :first], output, *pools, requests, attention.attn.scaling)
    return multiply(attention.o_proj, output.view(qkv.shape[0], -1), attention.o_proj.bias)
