"""Slots of the KV cache in ascending order, so that tokens of one step lie side by side.

Imported by SGLang's scheduler processes on the CPU. SGLang 0.5.23 hands slots out in the order in
which they were freed. After some hundreds of requests that order is random, and attention, which
waits for memory, takes the longer. It can sort them when they run short, and does so for other
reasons on servers that only fill caches.
"""

from types import ModuleType
from typing import Any


def install(module: ModuleType) -> None:
    """Let the allocator of `sglang.srt.mem_cache.allocator.token` sort what was freed."""
    allocator = module.TokenToKVPoolAllocator
    init = allocator.__init__

    def init_sorting(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.need_sort = True

    allocator.__init__ = init_sorting
