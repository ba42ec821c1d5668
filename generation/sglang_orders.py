"""What the engine tells the loader inside SGLang's ranks, by way of a file.

Shared by `sglang_engine.py` and `sglang_loader.py`; needs neither torch nor SGLang. SGLang hands a
loader nothing but pickled tensors; a file of ours keeps orders out of a pickle.
"""

import base64
import os
import pickle
from pathlib import Path

import msgspec

from megatron_rl.protocol.types import Receive

LOADER = "generation.sglang_loader.load"
ORDERS_VARIABLE = "MEGATRON_RL_ORDERS"
"""Variable of the server's environment: path of the file."""
NO_TENSORS = base64.b64encode(pickle.dumps([])).decode()
"""What SGLang wants for each rank: here a list of no tensors."""


class Nothing(msgspec.Struct, frozen=True, tag="Nothing"):
    """Do nothing: SGLang takes the name of a new version only with a call of the loader."""


Order = Receive | Nothing


def orders_path(log_path: Path) -> Path:
    """The file beside a server's log."""
    return log_path.with_suffix(".order.json")


def write_order(path: Path, order: Order) -> None:
    """Put an order in the file, at once."""
    staging = path.with_suffix(".partial")
    staging.write_bytes(msgspec.json.encode(order))
    os.replace(staging, path)


def read_order() -> Order:
    """The order, inside the server."""
    return msgspec.json.decode(Path(os.environ[ORDERS_VARIABLE]).read_bytes(), type=Order)
