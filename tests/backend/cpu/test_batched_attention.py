"""The batched attention against one sequence at a time, in plain matrix products."""

from types import ModuleType

import pytest
import torch

from tests.backend.cpu.site_modules import import_shim

HEADS, KV_HEADS, SIZE, SLOTS, REQUESTS, CONTEXT = 6, 2, 16, 3000, 20, 400


@pytest.fixture(scope="module")
def attention() -> ModuleType:
    """Loaded as SGLang's processes load it: from a folder that is no package of ours."""
    return import_shim("batched_attention")


def one_by_one(
    query: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    slots: list[torch.Tensor],
    query_lens: list[int],
) -> torch.Tensor:
    """Causal attention of each sequence's last query_lens tokens over its slots."""
    outputs, start = [], 0
    for mine, length in zip(slots, query_lens, strict=True):
        keys, values = (
            cache[mine].repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for cache in caches
        )
        scores = query[start : start + length].transpose(0, 1) @ keys.transpose(1, 2) / SIZE**0.5
        for row in range(length):
            scores[:, row, len(mine) - length + row + 1 :] = float("-inf")
        outputs.append((scores.softmax(-1) @ values).transpose(0, 1))
        start += length
    return torch.cat(outputs)


@pytest.mark.parametrize(
    ("query_lens", "key_lens"),
    [
        ([1] * 9, [1, 2, 300, 17, 18, 40, 399, 128, 129]),
        ([5, 1, 30, 90, 2, 2, 8], [5, 7, 30, 300, 2, 399, 9]),
        ([1], [1]),
    ],
)
def test_padded_batches_equal_one_sequence_at_a_time(
    attention: ModuleType, query_lens: list[int], key_lens: list[int]
) -> None:
    torch.manual_seed(0)
    caches = (torch.randn(SLOTS, KV_HEADS, SIZE), torch.randn(SLOTS, KV_HEADS, SIZE))
    table = torch.randint(1, SLOTS, (REQUESTS, CONTEXT), dtype=torch.int32)
    rows = torch.randperm(REQUESTS)[: len(key_lens)]
    query = torch.randn(sum(query_lens), HEADS, SIZE)
    output = torch.full_like(query, 7.0)
    for batch in attention.plan_attention(table, rows, query_lens, key_lens, query.dtype):
        attention.attend(batch, query, output, *caches, None)
    slots = [table[row, :length].long() for row, length in zip(rows, key_lens, strict=True)]
    torch.testing.assert_close(
        output, one_by_one(query, caches, slots, query_lens), atol=1e-5, rtol=0
    )


def test_batches_hold_every_sequence_once_and_only_similar_long_ones(attention: ModuleType) -> None:
    keys = [3, 100, 120, 129, 260, 257, 1000, 501, 64]
    batches = attention.split_by_length([1] * len(keys), keys)
    assert sorted(i for batch in batches for i in batch) == list(range(len(keys)))
    for batch in batches:
        longest, shortest = max(keys[i] for i in batch), min(keys[i] for i in batch)
        assert longest <= 128 or longest <= 2 * shortest
    assert len(batches) < len(keys)
