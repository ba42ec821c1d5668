"""Digests of what travels between trainer and engine ranks, 128 bits as two int64.

Shared by trainer ranks and engines. Both ends keep their parameters in the same kind of memory, so
they choose the same digest: in host memory XXH3, one pass at the memory's speed; on a device sums
of words, which need no copy to the host.
"""

from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

WORDS = 2
_BLOCK_WORDS = 4096
_PLACE = 0x9E3779B1
"""Odd and above any count of blocks: no two words have the same weight."""


def digest(payload: Tensor) -> Tensor:
    """[2] int64, on the payload's device. payload: [bytes] uint8, a multiple of 8 of them."""
    return _xxh3(payload) if payload.device.type == "cpu" else word_sums(payload)


def fold(digests: Sequence[Tensor]) -> Tensor:
    """One digest of several in their order: [2] int64."""
    return digest(torch.cat(list(digests)).view(torch.uint8))


def _xxh3(payload: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(xxhash.xxh3_128_digest(payload.numpy())), dtype=torch.int64)


def word_sums(payload: Tensor) -> Tensor:
    """The sum of 64-bit words, and the same weighted by their block and their place in it.

    Both modulo 2^64. Any change of a single word changes the first, exchanged words change the
    second. payload: [bytes] uint8, whose last block may be short.
    """
    words = payload.view(torch.int64)
    count = words.numel() // _BLOCK_WORDS
    blocks, rest = words[: count * _BLOCK_WORDS], words[count * _BLOCK_WORDS :]
    blocks = blocks.view(count, _BLOCK_WORDS)
    by_block = torch.cat([blocks.sum(1), rest.sum().unsqueeze(0)])
    by_place = blocks.sum(0)
    by_place[: rest.numel()] += rest
    return torch.stack([by_block.sum(), _weighted(by_block) + _PLACE * _weighted(by_place)])


def _weighted(sums: Tensor) -> Tensor:
    return (sums * torch.arange(sums.numel(), device=sums.device)).sum()
