"""A rehearsal of a configuration: its distinct trainer ranks, and what a comparison of them finds.

Used by `megatron-rl rehearse`. The ranks are processes (`ranks.py`); this one needs no torch.
"""

import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal

import msgspec

from megatron_rl.config.files import dump_toml
from megatron_rl.config.gpus import DEFAULT, GIB, find_gpu
from megatron_rl.config.layer_choice import Device, installed_flash_attention, settle_layers
from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.config.tree import Config
from megatron_rl.plan.activations import Microbatch
from megatron_rl.plan.trainer_memory import RankMemory, microbatch_of, rank_memory
from megatron_rl.rehearsal.events import PASSES, REQUEST, Request, Trace, read_trace
from megatron_rl.rehearsal.match import find_faults
from megatron_rl.rehearsal.timeline import Clock
from megatron_rl.weights.layout.shape import ModelShape, check_parallel, read_shape

Choice = Literal["sample", "all"]
RANK_LIMIT_S = 300.0
START_LIMIT_S = 120.0
TOLERANCE = 0.03
"""Share by which the peak of a trace may differ from the plan's without a note."""


@dataclass(frozen=True)
class Options:
    """How much is rehearsed."""

    choice: Choice = "sample"
    microbatches: int | None = None
    """Of each data-parallel rank; None: as planned, at most twice the stages and one more."""
    mean_tokens: int | None = None
    """Of a sequence; None: half of generator.context_tokens."""
    processes: int = 2
    gpu: str = DEFAULT


@dataclass(frozen=True)
class Stage:
    """The fullest rehearsed rank of a pipeline stage."""

    number: int
    trace: Trace
    planned: RankMemory

    @property
    def memory_ratio(self) -> float:
        """Tensors of the trace over those of the plan."""
        return self.trace.peak_bytes / self.planned.tensors


@dataclass(frozen=True)
class Rehearsal:
    """What was rehearsed, and what it found."""

    ranks: tuple[int, ...]
    engine_ranks: tuple[int, ...]
    """Numbers as in Trace.rank."""
    world_size: int
    microbatches: int
    tokens: int
    stages: tuple[Stage, ...]
    problems: tuple[str, ...]
    """Reasons why the step would hang, fail, not fit, or wait for its host in every microbatch."""
    notes: tuple[str, ...]
    clock: Clock
    """When each rehearsed rank computes, exchanges and waits."""
    seconds: float = 0.0


