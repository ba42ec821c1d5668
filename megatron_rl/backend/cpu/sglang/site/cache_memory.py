"""Where SGLang keeps keys, values and the choices of experts on the CPU.

Imported by SGLang's scheduler processes on the CPU.
"""

from types import ModuleType
from typing import Any

import torch


def install_sorted(module: ModuleType) -> None:
    """Let the allocator of `sglang.srt.mem_cache.allocator.token` sort freed slots of the cache.

    SGLang 0.5.23 hands slots out in the order in which they were freed. After some hundreds of
    requests that order is random, tokens of one step lie apart, and attention, which waits for
    memory, slows down. SGLang sorts only when slots run short.
    """
    allocator = module.TokenToKVPoolAllocator
    init = allocator.__init__

    def init_sorting(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.need_sort = True

    allocator.__init__ = init_sorting


def install_unpinned(base: ModuleType) -> None:
    """Let `sglang.srt.state_capturer.base` keep the experts of each token in plain memory.

    SGLang 0.5.23 registers that memory with CUDA (--enable-return-routed-experts) on any device.
    """
    allocate = base.ALLOC_MEMORY_FUNCS["cpu"]

    def allocate_plain(dims: tuple[int, ...], *, pin_memory: bool, **options: Any) -> torch.Tensor:
        return allocate(dims, pin_memory=False, **options)

    # Host memory alone: without CUDA nobody asks for any other kind.
    base.ALLOC_MEMORY_FUNCS = {"cpu": allocate_plain}
