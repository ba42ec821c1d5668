"""Digests of what travels between trainer and engine ranks, 128 bits as two int64.

Shared by trainer ranks and engines. Both ends keep their parameters in the same kind of memory, so
they choose the same digest: in host memory XXH3, one pass at the memory's speed; on a device sums
of words, which need no copy to the host.
"""

from typing import Protocol

import torch
import xxhash
from torch import Tensor

WORDS = 2
_BLOCK_WORDS = 4096
_PLACE = 0x9E3779B1
"""Odd and above any count of blocks: no two words have the same weight."""


class Digest(Protocol):
    """Of payloads that are taken in one after the other."""

    def add(self, payload: Tensor) -> None:
        """Take in [bytes] uint8, a multiple of 8 of them."""

    def words(self) -> Tensor:
        """[2] int64, on the device of the payloads."""


def new_digest(device: torch.device) -> Digest:
    """An empty digest for payloads on the device."""
    return HostHash() if device.type == "cpu" else WordSums(device)


class HostHash:
    """XXH3 of the bytes one after the other; payloads in host memory."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def add(self, payload: Tensor) -> None:
        """Take in [bytes] uint8."""
        self._hash.update(payload.numpy())

    def words(self) -> Tensor:
        """[2] int64."""
        return torch.frombuffer(bytearray(self._hash.digest()), dtype=torch.int64)


class WordSums:
    """The sum of 64-bit words, and the same weighted by their block and their place in it.

    Both modulo 2^64. Any change of a single word changes the first, exchanged words change the
    second.
    """

    def __init__(self, device: torch.device) -> None:
        self._by_block: list[Tensor] = []
        self._by_place = torch.zeros(_BLOCK_WORDS, dtype=torch.int64, device=device)

    def add(self, payload: Tensor) -> None:
        """Take in [bytes] uint8. The last block of a payload may be short."""
        words = payload.view(torch.int64)
        whole = words.numel() // _BLOCK_WORDS * _BLOCK_WORDS
        if whole:
            blocks = words[:whole].view(-1, _BLOCK_WORDS)
            self._by_block.append(blocks.sum(1))
            self._by_place += blocks.sum(0)
        rest = words[whole:]
        self._by_block.append(rest.sum().unsqueeze(0))
        self._by_place[: rest.numel()] += rest

    def words(self) -> Tensor:
        """[2] int64."""
        by_block = torch.cat(self._by_block)
        weighted = _weighted(by_block) + _PLACE * _weighted(self._by_place)
        return torch.stack([by_block.sum(), weighted])


def _weighted(sums: Tensor) -> Tensor:
    return (sums * torch.arange(sums.numel(), device=sums.device)).sum()