def rehearse(cfg: Config, options: Options) -> Rehearsal:
    """Rehearse a configuration, whose model folder needs config.json alone.

    Raises InputError for impossible sizes.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as place:
        request = write_request(Path(place), cfg, options)
        run_ranks(Path(place), request)
        return replace(conclude(Path(place), cfg, options), seconds=time.monotonic() - started)


def write_request(folder: Path, cfg: Config, options: Options) -> Request:
    """FOLDER/request.json and the configuration that it names. Raises InputError."""
    check_parallel(read_shape(cfg.model.path), cfg.parallel)
    cfg, _ = rehearsable(cfg, options.gpu)
    planned = microbatch_of(cfg, _sequence_tokens(cfg, options))
    count = options.microbatches or min(planned.count, 2 * cfg.parallel.pipeline + 1)
    multiple = cfg.parallel.pipeline if cfg.parallel.virtual_stages > 1 else 1
    request = Request(
        config=str(folder / "config.toml"),
        ranks=chosen_ranks(cfg.parallel, options.choice),
        engine_ranks=engine_ranks(cfg),
        microbatches=count + -count % multiple,
        tokens=planned.tokens,
        sequence_tokens=_sequence_tokens(cfg, options),
        processes=options.processes,
        limit_s=RANK_LIMIT_S,
    )
    (folder / "config.toml").write_text(dump_toml(cfg))
    (folder / REQUEST).write_bytes(msgspec.json.encode(request))
    return request


def conclude(folder: Path, cfg: Config, options: Options) -> Rehearsal:
    """The result of the traces in a folder, after its ranks have been rehearsed."""
    request = msgspec.json.decode((folder / REQUEST).read_bytes(), type=Request)
    cfg, notes = rehearsable(cfg, options.gpu)
    everybody = [*request.ranks, *request.engine_ranks]
    errors = list(_errors(folder, everybody, cfg))
    traces = [read_trace(folder, rank) for rank in everybody if (folder / f"{rank}.json").exists()]
    microbatch = Microbatch(request.tokens, request.microbatches)
    stages = tuple(_stages(read_shape(cfg.model.path), cfg, traces, microbatch))
    gpu = find_gpu(options.gpu)
    in_fp8 = gpu.fp8_flops if cfg.model.fp8 != "none" else None
    clock = Clock(traces, in_fp8 or gpu.bf16_flops)
    faults = find_faults(traces, clock) if not errors else []
    if not errors:
        clock.end()
    return Rehearsal(
        ranks=tuple(request.ranks),
        engine_ranks=tuple(request.engine_ranks),
        world_size=cfg.parallel.world_size,
        microbatches=request.microbatches,
        tokens=request.tokens,
        stages=stages,
        problems=(
            *errors,
            *faults,
            *_waits(traces),
            *_too_large(stages, options.gpu),
        ),
        notes=(*notes, *_differences(stages)),
        clock=clock,
    )


def _sequence_tokens(cfg: Config, options: Options) -> int:
    return options.mean_tokens or max(2, cfg.generator.context_tokens // 2)


def rehearsable(cfg: Config, gpu: str = DEFAULT) -> tuple[Config, list[str]]:
    """The configuration without what tensors without data cannot do, and what that is.

    The model gets the layers that a trainer on `gpu` takes. Raises InputError for layers or FP8
    that the GPU does not support.
    """
    notes = []
    model, parallel, algorithm = cfg.model, cfg.parallel, cfg.algorithm
    if model.fp8_parameters:
        notes.append(f"expert.model.fp8_parameters is rehearsed with parameters in {model.dtype} "
                     "and their copies in FP8")  # fmt: skip
        model = model.model_copy(update={"fp8_parameters": False})
    if parallel.overlap_tensor:
        notes.append("expert.parallel.overlap_tensor is rehearsed without userbuffers")
        parallel = parallel.model_copy(update={"overlap_tensor": False})
    if parallel.expert_exchange != "all_to_all":
        notes.append(f"expert.parallel.expert_exchange={parallel.expert_exchange!r} is rehearsed "
                     "as 'all_to_all'")  # fmt: skip
        parallel = parallel.model_copy(update={"expert_exchange": "all_to_all"})
    if algorithm.reference.folder is not None or algorithm.needs_scorer:
        notes.append("algorithm.reference is rehearsed as the first weights, on these ranks")
        own = {"policy": "start", "source": "trainer"}
        reference = algorithm.reference.model_copy(update=own)
        algorithm = algorithm.model_copy(update={"reference": reference})
    attention = read_shape(model.path).attention(cfg.train)
    device = Device(find_gpu(gpu).capability, installed_flash_attention())
    model, note = settle_layers(model, attention, device)
    notes += [note] if note else []
    if cfg.weights.method == "folder":
        notes.append("weights.method='folder': no weight sync is rehearsed, as files need data")
    found = {"model": model, "parallel": parallel, "algorithm": algorithm}
    return cfg.model_copy(update=found), notes


def chosen_ranks(parallel: ParallelConfig, choice: Choice) -> list[int]:
    """All ranks, or those of every stage at both ends of each other dimension."""
    if choice == "all":
        return list(range(parallel.world_size))
    sizes = (parallel.tensor, parallel.context, parallel.data)
    ends = [sorted({0, size - 1}) for size in sizes]
    data = set(ends[2]) | {parallel.expert - 1} & set(range(parallel.data))
    places = product(range(parallel.pipeline), sorted(data), ends[1], ends[0])
    # Megatron's order: tensor, context, data, pipeline (tp-cp-ep-dp-pp).
    return [
        tensor + sizes[0] * (context + sizes[1] * (data_rank + sizes[2] * stage))
        for stage, data_rank, context, tensor in places
    ]


def engine_ranks(cfg: Config) -> list[int]:
    """Numbers of the engine ranks that are rehearsed; []: no weight sync is.

    In each group of engines (expert.weights.groups) the first receives from the trainer and hands
    on to the second. These two of the first and of the last group are rehearsed.
    """
    if cfg.weights.method == "folder":
        return []
    first, replicas = cfg.parallel.world_size, cfg.generator.replicas
    ranks, groups = cfg.generator.tensor_parallel, min(cfg.weights.groups, replicas)
    engines = sorted({0, groups - 1, groups, 2 * groups - 1} & set(range(replicas)))
    return [first + engine * ranks + rank for engine in engines for rank in range(ranks)]


def rank_name(cfg: Config, number: int) -> str:
    """Of a trainer rank, or of an engine's by its number."""
    if number < cfg.parallel.world_size:
        return f"rank {number}"
    engine, rank = divmod(number - cfg.parallel.world_size, cfg.generator.tensor_parallel)
    return f"rank {rank} of engine {engine}"


