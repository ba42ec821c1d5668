"""Starts trainer ranks: `python -m megatron_rl.trainer.torchrun ARGUMENTS -m MODULE ...`.

torchrun itself, with one more rendezvous: `--rdzv-backend=run-address`. torchrun's own "static"
one listens on every interface (torch 2.11 to 2.14.1); this one on the endpoint's address alone.
"""

import sys
from datetime import timedelta
from typing import cast

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.run import main

from megatron_rl.weights.exchange.group import listen

BACKEND = "run-address"
"""Its name, as `phases.torchrun_arguments` gives it."""
_TIMEOUT_S = 600.0
"""As of the static rendezvous."""


class RunAddressRendezvous(RendezvousHandler):
    """Nodes with fixed numbers, which meet at a store of the first node."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        """parameters: with the endpoint and, in the configuration, this node's `rank`."""
        address, _, port = parameters.endpoint.rpartition(":")
        self._address, self._port = address.strip("[]"), int(port)
        self._rank, self._nodes = int(cast(str, parameters.get("rank"))), parameters.max_nodes
        self._run_id = parameters.run_id
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        """Name of the rendezvous."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Ranks use the store of this process."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all nodes. Raises torch's DistError when one does not come in time."""
        if self._store is None:
            is_first = self._rank == 0
            self._store = TCPStore(
                self._address,
                self._port,
                self._nodes,
                is_first,
                timeout=timedelta(seconds=_TIMEOUT_S),
                master_listen_fd=listen(self._address, self._port) if is_first else None,
            )
        store = PrefixStore(self._run_id, self._store)
        place = RendezvousStoreInfo(self._address, self._port)
        return RendezvousInfo(store, self._rank, self._nodes, place)

    def is_closed(self) -> bool:
        """It never closes."""
        return False

    def set_closed(self) -> None:
        """Nothing: the launcher ends all nodes."""

    def num_nodes_waiting(self) -> int:
        """Nodes have fixed numbers: none waits to be taken in."""
        return 0

    def get_run_id(self) -> str:
        """Id of the run, the same on all nodes."""
        return self._run_id

    def shutdown(self) -> bool:
        """The store ends with the process."""
        return True


if __name__ == "__main__":
    rendezvous_handler_registry.register(BACKEND, RunAddressRendezvous)
    main(sys.argv[1:])
