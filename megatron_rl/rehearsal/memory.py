"""Bytes of tensors that live at once, by purpose. Sizes are those of torch's storages."""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_STEP = 1.001
"""The parts of a peak are copied when it has grown by this factor since the last copy."""


class Memory:
    """Storages of one device, from their first sight to their end."""

    def __init__(self) -> None:
        self.current = 0
        self.peak = 0
        self.peaks: Counter[str] = Counter()
        """By phase."""
        self.peak_parts: dict[str, int] = {}
        self.phase = ""
        self.purpose = ""
        """Of what is allocated now."""
        self._parts: Counter[str] = Counter()
        self._sizes: dict[int, int] = {}
        self._copied = 0

    def begin_again(self) -> None:
        """Look for the peaks from now on."""
        self.peak = self._copied = 0
        self.peaks.clear()

    @contextmanager
    def in_purpose(self, purpose: str) -> Iterator[None]:
        """What is allocated within has this purpose."""
        before, self.purpose = self.purpose, purpose
        try:
            yield
        finally:
            self.purpose = before

    def note(self, tensor: Tensor) -> None:
        """Count its storage, unless it is counted already."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._sizes:
            return
        self._sizes[key] = size
        purpose = self.purpose
        weakref.finalize(storage, self._free, key, purpose)
        self.current += size
        self._parts[purpose] += size
        if self.current > self.peaks[self.phase]:
            self.peaks[self.phase] = self.current
        if self.current > self.peak:
            self.peak = self.current
            if self.peak > self._copied * _STEP:
                self._copied = self.peak
                self.peak_parts = {k: v for k, v in self._parts.items() if v}

    def _free(self, key: int, purpose: str) -> None:
        size = self._sizes.pop(key)
        self.current -= size
        self._parts[purpose] -= size
