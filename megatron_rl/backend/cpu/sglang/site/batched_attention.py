"""Attention over all running sequences at once, for SGLang's torch_native backend.

Imported by SGLang's scheduler processes on the CPU. SGLang 0.5.23 loops over sequences in Python,
once a layer; here one loop in C++ reads keys and values where they lie. Without a compiler, and for
head sizes that the loop does not know, sequences of similar length share one padded gather from the
KV cache and one scaled_dot_product_attention. Either is planned once a forward pass.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from megatron_rl.backend.cpu.kernels import engine_loops

SHORT_TOKENS = 128
"""Sequences up to this length share a padded batch whatever their lengths."""
SCORES_MAX = 1 << 22
"""Attention scores (queries x keys) of one head in one padded batch; bounds the memory."""


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Sequences that attend in one call. Q, K: longest query and key count among them."""

    sequences: int
    query_rows: torch.Tensor  # [sequences * Q] int64, rows of the query; padding repeats a row
    is_real_query: torch.Tensor | None  # [sequences * Q] bool; None when there is no padding
    cache_slots: torch.Tensor  # [sequences * K] int64, slots of the KV cache
    mask: torch.Tensor | None  # [sequences, 1, Q, K], 0 or -inf; None: everything is visible


def split_by_length(query_lens: list[int], key_lens: list[int]) -> list[list[int]]:
    """Indices of sequences, in batches that waste little padding."""
    # Longest first, so that a batch's first member gives its size and later ones only add padding.
    order = sorted(range(len(key_lens)), key=lambda i: (query_lens[i], key_lens[i]), reverse=True)
    batches: list[list[int]] = []
    queries = longest = shortest = 0
    for i in order:
        if batches:
            longest, shortest = max(longest, key_lens[i]), min(shortest, key_lens[i])
            is_alike = longest <= max(SHORT_TOKENS, 2 * shortest) and queries <= 2 * query_lens[i]
            # Padded scores: every member counts with the longest queries and keys of the batch.
            scores = (len(batches[-1]) + 1) * queries * longest
            if is_alike and scores <= SCORES_MAX:
                batches[-1].append(i)
                continue
        batches.append([i])
        queries, longest, shortest = query_lens[i], key_lens[i], key_lens[i]
    return batches


def plan_attention(
    req_to_token: torch.Tensor,
    request_rows: torch.Tensor,
    query_lens: list[int],
    key_lens: list[int],
    dtype: torch.dtype,
) -> list[PaddedBatch]:
    """Padded batches of one forward pass.

    req_to_token: [requests, context] cache slot of each token; request_rows: [sequences] row of
    each sequence in it. The queries of a sequence are its last `query_lens` tokens, concatenated
    over sequences in order; it has `key_lens` keys.
    """
    first_rows = [0]
    for length in query_lens:
        first_rows.append(first_rows[-1] + length)
    plan = []
    for members in split_by_length(query_lens, key_lens):
        q_lens = torch.tensor([query_lens[i] for i in members])
        k_lens = torch.tensor([key_lens[i] for i in members])
        starts = torch.tensor([first_rows[i] for i in members])
        q_max, k_max = int(q_lens.max()), int(k_lens.max())
        q_index, k_index = torch.arange(q_max), torch.arange(k_max)
        is_real = q_index[None] < q_lens[:, None]
        # Padding repeats the last query: its result is computed and then thrown away.
        rows = starts[:, None] + torch.minimum(q_index[None], q_lens[:, None] - 1)
        slots = req_to_token[request_rows[torch.tensor(members)], :k_max].long()
        # Beyond a sequence's end the table holds another request's slots or none: stay inside.
        slots.masked_fill_(k_index[None] >= k_lens[:, None], 0)
        positions = (k_lens - q_lens)[:, None] + torch.minimum(q_index[None], q_lens[:, None] - 1)
        # Causal; and the padding of keys lies behind every query's position, so it is hidden too.
        is_visible = k_index[None, None] <= positions[:, :, None]
        # A mask as large as the scores would cost time and memory where nothing is hidden.
        mask = None
        if not bool(is_visible.all()):
            mask = torch.zeros(is_visible.shape, dtype=dtype)
            mask = mask.masked_fill_(~is_visible, float("-inf")).unsqueeze(1)
        plan.append(
            PaddedBatch(
                sequences=len(members),
                query_rows=rows.reshape(-1),
                is_real_query=None if bool(is_real.all()) else is_real.reshape(-1),
                cache_slots=slots.reshape(-1),
                mask=mask,
            )
        )
    return plan


