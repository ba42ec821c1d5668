"""The simulated engine beside a loop over its iterations; cache, pauses and versions."""

import random
from dataclasses import dataclass

import pytest

from megatron_rl.protocol.types import VersionSpan
from megatron_rl.simulation.engine import Engine, EngineModel, Request

MODEL = EngineModel(
    base_s=0.01,
    per_running_s=0.0005,
    per_kv_token_s=2e-6,
    prefill_s_per_token=1e-4,
    max_running=6,
    kv_tokens=100_000,
)


@dataclass
class Arrival:
    at: float
    prompt: int
    tokens: int


def loop(model: EngineModel, arrivals: list[Arrival]) -> dict[int, float]:
    """When each completion ends: one iteration after the other, written as plainly as can be."""
    clock, ends, running = 0.0, {}, {}
    waiting = sorted(range(len(arrivals)), key=lambda i: arrivals[i].at)
    while waiting or running:
        if not running:
            clock = max(clock, arrivals[waiting[0]].at)
        joining = []
        while (
            waiting
            and arrivals[waiting[0]].at <= clock
            and len(running) + len(joining) < model.max_running
        ):
            joining.append(waiting.pop(0))
        for i in joining:
            clock += arrivals[i].prompt * model.prefill_s_per_token
            running[i] = 0
        kv = sum(arrivals[i].prompt + done for i, done in running.items())
        clock += model.base_s + model.per_running_s * len(running) + model.per_kv_token_s * kv
        running = {i: done + 1 for i, done in running.items()}
        ended = [i for i, done in running.items() if done == arrivals[i].tokens]
        for i in ended:
            ends[i] = clock
            del running[i]
    return ends


def play(engine: Engine, arrivals: list[Arrival]) -> dict[int, float]:
    """The same by the events of the engine."""
    ends: dict[int, float] = {}
    pending = sorted(enumerate(arrivals), key=lambda pair: pair[1].at)
    engine.resume(0, 0.0)
    now = 0.0
    while pending or engine.in_flight:
        at = min(engine.next_at(), pending[0][1].at if pending else float("inf"))
        assert at >= now
        now = at
        engine.advance(now)
        while pending and pending[0][1].at <= now:
            i, arrival = pending.pop(0)
            engine.add(Request(i, 0, i, arrival.prompt, arrival.tokens), now)
        ends |= {request.lease_id: when for when, request in engine.take_finished()}
    return ends


@pytest.mark.parametrize("seed", range(5))
def test_closed_form_equals_a_loop_over_iterations(seed: int) -> None:
    # Arrivals in the middle of an iteration join after it: never exactly at its end.
    draw = random.Random(seed)
    arrivals = [
        Arrival(draw.uniform(0, 3), draw.randint(1, 200), draw.randint(1, 150)) for _ in range(40)
    ]
    # Of few lengths, such that some end together.
    arrivals += [Arrival(4.0, draw.randint(1, 200), draw.randint(1, 3) * 40) for _ in range(20)]
    expected, found = loop(MODEL, arrivals), play(Engine(MODEL), arrivals)
    assert found == pytest.approx(expected, rel=1e-9)


def test_a_lone_completion_by_hand() -> None:
    # Prefill 100 x 1e-4; 3 iterations over 100, 101 and 102 tokens.
    [end] = play(Engine(MODEL), [Arrival(0.0, 100, 3)]).values()
    assert end == pytest.approx(0.01 + 3 * 0.0105 + 2e-6 * 303)


def test_the_cache_never_overflows_and_every_completion_ends() -> None:
    model = EngineModel(0.01, 0.0, 0.0, 0.0, max_running=8, kv_tokens=1000)
    engine = Engine(model, reserve_tokens=50)
    arrivals = [Arrival(0.0, 20, 300) for _ in range(20)]
    ends = play(engine, arrivals)
    assert len(ends) == 20
    assert engine.counts.retractions > 0
    assert engine.peak_kv <= 1000
    assert engine.kv == 0
    assert engine.counts.tokens == 20 * 300


def test_without_shortage_nothing_is_put_back() -> None:
    model = EngineModel(0.01, 0.0, 0.0, 0.0, max_running=3, kv_tokens=1000)
    engine = Engine(model, reserve_tokens=300)
    play(engine, [Arrival(0.0, 20, 300) for _ in range(6)])
    assert engine.counts.retractions == 0
    assert engine.peak_kv == 3 * 320


def test_a_pause_begins_after_the_iteration_and_the_spans_say_who_sampled() -> None:
    model = EngineModel(0.1, 0.0, 0.0, 0.0, max_running=3, kv_tokens=1000)
    engine = Engine(model)
    engine.resume(0, 0.0)
    engine.add(Request(0, 0, 0, 10, 20), 0.0)
    engine.pause(0.55)  # in the sixth iteration, which ends at 0.6
    engine.advance(5.0)
    assert engine.counts.tokens == 6
    engine.resume(1, 5.0)
    assert engine.next_at() == pytest.approx(5.0 + 1.4)
    engine.advance(7.0)
    [(at, request)] = engine.take_finished()
    assert at == pytest.approx(6.4)
    assert request.spans() == [VersionSpan(0, 0, 6), VersionSpan(1, 6, 20)]


def test_a_pause_that_empties_the_cache_has_all_prefilled_again() -> None:
    model = EngineModel(0.1, 0.0, 0.0, 0.01, max_running=3, kv_tokens=9999, recomputes_cache=True)
    engine = Engine(model)
    engine.resume(0, 0.0)
    for index in range(2):
        # Of one prompt, which is prefilled once: 0.1 s. The second joins after an iteration.
        engine.add(Request(index, 0, 7, 10, 20), 0.0)
    engine.pause(0.65)  # in the sixth iteration, which ends at 0.7
    engine.advance(5.0)
    assert (engine.counts.tokens, engine.kv, engine.running, engine.in_flight) == (6 + 5, 0, 0, 2)
    # What comes meanwhile waits behind them.
    engine.add(Request(2, 0, 8, 10, 1), 5.0)
    engine.resume(1, 5.0)
    # A prompt, six and five tokens, and the other prompt; the third one ends first.
    assert engine.next_at() == pytest.approx(5.0 + 0.01 * (10 + 6 + 5 + 10) + 0.1)
    engine.advance(9.0)
    found = {request.lease_id: (at, request.spans()) for at, request in engine.take_finished()}
    for index, done in enumerate((6, 5)):
        spans = [VersionSpan(0, 0, done), VersionSpan(1, done, 20)]
        assert found[index] == (pytest.approx(5.31 + 0.1 * (20 - done)), spans)
    assert found[2] == (pytest.approx(5.41), [VersionSpan(1, 0, 1)])
    assert engine.counts.retractions == 0


def test_versions_without_a_token_leave_no_span() -> None:
    request = Request(0, 0, 0, 10, 5, starts=[(0, 0), (1, 0), (2, 3), (2, 4), (3, 5)])
    assert request.spans() == [VersionSpan(1, 0, 3), VersionSpan(2, 3, 5)]
