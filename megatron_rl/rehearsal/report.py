"""Prints a rehearsal, for people or for programs."""

import json
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from megatron_rl.cli.command_line.printing import say, show_table
from megatron_rl.config.gpus import GIB
from megatron_rl.rehearsal.events import PASSES
from megatron_rl.rehearsal.rehearse import Rehearsal, Stage

MAX_COLUMNS = 4
_GROUPS = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tensor",
    "CONTEXT_PARALLEL_GROUP": "context",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pipeline",
    "EXPERT_MODEL_PARALLEL_GROUP": "expert",
    "DATA_PARALLEL_GROUP_WITH_CP": "data",
    "EXPERT_DATA_PARALLEL_GROUP": "data",
    "WEIGHT_SYNC_LANE": "weight sync",
    "SHARED_MEMORY": "weight sync",
}
"""Megatron's description of a group -> dimension; others come to "all"."""


def print_rehearsal(found: Rehearsal, console: Console, *, as_json: bool) -> None:
    """Figures of each stage, then problems and notes."""
    if as_json:
        console.print(json.dumps(as_tree(found), indent=2), markup=False, soft_wrap=True)
        return
    title = (
        f"{len(found.ranks)} of {found.world_size} ranks, {len(found.engine_ranks)} of engines, "
        f"{found.microbatches} microbatches of {found.tokens:,} tokens, {found.seconds:.0f} s"
    )
    stages = (Column(f"stage {stage.number}", justify="right") for stage in _shown(found))
    table = Table(Column("quantity", no_wrap=True), *stages, title=title, title_justify="left")
    for name, values in _rows(found):
        table.add_row(name, *values)
    show_table(console, table)
    for text in found.problems:
        say(console, f"problem: {text}")
    for text in found.notes:
        say(console, f"note: {text}")
    if not found.problems:
        text = "no problem found: all ranks issue the same collectives, and none waits for ever"
        say(console, text)


def as_tree(found: Rehearsal) -> dict[str, Any]:
    """As JSON's types; bytes, FLOPs and counts."""
    return {
        "ranks": list(found.ranks),
        "engine_ranks": list(found.engine_ranks),
        "world_size": found.world_size,
        "microbatches": found.microbatches,
        "tokens": found.tokens,
        "seconds": round(found.seconds, 1),
        "estimated_step_s": found.clock.seconds,
        "stages": [_stage_tree(found, stage) for stage in found.stages],
        "problems": list(found.problems),
        "notes": list(found.notes),
    }


def _stage_tree(found: Rehearsal, stage: Stage) -> dict[str, Any]:
    trace = stage.trace
    return {
        "stage": stage.number,
        "rank": trace.rank,
        "parameters": trace.parameters,
        "peak_bytes": trace.peak_bytes,
        "planned_bytes": stage.planned.tensors,
        "peak_parts": trace.peak_parts,
        "host_bytes": trace.host_bytes,
        "copied_bytes": trace.copied_bytes,
        "flops": trace.flops,
        "kernels": trace.kernels.get(PASSES, 0),
        "host_waits": _waits(stage),
        "collectives": trace.calls(is_sync=False),
        "weight_sync_calls": trace.calls(is_sync=True),
        "bytes": _sent(stage),
        "shares": {n: _share(found, stage, n) for n in ("computes", "exchanges", "waits")},
    }


def _shown(found: Rehearsal) -> tuple[Stage, ...]:
    """All stages, or as many as a screen holds; --json has all."""
    stages = found.stages
    return stages if len(stages) <= MAX_COLUMNS else (*stages[:2], stages[-1])


def _rows(found: Rehearsal) -> Iterable[tuple[str, list[str]]]:
    stages, count = _shown(found), found.microbatches
    yield "parameters of a rank", [f"{stage.trace.parameters:,}" for stage in stages]
    yield "peak of tensors", [f"{stage.trace.peak_bytes / GIB:.1f} GiB" for stage in stages]
    yield "  over the plan's", [f"{stage.memory_ratio:.3f}" for stage in stages]
    if any(stage.trace.host_bytes for stage in stages):
        yield "host memory", [f"{stage.trace.host_bytes / GIB:.1f} GiB" for stage in stages]
        for name in ("to host", "to device"):
            copied = [stage.trace.copied_bytes.get(name, 0) for stage in stages]
            yield f"  GiB copied {name}", [f"{size / GIB:.1f}" for size in copied]
    yield "FLOPs of a step", [f"{stage.trace.flops / 1e12:,.1f} T" for stage in stages]
    kernels = [stage.trace.kernels.get(PASSES, 0) // count for stage in stages]
    yield "kernels of a microbatch", [f"{number:,}" for number in kernels]
    yield "host waits of a microbatch", [f"{_waits(stage) / count:.1f}" for stage in stages]
    for name, is_sync in (("collectives of a step", False), ("calls of a weight sync", True)):
        yield name, [f"{stage.trace.calls(is_sync=is_sync):,}" for stage in stages]
    for name in ("computes", "exchanges", "waits"):
        yield f"share of the time it {name}", [f"{_share(found, s, name):.0%}" for s in stages]
    sent = [_sent(stage) for stage in stages]
    for name in dict.fromkeys(name for each in sent for name in each):
        yield f"  GiB sent, {name}", [f"{each.get(name, 0) / GIB:.1f}" for each in sent]


def _share(found: Rehearsal, stage: Stage, name: str) -> float:
    """Of the estimated time of a step, what the stage's rank spends so."""
    seconds = found.clock.seconds
    return getattr(found.clock.ranks[stage.trace.rank], name) / seconds if seconds else 0.0


def _waits(stage: Stage) -> int:
    return sum(read.count for read in stage.trace.reads if read.phase == PASSES)


def _sent(stage: Stage) -> dict[str, int]:
    """Bytes that the rank gives to collectives, by dimension."""
    found: dict[str, int] = {}
    for group, size in stage.trace.bytes_by_group().items():
        name = _GROUPS.get(group, "all")
        found[name] = found.get(name, 0) + size
    return found
