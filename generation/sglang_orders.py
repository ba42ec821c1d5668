"""Orders of the engine to the loader inside SGLang's ranks, in a file.

Shared by `sglang_engine.py` and `sglang_loader.py`; needs neither torch nor SGLang. SGLang passes a
loader only pickled tensors; the file keeps orders out of a pickle.
"""

import base64
import os
import pickle
import time
from pathlib import Path

import msgspec

from megatron_rl.protocol.types import Receive

LOADER = "generation.sglang_loader.load"
ORDERS_VARIABLE = "MEGATRON_RL_ORDERS"
"""Variable of the server's environment: path of the file."""
NO_TENSORS = base64.b64encode(pickle.dumps([])).decode()
"""The tensors that SGLang passes to each rank: an empty list."""


class Nothing(msgspec.Struct, frozen=True, tag="Nothing"):
    """Do nothing: SGLang takes a new version only with a call of the loader."""


class Keep(msgspec.Struct, frozen=True, tag="Keep"):
    """Copy to the host's memory what no weight sync sends: it is lost when memory is released."""


Order = Receive | Nothing | Keep
VISIBLE_S = 60.0
"""Seconds within which a shared file system shows a write to another node."""
_LOOK_S = 0.05


class Numbered(msgspec.Struct, frozen=True):
    """An order; later ones have higher numbers."""

    number: int
    order: Order


def orders_path(log_path: Path) -> Path:
    """The file beside a server's log."""
    return log_path.with_suffix(".order.json")


def write_order(path: Path, order: Order) -> None:
    """Write an order to the file, atomically."""
    staging = path.with_suffix(".partial")
    before = _read(path)
    number = before.number + 1 if before is not None else 1
    staging.write_bytes(msgspec.json.encode(Numbered(number, order)))
    os.replace(staging, path)


def _read(path: Path) -> Numbered | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Numbered)
    except FileNotFoundError:
        return None


def read_order(after: int = 0, patience_s: float = VISIBLE_S) -> Numbered:
    """The order, inside the server. Raises TimeoutError.

    after: number of the last order obeyed. A rank on another node than the engine may still see
    that order, or no file: it waits for the next.
    """
    path = Path(os.environ[ORDERS_VARIABLE])
    ends_at = time.monotonic() + patience_s
    while True:
        found = _read(path)
        if found is not None and found.number > after:
            return found
        if time.monotonic() > ends_at:
            raise TimeoutError(f"no new order in {path} for {patience_s:.0f} s")
        time.sleep(_LOOK_S)
