"""The product's loader inside each rank of an SGLang server; at each resume it saves all it holds.

What a test reads is `held-RANK.pt` beside the engine's order, and `frozen-RANK`: how many objects
of the rank's process are never looked through for garbage. Where a test left the file `wipe` there,
parameters are lost before slices come, as in memory that was released.
"""

import gc
import math
import os
from pathlib import Path
from typing import Any

import torch

from generation import sglang_loader
from generation.sglang_orders import ORDERS_VARIABLE, Nothing, read_order
from megatron_rl.protocol.types import Receive


def load(model: torch.nn.Module, named_tensors: list[Any]) -> None:
    """Called by SGLang between the begin and the end of a weight update."""
    folder = Path(os.environ[ORDERS_VARIABLE]).parent
    if isinstance(read_order().order, Receive) and (folder / "wipe").exists():
        for parameter in model.parameters():
            parameter.data.fill_(math.nan)
    sglang_loader.load(model, named_tensors)
    if isinstance(read_order().order, Nothing):
        from sglang.srt.runtime_context import get_parallel

        held = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        rank = get_parallel().tp_rank
        torch.save(held, folder / f"held-{rank}.pt")
        (folder / f"frozen-{rank}").write_text(str(gc.get_freeze_count()))