def attend(
    batch: PaddedBatch,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scaling: float | None,
) -> None:
    """Write the attention of the batch's rows into `output`.

    query, output: [tokens, heads, head size]; k_cache, v_cache: [slots, KV heads, head size].
    """
    n, heads, kv_heads = batch.sequences, query.shape[1], k_cache.shape[1]
    keys = _gather(k_cache, batch, query.dtype)
    values = _gather(v_cache, batch, query.dtype)
    rows = query.index_select(0, batch.query_rows)
    q_max = rows.shape[0] // n
    if q_max == 1:
        # The query heads that share a KV head stand in for query positions: no KV is repeated.
        rows = rows.view(n, kv_heads, heads // kv_heads, -1)
        result = scaled_dot_product_attention(
            rows, keys, values, attn_mask=batch.mask, scale=scaling
        ).reshape(n, heads, -1)
    else:
        rows = rows.view(n, q_max, heads, -1).transpose(1, 2)
        share = heads // kv_heads
        result = (
            scaled_dot_product_attention(
                rows,
                keys.repeat_interleave(share, dim=1) if share > 1 else keys,
                values.repeat_interleave(share, dim=1) if share > 1 else values,
                attn_mask=batch.mask,
                scale=scaling,
            )
            .transpose(1, 2)
            .reshape(n * q_max, heads, -1)
        )
    if batch.is_real_query is None:
        output.index_copy_(0, batch.query_rows, result)
    else:
        output[batch.query_rows[batch.is_real_query]] = result[batch.is_real_query]


def _gather(cache: torch.Tensor, batch: PaddedBatch, dtype: torch.dtype) -> torch.Tensor:
    """[sequences, KV heads, K, head size] view of the cached keys or values."""
    slots, heads, size = cache.shape
    picked = cache.view(slots, heads * size).index_select(0, batch.cache_slots)
    return picked.view(batch.sequences, -1, heads, size).transpose(1, 2).to(dtype)


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
    """Where the requests of a forward pass lie, as the loop in C++ reads it."""
    return engine_loops.Requests(
        req_to_token if req_to_token.dtype == torch.int32 else req_to_token.to(torch.int32),
        request_rows.to(torch.int64).contiguous(),
        None if query_lens is None else query_lens.to(torch.int64).contiguous(),
        key_lens.to(torch.int64).contiguous(),
    )


def _run(
    self: Any, tensors: tuple[torch.Tensor, ...], lens: tuple[Any, Any], scaling: Any
) -> torch.Tensor:
    query, output, k_cache, v_cache, req_to_token, request_rows = tensors
    if can_loop(query, k_cache, v_cache):
        if self._attention_requests is None:
            self._attention_requests = locate(req_to_token, request_rows, *lens)
        engine_loops.attend(query, output, k_cache, v_cache, self._attention_requests, scaling)
        return output
    if self._attention_plan is None:
        query_lens, key_lens = lens
        self._attention_plan = plan_attention(
            req_to_token,
            request_rows,
            [1] * len(key_lens) if query_lens is None else query_lens.tolist(),
            key_lens.tolist(),
            query.dtype,
        )
    for batch in self._attention_plan:
        attend(batch, query, output, k_cache, v_cache, scaling)
    return output


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
        # SGLang calls this once a forward pass; the first layer then plans for all layers.
        self._attention_plan = self._attention_requests = None

    def decode(self: Any, *args: Any, scaling: Any = None, **options: Any) -> torch.Tensor:
        *tensors, seq_lens, encoder_lens = args
        if encoder_lens is not None or options.get("sliding_window_size") is not None:
            return loop_decode(self, *args, scaling=scaling, **options)
        return _run(self, tensors, (None, seq_lens), scaling)

    def extend(self: Any, *args: Any, scaling: Any = None, **options: Any) -> torch.Tensor:
        *tensors, seq_lens, _, extend_lens, encoder_lens = args
        if (
            encoder_lens is not None
            or options.get("sliding_window_size") is not None
            or not options.get("causal")
        ):
            return loop_extend(self, *args, scaling=scaling, **options)
        return _run(self, tensors, (extend_lens, seq_lens), scaling)

    backend.init_forward_metadata = init_forward_metadata
    backend._run_sdpa_forward_decode = decode
    backend._run_sdpa_forward_extend = extend
