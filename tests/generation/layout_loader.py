"""Custom weight loader that runs inside each rank of an SGLang server under test.

Compares the live parameters with the model folder, slice by slice, then overwrites them with those
of another folder. It reports to a file: SGLang ignores what a loader returns, and dies of what it
raises.
"""

import json
import os
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from generation.sglang_loader import derive, targets_of
from megatron_rl.backend.cpu import sglang as sglang_cpu
from megatron_rl.weights.folders.hf_folder import open_model
from megatron_rl.weights.layout.engine_checks import check_slices
from megatron_rl.weights.layout.engine_layout import engine_slices, expert_place, trained_parameters
from megatron_rl.weights.layout.slices import Share, as_matrix, local_part
from tests.generation.layout_models import shape_of

NAME = "tests.generation.layout_loader.load"
OLD, NEW, REPORTS = "LAYOUT_OLD", "LAYOUT_NEW", "LAYOUT_REPORTS"
"""Variables of the environment: two model folders and the folder of the reports."""


def load(model: torch.nn.Module, named_tensors: list[Any]) -> None:
    """Called by SGLang between the begin and the end of a weight update."""
    from sglang.srt.runtime_context import get_parallel

    ranks = get_parallel()
    report = Path(os.environ[REPORTS]) / f"{ranks.tp_rank}.json"
    try:
        values = exchange(model, Share(ranks.tp_rank, ranks.tp_size))
        derive(model)
    except Exception:  # noqa: BLE001 - the test reads it; the server is not to die of it
        values = {"error": traceback.format_exc()}
    report.write_text(json.dumps(values))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """A folder's tensors under the names of slices."""
    with ExitStack() as stack:
        found = open_model(folder, shape_of(folder), stack).text
        return {name: found[name][:] for name in found}


@torch.no_grad()
def exchange(model: torch.nn.Module, tensor: Share) -> dict[str, Any]:
    """What was compared with the old folder; the parameters are the new folder's afterwards."""
    old, new = Path(os.environ[OLD]), Path(os.environ[NEW])
    multiple = sglang_cpu.FFN_MULTIPLE if sglang_cpu.is_needed() else 1
    from sglang.srt.runtime_context import get_parallel

    expert = get_parallel().moe_ep_size
    slices = engine_slices(shape_of(old), tensor, expert_parallel=expert, ffn_multiple=multiple)
    parameters = targets_of(model)
    own = expert_place(tensor, expert)
    trained = trained_parameters(shape_of(old), parameters, own)
    check_slices(slices, trained, may_pad_ffn=multiple > 1)
    held, wanted = (tensors_of(folder) for folder in (old, new))
    different = []
    for part in slices:
        rows = slice(part.row, part.row + part.rows)
        columns = slice(part.column, part.column + part.columns)
        place = local_part(parameters, part)
        if not torch.equal(place.cpu(), as_matrix(held[part.hf])[rows, columns]):
            different.append(part.hf)
        place.copy_(as_matrix(wanted[part.hf])[rows, columns])
    elsewhere = "down_proj.bias" if own.units.rank else "no name"
    held = {name: one for name, one in held.items() if not name.endswith(elsewhere)}
    return {
        "different": different,
        "unused": sorted(set(held) - {part.hf for part in slices}),
        "elements": sum(part.size for part in slices),
        "parameters": {name: list(tensor.shape) for name, tensor in parameters.items()},
    }
