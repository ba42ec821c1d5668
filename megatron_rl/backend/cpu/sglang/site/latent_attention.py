"""Latent attention of DeepSeek's models in SGLang's torch_native backend.

Imported by SGLang's scheduler processes on the CPU.
"""

from types import ModuleType
from typing import Any


def install(module: ModuleType) -> None:
    """Let `attention_backend_handler` attend to the cached latents in every forward pass.

    SGLang 0.5.23 computes the keys and values of all heads for a prompt without a cached prefix,
    and would then have this backend look for them in the cache, which holds latents.
    """
    module.AttentionBackendRegistry.register("torch_native", module._dispatch_mla_subtype)


def install_rotary(module: ModuleType) -> None:
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
