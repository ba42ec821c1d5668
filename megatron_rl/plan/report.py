"""`megatron-rl plan CONFIG`: prints the figures of a configuration before anything is started."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Column, Table

from megatron_rl.cli.command_line.printing import say, show_table
from megatron_rl.config.gpus import GIB
from megatron_rl.plan.plan import PlannedStage, SizingPlan
from megatron_rl.plan.weight_sync import PAPER_WEIGHT_SYNC_S

_STAGE_FIELDS = ("name", "begins", "max_new_tokens", "minibatches", "max_staleness")


def print_plan(plan: SizingPlan, console: Console, *, as_json: bool) -> None:
    """Print the plan for people, or for programs."""
    if as_json:
        console.print(json.dumps(as_tree(plan), indent=2), markup=False, soft_wrap=True)
        return
    table = Table("quantity", "value", title=f"on {plan.gpu}", title_justify="left")
    for name, value in (*_model_rows(plan), *_trainer_rows(plan), *_other_rows(plan)):
        table.add_row(name, value)
    show_table(console, table)
    if plan.stages:
        show_table(console, _stage_table(plan))
    if not plan.is_known_gpu:
        text = f"note: {plan.gpu} is not in the table of GPUs: seconds are those of other cards"
        say(console, text)
    verdict = "does not work" if plan.is_known_gpu else "warning: may not work"
    for text in plan.problems:
        say(console, f"{verdict}: {text}")
    for text in plan.advice:
        say(console, f"note: {text}")


def as_tree(plan: SizingPlan) -> dict:
    """The plan as JSON's types, totals included; bytes, seconds and counts."""
    tree = asdict(plan)
    tree["fits"] = not plan.problems
    tree["free_bytes"] = plan.free_bytes
    tree["trainer"]["total"] = plan.trainer.total
    tree["trainer"]["states"]["total"] = plan.trainer.states.total
    tree["step"]["flops"]["total"] = plan.step.flops.total
    tree["engine"]["kv_tokens"] = plan.engine.kv_tokens
    tree["kv_completions"] = plan.kv_completions
    tree["stages"] = [
        {field: getattr(stage, field) for field in _STAGE_FIELDS} | {"plan": as_tree(stage.plan)}
        for stage in plan.stages
    ]
    return tree


def _stage_table(plan: SizingPlan) -> Table:
    """A column a stage: its batch, and the memory that it needs."""
    names = [stage.name.removeprefix("stage ") for stage in plan.stages]
    table = Table(
        Column("stage", no_wrap=True), *names, title="stages of the run", title_justify="left"
    )
    for name, values in _stage_rows(plan.stages):
        table.add_row(name, *values)
    return table


