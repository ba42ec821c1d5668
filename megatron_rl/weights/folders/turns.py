"""Trainer ranks that wait for rank 0 while it does what takes long, such as writing to a disk.

Runs on every trainer rank. A rank that waited in a collective would be ended after
`expert.train.collective_timeout_s`, on a device by the watchdog of its group; so it waits for a key
of the store by which the ranks met:

| key | set by | deleted by | says |
|---|---|---|---|
| `export/N/call/NAME/RANK` | rank 0 | the rank | send your slices of this tensor now |
| `export/N/over` | rank 0 | rank 0, when all have seen it | all is done |
"""

import functools
import itertools
from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_rl.protocol.wire import DeadlineExceeded

# All ranks count alike, because all take part in each export.
_exports = itertools.count()


class Turns:
    """What rank 0 tells the others, of one export."""

    def __init__(self, patience_s: float) -> None:
        """patience_s: how long rank 0 may keep the others waiting between two calls."""
        self._prefix = f"export/{next(_exports)}"
        self._patience_s = patience_s

    @functools.cached_property
    def _store(self) -> dist.Store:
        # A connection of its own: torch's threads use the other one, which a wait would keep. Made
        # when it is needed: rank 0 may be done with a rank that has nothing to send, and gone.
        store = distributed_c10d._get_default_store().clone()
        return dist.PrefixStore(self._prefix, store)

    def call(self, name: str, ranks: Iterable[int]) -> None:
        """On rank 0: let these send."""
        for rank in ranks:
            self._store.set(f"call/{name}/{rank}", b"")

    def await_call(self, name: str, rank: int) -> None:
        """On another rank: wait until rank 0 wants this tensor. Raises DeadlineExceeded."""
        key = f"call/{name}/{rank}"
        self._wait(key, f"ask for its slices of {name}")
        self._store.delete_key(key)

    def end(self) -> None:
        """Return when rank 0 has done everything. Every rank calls it. Raises DeadlineExceeded."""
        if dist.get_rank() == 0:
            self._store.set("over", b"")
        else:
            self._wait("over", "finish the export")
        # Short, as all are here: the store may lie in rank 0, which must not leave before.
        dist.barrier()
        if dist.get_rank() == 0:
            self._store.delete_key("over")

    def _wait(self, key: str, what: str) -> None:
        try:
            self._store.wait([key], timedelta(seconds=self._patience_s))
        except dist.DistStoreError as error:
            raise DeadlineExceeded(
                f"trainer rank 0 did not {what} within {self._patience_s:.0f} s"
            ) from error
