"""Digests notice what damages a payload, in host memory and as a device computes them."""

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.weights.memory import digests
from megatron_rl.weights.memory.digests import Digest, HostHash, WordSums, new_digest

CPU = torch.device("cpu")
BLOCK_WORDS = digests._BLOCK_WORDS
PAYLOAD = torch.randint(
    -(2**62), 2**62, (3 * BLOCK_WORDS + 5,), generator=torch.Generator().manual_seed(1)
).view(torch.uint8)
KINDS = ("host", "device")


def empty(kind: str) -> Digest:
    return HostHash() if kind == "host" else WordSums(CPU)


def digest(kind: str, *payloads: Tensor) -> list[int]:
    content = empty(kind)
    for payload in payloads:
        content.add(payload)
    return content.words().tolist()


def test_host_memory_gets_the_hash_and_devices_the_sums() -> None:
    assert isinstance(new_digest(CPU), HostHash)
    assert isinstance(new_digest(torch.device("meta")), WordSums)


def test_the_hash_is_that_of_all_bytes_in_order() -> None:
    expected = xxhash.xxh3_128_intdigest(PAYLOAD.numpy().tobytes()).to_bytes(16, "big")
    words = [int.from_bytes(expected[at : at + 8], "little", signed=True) for at in (0, 8)]
    assert digest("host", PAYLOAD[:8000], PAYLOAD[8000:]) == words


def test_the_sums_of_two_blocks_by_hand() -> None:
    words = torch.zeros(2 * BLOCK_WORDS, dtype=torch.int64)
    words[3], words[-1] = 5, 11
    # 5 at place 3 of block 0, 11 at place 4095 of block 1.
    weighted = 5 * (3 * digests._PLACE) + 11 * (1 + 4095 * digests._PLACE)
    assert digest("device", words.view(torch.uint8)) == [16, weighted]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None, derandomize=True)
@given(place=st.integers(0, 8 * PAYLOAD.nbytes - 1))
def test_every_flipped_bit_changes_the_digest(kind: str, place: int) -> None:
    damaged = PAYLOAD.clone()
    damaged[place // 8] ^= 1 << place % 8
    assert digest(kind, damaged) != digest(kind, PAYLOAD)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_exchanged_blocks_and_words_change_the_digest(kind: str, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([8, 1024, 8 * BLOCK_WORDS]))
    last = PAYLOAD.nbytes // size - 1
    one, other = data.draw(st.lists(st.integers(0, last), min_size=2, max_size=2, unique=True))
    damaged = PAYLOAD.clone()
    damaged[one * size : (one + 1) * size] = PAYLOAD[other * size : (other + 1) * size]
    damaged[other * size : (other + 1) * size] = PAYLOAD[one * size : (one + 1) * size]
    assert digest(kind, damaged) != digest(kind, PAYLOAD)


@pytest.mark.parametrize("kind", KINDS)
def test_payloads_that_took_each_others_place_change_the_digest(kind: str) -> None:
    first, second = PAYLOAD[: 8 * BLOCK_WORDS], PAYLOAD[8 * BLOCK_WORDS : 16 * BLOCK_WORDS]
    assert digest(kind, first, second) != digest(kind, second, first)
