"""Fixes that every version of SGLang needs on the CPU: each function patches one of its modules.

Imported by SGLang's processes on the CPU. All other patches of this folder are for speed.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

NO_WINDOW = 1 << 30
"""Positions before its own that a query of a layer without a window sees."""


def install_choices(base: ModuleType) -> None:
    """Let `sglang.srt.state_capturer.base` keep the experts of each token in plain memory.

    SGLang 0.5.23 registers that memory with CUDA (--enable-return-routed-experts) on any device.
    """
    allocate = base.ALLOC_MEMORY_FUNCS["cpu"]

    def allocate_plain(dims: tuple[int, ...], *, pin_memory: bool, **options: Any) -> torch.Tensor:
        return allocate(dims, pin_memory=False, **options)

    # Host memory alone: without CUDA nobody asks for any other kind.
    base.ALLOC_MEMORY_FUNCS = {"cpu": allocate_plain}


def install_fp8(module: ModuleType) -> None:
    """Let the linear layers of `sglang.srt.layers.quantization.fp8` work on a CPU without AMX.

    SGLang has kernels for AMX alone. Weights are quantised as on a device without FP8, with one
    scale a matrix. Products take their values; activations are not quantised.
    """
    if module.cpu_has_amx_support():
        return

    def apply(
        self: Any, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight = (layer.weight.t().float() * layer.weight_scale).to(x.dtype)
        return F.linear(x, weight, bias)

    # SGLang 0.5.23 asserts AMX where it takes the device for a CPU.
    module._is_cpu = False
    module.Fp8LinearMethod.apply = apply


def install_latents(module: ModuleType) -> None:
    """Let DeepSeek's `attention_backend_handler` always attend to the cached latents.

    SGLang 0.5.23 computes the keys and values of all heads for a prompt without a cached prefix,
    and would then have this backend look for them in the cache, which holds latents.
    """
    module.AttentionBackendRegistry.register("torch_native", module._dispatch_mla_subtype)


def install_latent_rotary(module: ModuleType) -> None:
    """Let `sglang.srt.layers.rotary_embedding.factory` build DeepSeek's embedding without yarn.

    SGLang 0.5.23 knows it on the CPU with yarn alone.
    """
    wrapped = module.get_rope_wrapper

    def get_rope_wrapper(
        *args: Any, rope_scaling: Any = None, device: Any = None, **options: Any
    ) -> Any:
        if rope_scaling is None and device == "cpu":
            return module.get_rope(*args, **options)
        return wrapped(*args, rope_scaling=rope_scaling, device=device, **options)

    module.get_rope_wrapper = get_rope_wrapper


def install_sink_choice(module: ModuleType) -> None:
    """Let `sglang.srt.arg_groups.model_hook` accept torch_native for gpt-oss.

    SGLang 0.5.23 accepts backends by name, and looks at the names for nothing else there.
    """
    chosen = module.attention_backends_of
    module.attention_backends_of = lambda view: tuple(
        "triton" if name == "torch_native" else name for name in chosen(view)
    )


def install_sinks(module: ModuleType) -> None:
    """Let the layers of `sglang.srt.models.gpt_oss` attend with sinks, which torch_native lacks.

    A sink is one more key that every query of a head sees, with a trained score and a value of
    zeros.
    """
    from sglang.srt.layers.attention import torch_native_backend

    backend = torch_native_backend.TorchNativeAttnBackend
    attend = torch_native_backend.scaled_dot_product_attention
    for name in ("forward_extend", "forward_decode"):
        original = getattr(backend, name)
        setattr(backend, name, _taking_sinks(original, torch_native_backend, attend))
    build = module.GptOssAttention.__init__

    def build_attention(self: Any, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        # SGLang has them in bfloat16, whatever the model's dtype.
        self.sinks = torch.nn.Parameter(
            self.sinks.data.to(options["params_dtype"]), requires_grad=False
        )
        if self.attn.sliding_window_size < 0:
            # `batched_attention` knows no sinks, and leaves windows to SGLang's own loops.
            self.attn.sliding_window_size = NO_WINDOW

    module.GptOssAttention.__init__ = build_attention


def _taking_sinks(
    forward: Callable[..., torch.Tensor],
    module: ModuleType,
    attend: Callable[..., torch.Tensor],
) -> Callable[..., torch.Tensor]:
    """A method of the backend that takes `sinks` too."""

    @functools.wraps(forward)
    def run(self: Any, *args: Any, sinks: torch.Tensor | None = None, **options: Any) -> Any:
        if sinks is None:
            return forward(self, *args, **options)
        # SGLang's loops, which `forward` runs, call it once a sequence.
        module.scaled_dot_product_attention = functools.partial(_attend_with_sinks, attend, sinks)
        try:
            return forward(self, *args, **options)
        finally:
            module.scaled_dot_product_attention = attend

    return run


def _attend_with_sinks(
    attend: Callable[..., torch.Tensor],
    sinks: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """[1, heads, queries, dim]; attn_mask: [queries, keys], whether a query sees a key."""
    seen = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    last = sinks.to(query.dtype)[:, None, None].expand(-1, len(seen), 1)
    scores = torch.cat([seen.expand(len(sinks), -1, -1), last], dim=2)
    key, value = (F.pad(tensor, (0, 0, 0, 1)) for tensor in (key, value))
    return attend(query, key, value, attn_mask=scores[None], **options)
