"""Attention over all running sequences at once, for SGLang's torch_native backend.

Imported by SGLang's scheduler processes on the CPU. SGLang 0.5.23 loops over sequences in Python,
once a layer; here one loop in C++ reads keys and values in place. Without a compiler, and for head
sizes that the loop does not know, SGLang's own loops run.
"""

from types import ModuleType
from typing import Any

import torch

from megatron_rl.backend.cpu.kernels import engine_loops


def can_loop(query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether the loop in C++ takes these heads."""
    return (
        query.shape[2] == k_cache.shape[2] == v_cache.shape[2]
        and query.stride(1) == query.shape[2]
        and k_cache.is_contiguous()
        and v_cache.is_contiguous()
        and engine_loops.can_run(query, k_cache, v_cache)
        and engine_loops.are_available()
    )


def locate(
    req_to_token: torch.Tensor,
    request_rows: torch.Tensor,
    query_lens: torch.Tensor | None,
    key_lens: torch.Tensor,
) -> engine_loops.Requests:
    """Where the keys of the requests of a forward pass are.

    req_to_token: [requests, context] cache slot of each token; request_rows: [sequences] row of
    each sequence in it. The queries of a sequence are its last `query_lens` tokens; None: one each.
    """
    return engine_loops.Requests(
        req_to_token if req_to_token.dtype == torch.int32 else req_to_token.to(torch.int32),
        request_rows.to(torch.int64).contiguous(),
        None if query_lens is None else query_lens.to(torch.int64).contiguous(),
        key_lens.to(torch.int64).contiguous(),
    )


def install(module: ModuleType) -> None:
    """Replace the loops of `sglang.srt.layers.attention.torch_native_backend`.

    Encoders, cross attention and sliding windows keep SGLang's own loops.
    """
    backend = module.TorchNativeAttnBackend
    init_forward = backend.init_forward_metadata
    loop_decode = backend._run_sdpa_forward_decode
    loop_extend = backend._run_sdpa_forward_extend

    def init_forward_metadata(self: Any, forward_batch: Any) -> None:
        init_forward(self, forward_batch)
        # SGLang calls this once a forward pass; the first layer then locates requests for all.
        self._attention_requests = None

    def run(
        self: Any, tensors: list[torch.Tensor], lens: tuple[Any, Any], scaling: Any
    ) -> torch.Tensor:
        query, output, k_cache, v_cache, req_to_token, request_rows = tensors
        if self._attention_requests is None:
            self._attention_requests = locate(req_to_token, request_rows, *lens)
        engine_loops.attend(query, output, k_cache, v_cache, self._attention_requests, scaling)
        return output

    def is_plain(tensors: list[torch.Tensor], encoder_lens: Any, options: dict[str, Any]) -> bool:
        query, _, k_cache, v_cache, *_ = tensors
        return (
            encoder_lens is None
            and options.get("sliding_window_size") is None
            and can_loop(query, k_cache, v_cache)
        )

    def decode(self: Any, *args: Any, scaling: Any = None, **options: Any) -> torch.Tensor:
        *tensors, seq_lens, encoder_lens = args
        if not is_plain(tensors, encoder_lens, options):
            return loop_decode(self, *args, scaling=scaling, **options)
        return run(self, tensors, (None, seq_lens), scaling)

    def extend(self: Any, *args: Any, scaling: Any = None, **options: Any) -> torch.Tensor:
        *tensors, seq_lens, _, extend_lens, encoder_lens = args
        if not is_plain(tensors, encoder_lens, options) or not options.get("causal"):
            return loop_extend(self, *args, scaling=scaling, **options)
        return run(self, tensors, (extend_lens, seq_lens), scaling)

    backend.init_forward_metadata = init_forward_metadata
    backend._run_sdpa_forward_decode = decode
    backend._run_sdpa_forward_extend = extend


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
