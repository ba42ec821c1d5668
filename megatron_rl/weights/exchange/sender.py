"""One trainer rank's sending, as rank 0 calls for it in the store.

Runs in one thread of each trainer rank. No other thread uses its store, groups or buffers, and the
parameters do not change before its weight sync has ended.

| key | set by | says |
|---|---|---|
| `prepared/N/RANK` | sender | "" when it waits for call N, else why it cannot send |
| `go/N` | rank 0 | a `Round`: a transfer, or none, or the end of the weight sync |
| `failed/N` | any rank that fails in that transfer | why; the last one's reason stays |
"""

import logging
from collections.abc import Mapping
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from megatron_rl.weights.exchange.folder_transport import FolderEnd
from megatron_rl.weights.exchange.group import Patience
from megatron_rl.weights.exchange.lanes import Lanes
from megatron_rl.weights.exchange.parcels import Ends, send
from megatron_rl.weights.exchange.plan import Plan
from megatron_rl.weights.exchange.transport import Buffers, Round, Transport

log = logging.getLogger(__name__)


def prepared_key(number: int, rank: int) -> str:
    """See the module's table."""
    return f"prepared/{number}/{rank}"


def go_key(number: int) -> str:
    """See the module's table. Engine ranks wait for it too."""
    return f"go/{number}"


def failed_key(number: int) -> str:
    """See the module's table."""
    return f"failed/{number}"


class Sender:
    """This rank's end of all transfers."""

    def __init__(
        self,
        store: dist.TCPStore,
        *,
        rank: int,
        backend: str,
        dtype: torch.dtype,
        device: torch.device,
        patience_s: float,
        folder: FolderEnd | None = None,
    ) -> None:
        """dtype: of elements on the wire. patience_s: of a wait for rank 0's next call.

        folder: with the backend FOLDER.
        """
        self._store, self._rank, self._backend = store, rank, backend
        self._dtype, self._device, self._patience_s = dtype, device, patience_s
        self._folder = folder
        self._buffers = Buffers()
        self._lanes: dict[str, tuple[tuple[str, ...], Lanes]] = {}
        """By group: its generators, and this rank's lanes."""
        self._calls = 0
        self.peak_bytes = 0
        """Most memory of buffers that this rank has needed."""

    def serve(
        self, prepared: Mapping[int, Ends], plans: Mapping[int, Plan], *, fault: str = ""
    ) -> None:
        """Send what rank 0 calls for until the weight sync is over.

        prepared: by number of layouts, see `outgoing`. plans: likewise. fault: why there is nothing
        to send; rank 0 then calls for no transfer.
        """
        try:
            self._store.set(prepared_key(self._calls, self._rank), fault)
            while not (order := self._next_call()).is_end:
                if order.replicas and (reason := self._send(order, prepared, plans)):
                    self._store.set(failed_key(order.attempt), reason)
        except dist.DistError as error:
            # Rank 0 is gone.
            log.warning("no more calls for a transfer: %s", error)

    def _next_call(self) -> Round:
        self._store.set_timeout(timedelta(seconds=self._patience_s))
        order = msgspec.json.decode(self._store.get(go_key(self._calls)), type=Round)
        self._calls += 1
        return order

    def _send(self, order: Round, prepared: Mapping[int, Ends], plans: Mapping[int, Plan]) -> str:
        """This rank's part of a transfer; why it failed."""
        patience = order.patience()
        try:
            peak_bytes = send(
                prepared[order.layouts],
                self._open(order, plans[order.layouts], patience),
                dtype=self._dtype,
                version=order.version,
                patience=patience,
            )
            self.peak_bytes = max(self.peak_bytes, peak_bytes)
        except RuntimeError as error:
            # Also torch's DistError of a store, a group or a collective is a RuntimeError. Engine
            # ranks that wait for this one fail when its connections close.
            self._close(order.group)
            return f"trainer rank {self._rank} could not send: {error}"
        return ""

    def _open(self, order: Round, plan: Plan, patience: Patience) -> Transport:
        if self._folder is not None:
            return self._folder.open(order, self._rank, self._device, self._buffers)
        return self._lanes_of(order, plan).open(order, self._backend, self._device, patience)

    def _lanes_of(self, order: Round, plan: Plan) -> Lanes:
        if order.group not in self._lanes:
            # An engine is in one group at a time: it leaves the old one for the new one.
            for name in order.replicas:
                self.forget(name)
            lanes = Lanes(self._store, plan, self._rank, self._buffers)
            self._lanes[order.group] = order.replicas, lanes
        return self._lanes[order.group][1]

    def _close(self, group: str) -> None:
        if group in self._lanes:
            self._lanes.pop(group)[1].close()

    def forget(self, replica: str) -> None:
        """Leave all groups with a generator. Never while `serve` runs in another thread."""
        for group, (replicas, _) in list(self._lanes.items()):
            if replica in replicas:
                self._close(group)

    def close(self) -> None:
        """Leave all groups."""
        for group in list(self._lanes):
            self._close(group)
        if self._folder is not None:
            self._folder.clear()
