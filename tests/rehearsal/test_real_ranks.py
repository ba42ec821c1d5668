"""A rehearsed step beside the same step of real ranks on the CPU: collectives, memory, FLOPs."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_rl.algorithms.objective import find_objective
from megatron_rl.backend.cpu import loops
from megatron_rl.backend.device import select_backend
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.plan.flops import step_flops
from megatron_rl.rehearsal.events import Request, Trace, read_trace
from megatron_rl.rehearsal.rehearse import Options, rehearsable, write_request
from megatron_rl.trainer.model.build import build_model
from megatron_rl.trainer.model.policy import Policy
from megatron_rl.trainer.step import Trainer
from megatron_rl.weights.layout.shape import read_shape
from tests.distributed import run_ranks
from tests.rehearsal.shapes import SMOLLM2_135M, TINY, TINY_GPT_OSS, write_shape

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.timeout(300), pytest.mark.slow(30)]
SMALL = ("train.microbatch_tokens=96", "generator.context_tokens=96", "sampling.max_new_tokens=32")
LOCAL = ("expert.model.layers=local", "model.dtype=float32", "expert.train.max_mismatch=0",
         # No weight sync: see test_weight_sync.py.
         "weights.method=folder")  # fmt: skip


def config_of(folder: Path, values: dict[str, Any], *overrides: str) -> Config:
    write_shape(folder, values)
    (folder / "run.toml").write_text(f'[model]\npath = "{folder}"\n')
    return load_config(folder / "run.toml", [*LOCAL, *overrides])


def rehearsed(folder: Path, cfg: Config, options: Options) -> tuple[Request, list[Trace]]:
    """Every rank's trace, from a process of its own."""
    folder.mkdir()
    request = write_request(folder, cfg, options)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    subprocess.run(
        [sys.executable, "-m", "megatron_rl.rehearsal.ranks", str(folder)],
        cwd=ROOT, env=environment, check=True, timeout=120,
    )  # fmt: skip
    return request, [read_trace(folder, rank) for rank in request.ranks]


@contextmanager
def real_trainer(cfg: Config, request: Request) -> Iterator[tuple[Trainer, Any]]:
    """A trainer of unset weights on this rank, without our loops in C++, and its share of work."""
    from megatron_rl.rehearsal.rank import Work, share_of

    loops.library_for = lambda name, tensor: None
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("megatron_rl.backend"):
            for name in ("library_for", "library"):
                if hasattr(module, name):
                    setattr(module, name, lambda *args: None)
    backend = select_backend(cfg.model)
    backend.init_distributed(cfg.parallel, seed=1, timeout_s=60)
    Policy.shares_prompts = property(lambda policy: False)
    shape = read_shape(cfg.model.path)
    chunks = build_model(backend, cfg, shape)
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.normal_(0.0, 0.02)
    policy = Policy(backend, shape, chunks, cfg.parallel, cfg)
    trainer = Trainer(policy, find_objective(cfg.algorithm), cfg.optimizer, 100, train=cfg.train)
    work = Work(request.microbatches, request.tokens, request.sequence_tokens)
    yield trainer, share_of(work, cfg, shape)
    backend.shutdown()


def recorded(cfg: Config, request: Request) -> list[dict[str, Any]]:
    """The collectives of this rank's second step."""
    from megatron_rl.rehearsal.rank import batches_marked
    from megatron_rl.rehearsal.tracer import Tracer

    with real_trainer(cfg, request) as (trainer, share):
        take(trainer, share)
        tracer = Tracer(torch.device("cpu"), answers=False)
        with tracer, batches_marked(tracer):
            take(trainer, share)
    return [asdict_of(event) for event in tracer.events]


def take(trainer: Trainer, share: Any) -> None:
    prepared = trainer.prepare([share])
    trainer.update(share, version=0, prepared=prepared.pop())
    trainer.gather()


def asdict_of(event: Any) -> dict[str, Any]:
    """What must agree: all but phases and stacks."""
    found = msgspec.structs.asdict(event)
    return {name: found[name] for name in ("kind", "group", "bytes", "dtype", "detail", "peer")}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("values", "layout"),
    [
        (TINY, ("parallel.tensor=2", "parallel.sequence=true")),
        (TINY, ("parallel.pipeline=2",)),
        (
            TINY_GPT_OSS,
            ("parallel.tensor=2", "parallel.sequence=true", "train.router_replay=true"),
        ),
    ],
    ids=["tensor", "pipeline", "gpt-oss"],
)
def test_real_ranks_issue_the_rehearsed_collectives(
    tmp_path: Path, values: dict[str, Any], layout: tuple[str, ...]
) -> None:
    cfg = config_of(tmp_path / "model", values, *SMALL, *layout)
    cfg, _ = rehearsable(cfg)
    options = Options(choice="all", microbatches=3, mean_tokens=40)
    request, traces = rehearsed(tmp_path / "traces", cfg, options)
    real = run_ranks(recorded, 2, cfg, request, timeout_s=100)
    for trace, events in zip(traces, real, strict=True):
        assert [asdict_of(event) for event in trace.events] == events
        assert len(events) > 10


def peak_growth(cfg: Config, request: Request) -> int:
    """Bytes by which torch's allocator grows at most in a rank's second step."""
    with real_trainer(cfg, request) as (trainer, share):
        take(trainer, share)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            take(trainer, share)
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    current = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak


@pytest.mark.parametrize(
    ("values", "sizes"),
    [
        pytest.param(TINY | {"vocab_size": 4000, "hidden_size": 256, "intermediate_size": 640},
                     ("train.microbatch_tokens=768", "generator.context_tokens=768"), id="small"),
        pytest.param(TINY_GPT_OSS | {"vocab_size": 4000, "hidden_size": 256,
                                     "intermediate_size": 640},
                     ("train.microbatch_tokens=768", "generator.context_tokens=768"),
                     id="gpt-oss", marks=pytest.mark.exhaustive),
        pytest.param(SMOLLM2_135M,
                     ("train.microbatch_tokens=1024", "generator.context_tokens=1024"),
                     id="smollm2", marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_peak_and_flops_are_those_of_real_tensors_and_the_formula(
    tmp_path: Path, values: dict[str, Any], sizes: tuple[str, ...]
) -> None:
    cfg = config_of(tmp_path / "model", values, *sizes, "sampling.max_new_tokens=32")
    cfg, _ = rehearsable(cfg)
    options = Options(microbatches=2, mean_tokens=256)
    request, [trace] = rehearsed(tmp_path / "traces", cfg, options)
    # Weights, gradients, two moments: 4 numbers a parameter, in float32 their own masters.
    steady = 16 * trace.parameters
    [real] = run_ranks(peak_growth, 1, cfg, request, timeout_s=200)
    assert trace.peak_bytes - steady == pytest.approx(real, rel=0.03)
    shape = read_shape(cfg.model.path)
    sequences = 2 * (request.tokens // 256)
    formula = step_flops(shape, sequences=sequences, length=256)
    assert trace.flops == pytest.approx(formula.total, rel=0.03)