def run_ranks(folder: Path, request: Request) -> None:
    """Have a process of its own rehearse the ranks. Raises RuntimeError when it fails."""
    waves = -(-len(request.ranks + request.engine_ranks) // request.processes)
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl.rehearsal.ranks", str(folder)],
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S + waves * request.limit_s,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the rehearsal ended with status {done.returncode}:\n{done.stderr}")


def _errors(folder: Path, ranks: Sequence[int], cfg: Config) -> Iterator[str]:
    """Of ranks that left no trace; the same error of several ranks once."""
    found: dict[str, list[str]] = {}
    for rank in ranks:
        if (folder / f"{rank}.json").exists():
            continue
        error = folder / f"{rank}.error"
        text = error.read_text() if error.exists() else "its process was killed\n"
        found.setdefault(text, []).append(rank_name(cfg, rank))
    for text, names in found.items():
        yield f"{', '.join(names)} failed:\n{text}"


def _stages(
    shape: ModelShape, cfg: Config, traces: Sequence[Trace], microbatch: Microbatch
) -> Iterator[Stage]:
    size = cfg.parallel.world_size // cfg.parallel.pipeline
    for number in range(cfg.parallel.pipeline):
        theirs = [trace for trace in traces if trace.rank // size == number]
        if theirs:
            fullest = max(theirs, key=lambda trace: trace.peak_bytes)
            yield Stage(number, fullest, rank_memory(shape, cfg, microbatch, number))


def _waits(traces: Sequence[Trace]) -> Iterator[str]:
    """Our own code's waits for the device in the passes of microbatches."""
    most: Counter[tuple[str, ...]] = Counter()
    for trace in traces:
        theirs: Counter[tuple[str, ...]] = Counter()
        for read in trace.reads:
            if read.phase == PASSES and read.is_own:
                # A schedule calls the same place from several lines.
                theirs[trace.stack_of(read)[:2]] += read.count
        most |= theirs
    for stack, count in most.items():
        shown = "\n".join(f"    {frame}" for frame in stack)
        yield f"the host waits for the device {count} times in the passes of a step:\n{shown}"


def _differences(stages: Sequence[Stage]) -> Iterator[str]:
    """Stages whose tensors need another amount of memory than the plan says."""
    for stage in stages:
        if abs(stage.memory_ratio - 1) > TOLERANCE:
            yield (
                f"stage {stage.number}: tensors come to {stage.memory_ratio:.3f} of what "
                "`megatron-rl plan` says without reserve and communicators"
            )


def _too_large(stages: Sequence[Stage], gpu: str) -> Iterator[str]:
    room = find_gpu(gpu).memory_bytes
    for stage in stages:
        needed = stage.trace.peak_bytes + stage.planned.total - stage.planned.tensors
        if needed > room:
            yield (
                f"stage {stage.number} needs {needed / GIB:.1f} GiB with what CUDA and NCCL take, "
                f"more than the {room / GIB:.1f} GiB of {gpu}"
            )
