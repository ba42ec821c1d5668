"""A rehearsed weight sync beside real ranks' over gloo, and beside figures from sizes."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.cli.plan_weights import forecast
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.rehearsal.events import SYNC, Event, Trace, read_trace
from megatron_rl.rehearsal.rehearse import Options, conclude, engine_ranks, rehearsable
from megatron_rl.trainer.model.build import DTYPES
from megatron_rl.weights.exchange.group import LANE
from megatron_rl.weights.exchange.plan import EngineKind, Layouts
from megatron_rl.weights.layout.place import like_of
from megatron_rl.weights.layout.shape import read_shape
from tests.distributed import run_ranks
from tests.ports import free_port
from tests.rehearsal.shapes import TINY, write_shape
from tests.rehearsal.test_real_ranks import SMALL, asdict_of, config_of, rehearsed
from tests.weights.exchange.test_chain import be_rank
from tests.weights.made_up import buffer_bytes

OPTIONS = Options(choice="all", microbatches=1, mean_tokens=24)
TRAINERS, REPLICAS, ENGINE_RANKS, BUCKET_BYTES = 2, 2, 2, 40_000
SIZES = (
    "weights.method=reshard", "expert.model.layers=auto", "parallel.tensor=2",
    "parallel.sequence=true", f"generator.replicas={REPLICAS}",
    f"generator.tensor_parallel={ENGINE_RANKS}", f"expert.weights.bucket_bytes={BUCKET_BYTES}",
)  # fmt: skip
pytestmark = [pytest.mark.timeout(300), pytest.mark.slow(40)]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, list[Trace]]:
    """The configuration, and the traces of two trainer ranks and of two ranks of each engine."""
    folder = tmp_path_factory.mktemp("sync")
    cfg = config_of(folder / "model", TINY, *SMALL, *SIZES)
    request, traces = rehearsed(folder / "traces", cfg, OPTIONS)
    assert conclude(folder / "traces", cfg, OPTIONS).problems == ()
    return cfg, [*traces, *(read_trace(folder / "traces", n) for n in request.engine_ranks)]


def layouts_of(cfg: Config) -> Layouts:
    kind = EngineKind(cfg.generator.engine, ENGINE_RANKS)
    shape = read_shape(cfg.model.path)
    size = DTYPES[cfg.model.dtype].itemsize
    like, bucket_bytes = like_of(cfg.parallel), cfg.weights.bucket_bytes
    has_lanes = cfg.weights.method == "reshard"
    return Layouts(shape, like, TRAINERS, kind, size, bucket_bytes, few_senders=has_lanes)


def moved(trace: Trace, kind: str, group: str = LANE) -> int:
    """Bytes of a rank's sends or receives in lanes, once its ranks have met."""
    return sum(
        event.bytes
        for event in trace.events
        if event.kind == kind and event.group.startswith(group) and not is_meeting(trace, event)
    )


def is_meeting(trace: Trace, event: Event) -> bool:
    """Whether it connects the ranks of a lane."""
    return any(frame.endswith(" _meet") for frame in trace.stack_of(event))


def overheads(cfg: Config, end: str) -> Counter[int]:
    """Bytes of padding and trailers by sender or receiver."""
    found: Counter[int] = Counter()
    dtype = DTYPES[cfg.model.dtype]
    for parcel in (parcel for each in layouts_of(cfg).plan().rounds for parcel in each):
        found[getattr(parcel, end)] += buffer_bytes(parcel, dtype) - dtype.itemsize * parcel.size
    return found


def elements_of(rank: int) -> int:
    """Of a rank of an engine."""
    # Half of 4 + 2 * 2 heads of 16, of the output projection and of 160 units; whole norms.
    layer = 128 // 2 * 64 + 64 // 2 * 64 + 3 * 160 // 2 * 64 + 2 * 64
    # Of 250 words, padded to 256, for embedding and output layer.
    return 4 * layer + 64 + 2 * 64 * (128, 122)[rank]


def test_each_trainer_rank_roots_the_bytes_that_plan_weights_says(
    played: tuple[Config, list[Trace]],
) -> None:
    cfg, traces = played
    over = overheads(cfg, "sender")
    sent = tuple(moved(trace, "send") - over[trace.rank] for trace in traces[:TRAINERS])
    assert sent == forecast(cfg).sent and min(sent) > 0


def test_each_engine_rank_receives_its_shard_once_and_hands_it_on(
    played: tuple[Config, list[Trace]],
) -> None:
    cfg, traces = played
    over = overheads(cfg, "receiver")
    for number, trace in enumerate(traces[TRAINERS:]):
        engine, rank = divmod(number, ENGINE_RANKS)
        assert trace.parameters == elements_of(rank)
        received = 4 * elements_of(rank) + over[TRAINERS + rank]
        assert moved(trace, "recv") == received
        assert moved(trace, "send") == (received if engine + 1 < REPLICAS else 0)


@pytest.mark.exhaustive
def test_real_ranks_over_gloo_make_the_rehearsed_calls(
    played: tuple[Config, list[Trace]],
) -> None:
    cfg, traces = played
    ranks = TRAINERS + REPLICAS * ENGINE_RANKS
    real = run_ranks(recorded, ranks, free_port(), layouts_of(cfg), timeout_s=200)
    for trace, events in zip(traces, real, strict=True):
        # Over gloo a group is there once it is made.
        first = [e for e in trace.events if e.group.startswith(LANE) and e.kind != "connect"]
        # The second transfer finds its lanes.
        again = [event for event in first if not is_meeting(trace, event)]
        assert events == [asdict_of(event) for event in first + again] and len(again) > 10
        assert len(again) < len(first)


def recorded(port: int, layouts: Layouts) -> list[dict[str, Any]]:
    """What this real rank does in lanes, in two weight syncs."""
    from megatron_rl.rehearsal.rank import batches_marked
    from megatron_rl.rehearsal.tracer import Tracer

    tracer = Tracer(torch.device("cpu"), answers=False)
    with tracer, batches_marked(tracer):
        be_rank(port, layouts, REPLICAS, "gloo")
    return [asdict_of(event) for event in tracer.events]


def test_all_agree_in_host_memory_before_and_after_a_transfer(
    played: tuple[Config, list[Trace]],
) -> None:
    _, traces = played
    for trace in traces[:TRAINERS]:
        lanes = [e.group.startswith(LANE) for e in trace.events if e.phase == SYNC]
        first, last = lanes.index(True), len(lanes) - lanes[::-1].index(True)
        assert all(lanes[first:last]) and first > 0 and last < len(lanes)


def test_a_sync_through_files_is_left_out_and_said(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\npath = "{write_shape(tmp_path, TINY)}"\n')
    for words, said in ((["weights.method=folder"], "no weight sync is rehearsed"), ([], "")):
        cfg, notes = rehearsable(load_config(path, words))
        assert said in "".join(notes) and len(notes) == bool(said)
        assert bool(engine_ranks(cfg)) != bool(said)


def test_two_engines_of_the_first_and_of_the_last_group_are_rehearsed(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\npath = "{write_shape(tmp_path, TINY)}"\n')
    words = ["generator.replicas=7", "generator.tensor_parallel=2", "parallel.data=10"]
    for groups, engines in ((1, [0, 1]), (3, [0, 2, 3, 5]), (6, [0, 5, 6]), (9, [0, 6])):
        cfg = load_config(path, [*words, f"expert.weights.groups={groups}"])
        assert engine_ranks(cfg) == [10 + 2 * e + rank for e in engines for rank in (0, 1)]
