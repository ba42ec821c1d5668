"""Host memory for the experts of each token, without CUDA.

Imported by SGLang's processes on the CPU. SGLang 0.5.23 keeps the choices of routers in memory that
it registers with CUDA (--enable-return-routed-experts), whatever the device.
"""

from types import ModuleType
from typing import Any

import torch


def install(base: ModuleType) -> None:
    """Let `sglang.srt.state_capturer.base` allocate plain memory."""
    allocate = base.ALLOC_MEMORY_FUNCS["cpu"]

    def allocate_plain(dims: tuple[int, ...], *, pin_memory: bool, **options: Any) -> torch.Tensor:
        return allocate(dims, pin_memory=False, **options)

    # Host memory alone: without CUDA nobody asks for any other kind.
    base.ALLOC_MEMORY_FUNCS = {"cpu": allocate_plain}