def _stage_rows(stages: Sequence[PlannedStage]) -> Iterable[tuple[str, list[str]]]:
    plans = [stage.plan for stage in stages]
    yield "begins with", [stage.begins for stage in stages]
    yield "sampling.max_new_tokens", [f"{stage.max_new_tokens:,}" for stage in stages]
    yield "sequences of a batch", [f"{plan.step.sequences:,}" for plan in plans]
    yield "  tokens of each (assumed mean)", [f"{plan.step.mean_tokens:,}" for plan in plans]
    yield "minibatches of a batch", [str(stage.minibatches) for stage in stages]
    yield "microbatches of a replica", [f"{plan.step.microbatches:,}" for plan in plans]
    yield "queue.max_staleness", [str(stage.max_staleness) for stage in stages]
    yield (
        "  sequences untrained, at most",
        [f"{(stage.max_staleness + 1) * stage.plan.step.sequences:,}" for stage in stages],
    )
    yield "seconds of a step", [f"{plan.step.seconds:.1f}" for plan in plans]
    yield "fullest trainer rank", [_gib(plan.trainer.total) for plan in plans]
    yield "  free", [_gib(plan.free_bytes) for plan in plans]
    yield (
        "longest ones in generator.kv_tokens",
        [str(plan.kv_tokens // plan.context_tokens) for plan in plans],
    )


def _model_rows(plan: SizingPlan) -> Iterable[tuple[str, str]]:
    yield "parameters", f"{plan.parameters / 1e9:.2f} B"
    if plan.active_parameters != plan.parameters:
        yield "parameters that a token meets", f"{plan.active_parameters / 1e9:.2f} B"
    generators = f"{plan.generator_gpus} generators" if plan.generator_gpus else "shared"
    scorer = f", {plan.scorer_gpus} scorer" if plan.scorer_gpus else ""
    yield "GPUs", f"{plan.trainer_gpus} trainer, {generators}{scorer}"


def _trainer_rows(plan: SizingPlan) -> Iterable[tuple[str, str]]:
    rank, states = plan.trainer, plan.trainer.states
    yield "fullest trainer rank", f"pipeline stage {rank.stage}, {rank.parameters / 1e9:.2f} B"
    parts = {
        "weights": states.weights,
        "gradients": states.gradients,
        "float32 masters": states.masters,
        "Adam's moments": states.moments,
        "activations": rank.activations,
        "logits, or the backward pass of a layer": max(rank.logits, rank.backward),
        "buffers of a weight sync": rank.sync_buffers,
        "communicators of a weight sync, at most": rank.communicators,
        **({"buffers of overlap_tensor": rank.overlap_buffers} if rank.overlap_buffers else {}),
        "CUDA, NCCL of training, fragments (allowance)": rank.reserve,
        "sum": rank.total,
    }
    for name, size in parts.items():
        yield f"  {name}", _gib(size)
    yield "  free", _gib(plan.free_bytes)


def _other_rows(plan: SizingPlan) -> Iterable[tuple[str, str]]:
    step, engine, sync = plan.step, plan.engine, plan.sync
    flops = step.flops
    yield "sequences of a step", f"{step.sequences} of {step.mean_tokens} tokens (assumed mean)"
    yield "microbatches of a replica", f"{step.microbatches} an optimizer step"
    if step.padding.share:
        yield "  positions that are padding", f"{step.padding.share:.1%}, at least"
    yield "FLOPs of a step", f"{flops.total:.3g}"
    yield "  layers, attention, output", _shares(flops.products, flops.attention, flops.output)
    if step.hardware_flops != flops.total:
        padded = " and padding" if step.padding.share else ""
        yield f"  with recomputation{padded}", f"{step.hardware_flops:.3g}"
    yield f"seconds of a step at {plan.mfu:.0%} MFU", f"{step.seconds:.1f}"
    if step.bubble_share:
        yield "  pipeline bubble (within the MFU)", f"{step.bubble_share:.0%}"
    yield "engine rank: weights", _gib(engine.weights)
    yield "  left free by SGLang", _gib(engine.reserve)
    yield "  communicators of a weight sync, at most", _gib(engine.communicators)
    yield "  KV cache of a token", f"{engine.kv_per_token / 1024:.1f} KiB"
    room = f"{engine.kv_tokens:,} tokens, {plan.kv_completions} completions"
    yield "  room for KV cache", f"{_gib(engine.kv_room)}: {room} of {plan.context_tokens}"
    yield "  generator.kv_tokens", f"{plan.kv_tokens:,}"
    if plan.shared is not None:
        yield "both on one GPU: the trainer computes", _gib(plan.shared.trainers_turn)
        yield "  the engine generates", _gib(plan.shared.engines_turn)
    waited = f"{sync.whole_seconds:.2f} s (paper: under {PAPER_WEIGHT_SYNC_S:g} s)"
    yield "weight sync", f"{sync.total_bytes / 1e9:.2f} GB, {waited}"
    if sync.is_overlapped:
        yield "  of which the trainer waits", f"{sync.waited_seconds(step.seconds):.2f} s"
    yield "  its transfer", f"{sync.seconds:.2f} s in {sync.rounds} rounds, {sync.lanes} lanes"
    yield "  to a single engine", f"{sync.one_s:.2f} s"
    yield "  most that an engine rank takes", f"{sync.rank_bytes / 1e9:.2f} GB"


def _shares(*parts: int) -> str:
    return ", ".join(f"{part / sum(parts):.1%}" for part in parts)


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"
