"""Rehearsed weight syncs in groups of engines, to engines that quantise, and by shared memory."""

from collections import Counter
from itertools import groupby
from pathlib import Path

import msgspec
import pytest

from megatron_rl.cli.plan_weights import forecast
from megatron_rl.config.tree import Config
from megatron_rl.rehearsal.events import REQUEST, SYNC, Trace, read_trace
from megatron_rl.rehearsal.rehearse import engine_ranks, run_ranks, write_request
from megatron_rl.weights.exchange.group import LANE
from tests.rehearsal.cases import TINY_STEP, config_of, rehearse_cases
from tests.rehearsal.shapes import SMOLLM2_135M, TINY, write_shape
from tests.rehearsal.test_weight_sync import (
    ENGINE_RANKS,
    OPTIONS,
    SIZES,
    TRAINERS,
    elements_of,
    is_meeting,
    layouts_of,
    moved,
    overheads,
)

BUCKET_BYTES, ITEM_BYTES = 8_192, 2
WAYS = {
    "groups": "expert.weights.groups=2",
    "codes": "generator.quantization=fp8",
    "shared": "weights.method=ipc",
}
SERVED = {
    "groups": [(0, 2), (1,)],
    "codes": [(0, 1, 2)],
    "shared": [(0,), (1,), (2,)],
}
"""Engines that a trainer rank sends to at once."""
Played = dict[str, tuple[Config, dict[int, Trace]]]
pytestmark = [pytest.mark.timeout(300), pytest.mark.slow(20)]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """By way: the configuration of three engines, and the traces without a fault, by rank."""
    folder = tmp_path_factory.mktemp("ways")
    model = write_shape(tmp_path_factory.mktemp("model"), TINY)
    sizes = [*TINY_STEP, *SIZES, "generator.replicas=3"]
    sizes.append(f"expert.weights.bucket_bytes={BUCKET_BYTES}")
    cases = {name: (config_of(model, *sizes, word), OPTIONS) for name, word in WAYS.items()}
    for name, found in rehearse_cases(folder, cases).items():
        assert found.problems == (), name
    return {
        name: (cfg, {n: read_trace(folder / name, n) for n in [0, 1, *engine_ranks(cfg)]})
        for name, (cfg, _) in cases.items()
    }


def served(trace: Trace) -> list[tuple[tuple[int, ...], int]]:
    """(engines, bytes) of each send of a trainer rank in a weight sync."""
    return [
        (tuple(sorted({(n - TRAINERS) // ENGINE_RANKS for n in to if n >= TRAINERS})), event.bytes)
        for event in trace.events
        if event.phase == SYNC and event.kind == "send" and not is_meeting(trace, event)
        for to in [trace.groups[event.group] or [event.peer]]
    ]


@pytest.mark.parametrize("way", WAYS)
def test_each_trainer_rank_sends_what_plan_weights_says_to_each_party(
    played: Played, way: str
) -> None:
    cfg, traces = played[way]
    over = overheads(cfg, "sender")
    for rank, size in enumerate(forecast(cfg).sent):
        found: Counter[tuple[int, ...]] = Counter()
        for engines, sent in served(traces[rank]):
            found[engines] += sent
        assert found == dict.fromkeys(SERVED[way], size + over[rank]) and size > 0


@pytest.mark.parametrize("way", WAYS)
def test_each_engine_rank_receives_its_shard_once(played: Played, way: str) -> None:
    cfg, traces = played[way]
    over = overheads(cfg, "receiver")
    group = "SHARED_MEMORY" if way == "shared" else LANE
    hands_on = {"groups": {0}, "codes": {0, 1}, "shared": set()}[way]
    assert len(traces) > TRAINERS
    for number in list(traces)[TRAINERS:]:
        engine, rank = divmod(number - TRAINERS, ENGINE_RANKS)
        received = ITEM_BYTES * elements_of(rank) + over[TRAINERS + rank]
        assert traces[number].parameters == elements_of(rank)
        assert moved(traces[number], "recv", group) == received
        assert moved(traces[number], "send", group) == (received if engine in hands_on else 0)


def test_one_group_of_engines_is_served_after_the_other(played: Played) -> None:
    _, traces = played["groups"]
    for rank in range(TRAINERS):
        assert [engines for engines, _ in groupby(served(traces[rank]), lambda each: each[0])] == [
            (0, 2), (1,)
        ]  # fmt: skip


def test_shared_memory_is_filled_again_only_when_all_engines_have_taken_it(
    played: Played,
) -> None:
    cfg, traces = played["shared"]
    plan = layouts_of(cfg).plan()
    for rank in range(TRAINERS):
        parcels = [len(each) for each in plan.of_sender(rank)]
        kinds = "".join(
            "s" if event.kind == "send" else "r"
            for event in traces[rank].events
            if event.group == "SHARED_MEMORY"
        )
        # Each parcel goes to three engines. A round waits for the last but one.
        rounds = ["s" * 3 * count for count in parcels]
        waits = ["", "", *("r" * 3 * count for count in parcels)]
        assert kinds == "".join(
            wait + sent for wait, sent in zip(waits, [*rounds, "", ""], strict=True)
        )


def test_an_engine_rank_that_quantises_holds_codes_and_the_layers_in_flight(
    tmp_path: Path,
) -> None:
    model = write_shape(tmp_path / "model", SMOLLM2_135M)
    bucket_bytes = 1 << 20
    sizes = ["generator.quantization=fp8", f"expert.weights.bucket_bytes={bucket_bytes}"]
    cfg = config_of(model, *TINY_STEP, *sizes)
    request = write_request(tmp_path, cfg, OPTIONS)
    request.ranks = []
    (tmp_path / REQUEST).write_bytes(msgspec.json.encode(request))
    run_ranks(tmp_path, request)
    trace = read_trace(tmp_path, request.engine_ranks[0])
    # Rows of a layer: of 9 + 2 * 3 heads of 64, of output projection, gate and up, and down.
    rows = 960, 576, 2 * 1536, 576
    codes = 576 * sum(rows[:3]) + 1536 * rows[3]
    # Each layer has two norms. The output layer is the embedding.
    plain = 49152 * 576 + (2 * 30 + 1) * 576
    assert trace.parameters == 30 * codes + plain
    extra = trace.peak_bytes - 30 * (codes + 4 * sum(rows)) - 2 * plain
    largest = 2 * 576 * rows[2]
    # Two rounds, the layers that they touch, codes of one, and sums for digests of packets.
    most = 4 * bucket_bytes + 2 * largest + largest // 2 + (1 << 18)
    assert largest < extra < most < 0.1 * 30 * 2 * codes
