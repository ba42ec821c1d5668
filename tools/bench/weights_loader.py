"""Takes the parcels of tools.bench.weights inside every rank of its SGLang servers.

Stands in the place of the product's loader. Under an exchange whose name begins with that of one of
weights_exchanges.py it receives as that one does.
Each transfer leaves a line beside the server's log: how much the process grew meanwhile.
"""

import functools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from generation import sglang_loader
from generation.sglang_orders import ORDERS_VARIABLE, read_order
from megatron_rl.protocol.types import Receive
from megatron_rl.weights.exchange import engine_rank
from megatron_rl.weights.exchange.engine_rank import EngineRank
from megatron_rl.weights.exchange.parcels import receive
from tools.bench.measuring import start_peak, status_bytes
from tools.bench.weights_exchanges import RECEIVE


def load(model: torch.nn.Module, named_tensors: list[Any]) -> None:
    """Obey the engine's order."""
    order = read_order().order
    if not isinstance(order, Receive):
        return
    path = Path(os.environ[ORDERS_VARIABLE])
    with noted_growth(path.with_suffix(f".growth-{os.getpid()}.jsonl"), order.group_name):
        method = order.group_name.partition("-")[0]
        with patch.object(engine_rank, "receive", RECEIVE.get(method, receive)):
            _rank(model, method).obey(order)


@functools.cache
def _rank(model: torch.nn.Module, method: str) -> EngineRank:
    """The product's, one a method: each keeps its group between the turns of the others."""
    return sglang_loader._rank.__wrapped__(model)


@contextmanager
def noted_growth(path: Path, name: str) -> Iterator[None]:
    """Append {"name", "bytes"} to a file: how much this process grew at most meanwhile."""
    start_peak()
    before = status_bytes("VmRSS")
    yield
    with path.open("a") as file:
        file.write(json.dumps({"name": name, "bytes": status_bytes("VmHWM") - before}) + "\n")
