"""Digests notice what damages a payload, in host memory and as a device computes them."""

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.weights.exchange import packets as digests
from megatron_rl.weights.exchange.packets import digest, fold, word_sums

BLOCK_WORDS = digests._BLOCK_WORDS
PAYLOAD = torch.randint(
    -(2**62), 2**62, (3 * BLOCK_WORDS + 5,), generator=torch.Generator().manual_seed(1)
).view(torch.uint8)
KINDS = ("host", "device")


def words(kind: str, payload: Tensor) -> list[int]:
    return (digest if kind == "host" else word_sums)(payload).tolist()


def test_host_memory_gets_the_hash_and_devices_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "word_sums", lambda payload: payload.device.type)
    assert digest(PAYLOAD.to("meta")) == "meta"
    expected = xxhash.xxh3_128_intdigest(PAYLOAD.numpy().tobytes()).to_bytes(16, "big")
    halves = [int.from_bytes(expected[at : at + 8], "little", signed=True) for at in (0, 8)]
    assert words("host", PAYLOAD) == halves


def test_the_sums_of_two_blocks_by_hand() -> None:
    payload = torch.zeros(2 * BLOCK_WORDS + 3, dtype=torch.int64)
    payload[3], payload[2 * BLOCK_WORDS - 1], payload[-1] = 5, 11, 7
    # 5 at place 3 of block 0, 11 at place 4095 of block 1, 7 at place 2 of the rest.
    place = digests._PLACE
    weighted = 5 * (3 * place) + 11 * (1 + 4095 * place) + 7 * (2 + 2 * place)
    assert words("device", payload.view(torch.uint8)) == [23, weighted]
    assert words("device", payload[:0].view(torch.uint8)) == [0, 0]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None, derandomize=True)
@given(place=st.integers(0, 8 * PAYLOAD.nbytes - 1))
def test_every_flipped_bit_changes_the_digest(kind: str, place: int) -> None:
    damaged = PAYLOAD.clone()
    damaged[place // 8] ^= 1 << place % 8
    assert words(kind, damaged) != words(kind, PAYLOAD)


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
    assert words(kind, damaged) != words(kind, PAYLOAD)


@pytest.mark.parametrize("kind", KINDS)
def test_digests_that_took_each_others_place_change_the_digest(kind: str) -> None:
    first, second = PAYLOAD[: 8 * BLOCK_WORDS], PAYLOAD[8 * BLOCK_WORDS : 16 * BLOCK_WORDS]
    digests_of = [torch.tensor(words(kind, each)).view(torch.uint8) for each in (first, second)]
    there, back = torch.cat(digests_of), torch.cat(digests_of[::-1])
    assert words(kind, there) != words(kind, back)
    assert words(kind, torch.cat([first, second])) != words(kind, torch.cat([second, first]))


def test_digests_that_took_each_others_place_fold_to_another() -> None:
    first, second = digest(PAYLOAD[:8000]), digest(PAYLOAD[8000:])
    both = torch.cat([first, second]).view(torch.uint8)
    assert fold([first, second]).tolist() == digest(both).tolist()
    assert fold([second, first]).tolist() != fold([first, second]).tolist()
