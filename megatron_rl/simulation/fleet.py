"""The simulated generators: engines that take leases, return rollouts, die and come back.

Used by the simulation. Says to the queue what real generators say, in the same messages.
"""

import dataclasses
import random
from collections import deque
from collections.abc import Callable
from functools import partial

from megatron_rl.protocol.types import (
    Cancel,
    GeneratorReady,
    Lease,
    RolloutDone,
    RolloutFailed,
)  # fmt: skip
from megatron_rl.rollout_queue.coordinator import PROMPTS, Coordinator
from megatron_rl.simulation.engine import RESERVE_TOKENS, Engine, EngineModel, IterationCount
from megatron_rl.simulation.events import Agenda
from megatron_rl.simulation.machines import Faults
from megatron_rl.simulation.queue import make_rollout
from megatron_rl.simulation.request import Request
from megatron_rl.simulation.workload import Workload


@dataclasses.dataclass
class Generator:
    """One engine and what is known of its time."""

    name: str
    engine: Engine
    session: int = 1
    is_alive: bool = True
    stamp: int = 0
    """Of the event that is set for it; earlier ones mean nothing any more."""
    idle_s: float = 0.0
    running_s: float = 0.0
    """Integral of running completions over time."""
    seen_at: float = 0.0
    latency_s: float = 0.0
    """Of all completions together, from lease to end."""
    finished: int = 0
    finished_tokens: int = 0
    arriving: dict[int, list[Request]] = dataclasses.field(default_factory=dict)
    """By lease: completions that are on their way to the engine."""
    takes_until: float = 0.0
    handing_over: deque[Request] = dataclasses.field(default_factory=deque)
    """Completions that ended, and are not with the queue yet."""


@dataclasses.dataclass(frozen=True)
class FleetTotals:
    """Over all generators since the last reset."""

    idle_s: float
    """With nothing in flight, dead ones included."""
    running_s: float
    latency_s: float
    finished: int
    finished_tokens: int
    tokens: int
    iterations: int
    decoded: int
    """Tokens of these iterations: those of prefills are left out."""
    retractions: int
    deaths: int
    timeouts: int
    """Completions that took longer than expert.generator.request_timeout_s."""


class Fleet:
    """All generators of a run."""

    def __init__(
        self,
        agenda: Agenda,
        queue: Coordinator,
        model: EngineModel,
        workload: Workload,
        *,
        replicas: int,
        max_new_tokens: int,
        request_timeout_s: float,
        faults: Faults,
        on_change: Callable[[], None],
        on_restart: Callable[[Generator], None],
    ) -> None:
        """on_change: engines begin or cease to compute; on_restart: one waits for weights."""
        self._agenda, self._queue, self._model = agenda, queue, model
        self._workload, self._faults = workload, faults
        self._cap, self._timeout_s = max_new_tokens, request_timeout_s
        self._on_change, self._on_restart = on_change, on_restart
        self._draw = random.Random(f"{workload.seed}/faults")
        names = [f"generator-{i}" for i in range(replicas)]
        self.generators = {name: Generator(name, self._new_engine()) for name in names}
        self._deaths = self._timeouts = 0
        self._share = self._pace = self._speed = 1.0
        for number, generator in enumerate(self.generators.values()):
            generator.is_alive = number >= faults.dead_from_start
            if generator.is_alive:
                self._await_death(generator)

    def _new_engine(self) -> Engine:
        return Engine(self._model, reserve_tokens=min(RESERVE_TOKENS, self._cap))

    # --- what the queue and the syncer say ---------------------------------------------------

    def take_lease(self, name: str, lease: Lease) -> None:
        """Generate what is leased."""
        generator = self.generators[name]
        if not generator.is_alive:
            return
        now, workload = self._agenda.now, self._workload
        group, cap = lease.sampling.seed, lease.sampling.max_new_tokens
        requests = [
            Request(
                lease.lease_id,
                index,
                group,
                workload.prompt_tokens,
                workload.tokens(group, index, cap),
                leased_at=now,
            )
            for index in lease.indices
        ]
        self._note(generator)
        if not self._model.lease_s:
            self._add(generator, requests)
            return
        # A measured time, as that of a hand-over.
        generator.takes_until = max(now, generator.takes_until) + self._model.lease_s
        generator.arriving[lease.lease_id] = requests
        arrives = partial(self._reach_engine, generator, lease.lease_id)
        self._agenda.at(generator.takes_until, arrives)

    def _reach_engine(self, generator: Generator, lease_id: int) -> None:
        # None: it was cancelled, or its generator died.
        if (requests := generator.arriving.get(lease_id)) is not None:
            self._note(generator)
            del generator.arriving[lease_id]
            self._add(generator, requests)

    def _add(self, generator: Generator, requests: list[Request]) -> None:
        for request in requests:
            generator.engine.add(request, self._agenda.now)
        self._changed(generator)

    def take_cancel(self, name: str, cancel: Cancel) -> None:
        """Stop what is left of a lease."""
        generator = self.generators[name]
        self._note(generator)
        generator.arriving.pop(cancel.lease_id, None)
        generator.engine.cancel(cancel.lease_id, self._agenda.now)
        self._changed(generator)

    def pause(self, generator: Generator, session: int) -> None:
        """A weight sync to a generator begins."""
        if generator.is_alive and generator.session == session:
            self._note(generator)
            generator.engine.pause(self._agenda.now)
            self._changed(generator)

    def resume(self, generator: Generator, session: int, version: int) -> None:
        """It has the weights of a version."""
        if generator.is_alive and generator.session == session:
            self._note(generator)
            generator.engine.resume(version, self._agenda.now)
            self._changed(generator)
            self.announce(generator)

    def announce(self, generator: Generator) -> None:
        """Tell the queue of a generator."""
        engine = generator.engine
        version = engine.version if engine.pending_version is None else engine.pending_version
        ready = GeneratorReady(self._model.max_running, version, generator.session)
        self._queue.handle(PROMPTS, generator.name, ready, self._agenda.now)

    def beat(self) -> None:
        """The heartbeats of all that live."""
        for generator in self.live:
            if generator.engine.version >= 0:
                self.announce(generator)

    # --- state ----------------------------------------------------------------------------------

    @property
    def live(self) -> list[Generator]:
        """Those that can take a weight sync."""
        return [generator for generator in self.generators.values() if generator.is_alive]

    @property
    def working(self) -> int:
        """Engines that compute."""
        return sum(g.engine.is_working for g in self.generators.values() if g.is_alive)

    @property
    def handing_over(self) -> int:
        """Generators that bring completions to the queue."""
        return sum(bool(g.handing_over) for g in self.generators.values())

    def set_speed(self, speed: float) -> None:
        """All engines compute with another share of their full speed."""
        self._share = speed
        self._apply_speed()

    def begin_step(self, step: int) -> None:
        """The trainer begins a step: engines are as fast as they are in that one."""
        pace = self._model.paces[step % len(self._model.paces)]
        if pace != self._pace:
            self._pace = pace
            self._apply_speed()

    def _apply_speed(self) -> None:
        self._speed = speed = self._share / self._pace
        for generator in self.live:
            self._note(generator)
            generator.engine.set_speed(speed, self._agenda.now)
            self._set_event(generator)

    def reset(self) -> None:
        """Count from here on."""
        self._deaths = self._timeouts = 0
        for generator in self.generators.values():
            self._note(generator)
            generator.idle_s = generator.running_s = generator.latency_s = 0.0
            generator.finished = generator.finished_tokens = 0
            generator.engine.tokens = generator.engine.retractions = 0
            generator.engine.counted = IterationCount()

    def totals(self) -> FleetTotals:
        """Since the last reset."""
        for generator in self.generators.values():
            self._note(generator)
            if generator.is_alive:
                generator.engine.advance(self._agenda.now)
                self._deliver(generator)
        everybody = self.generators.values()
        return FleetTotals(
            idle_s=sum(g.idle_s for g in everybody),
            running_s=sum(g.running_s for g in everybody),
            latency_s=sum(g.latency_s for g in everybody),
            finished=sum(g.finished for g in everybody),
            finished_tokens=sum(g.finished_tokens for g in everybody),
            tokens=sum(g.engine.tokens for g in everybody),
            iterations=sum(g.engine.counted.iterations for g in everybody),
            decoded=sum(g.engine.counted.tokens for g in everybody),
            retractions=sum(g.engine.retractions for g in everybody),
            deaths=self._deaths,
            timeouts=self._timeouts,
        )

    # --- time -------------------------------------------------------------------------------------

    def _note(self, generator: Generator) -> None:
        """Count the time since the last look, in which nothing joined or ended."""
        passed = self._agenda.now - generator.seen_at
        generator.seen_at = self._agenda.now
        has_work = generator.engine.in_flight or generator.arriving or generator.handing_over
        if not generator.is_alive or not has_work:
            generator.idle_s += passed
        else:
            generator.running_s += passed * generator.engine.running

    def _changed(self, generator: Generator) -> None:
        self._deliver(generator)
        self._set_event(generator)
        self._on_change()

    def _set_event(self, generator: Generator) -> None:
        generator.stamp += 1
        when = generator.engine.next_at()
        if when < float("inf"):
            self._agenda.at(when, partial(self._wake, generator, generator.stamp))

    def _wake(self, generator: Generator, stamp: int) -> None:
        if stamp != generator.stamp or not generator.is_alive:
            return
        self._note(generator)
        generator.engine.advance(self._agenda.now)
        self._changed(generator)

    def _deliver(self, generator: Generator) -> None:
        hand_over_s = self._model.hand_over_s
        for _, request in generator.engine.take_finished():
            if not hand_over_s:
                self._hand_over(generator, request)
                continue
            generator.handing_over.append(request)
            if len(generator.handing_over) == 1:
                self._begin_hand_over(generator)

    def _begin_hand_over(self, generator: Generator) -> None:
        # As fast as the cores are when it begins: it takes a fraction of a millisecond.
        ends_at = self._agenda.now + self._model.hand_over_s / self._speed
        self._agenda.at(ends_at, partial(self._reach_queue, generator, generator.session))

    def _reach_queue(self, generator: Generator, session: int) -> None:
        # What an engine had not handed over when it died is lost.
        if generator.is_alive and generator.session == session:
            self._note(generator)
            self._hand_over(generator, generator.handing_over.popleft())
            if generator.handing_over:
                self._begin_hand_over(generator)
            self._on_change()

    def _hand_over(self, generator: Generator, request: Request) -> None:
        now = self._agenda.now
        generator.latency_s += now - request.leased_at
        generator.finished += 1
        generator.finished_tokens += request.tokens
        if now - request.leased_at > self._timeout_s:
            self._timeouts += 1
            reason = f"it took longer than {self._timeout_s:.0f} s"
            failed = RolloutFailed(request.lease_id, request.index, reason)
            self._queue.handle(PROMPTS, generator.name, failed, now)
            return
        rollout = make_rollout(
            request.lease_id,
            request.index,
            request.spans(),
            prompt_tokens=request.prompt_tokens,
            is_cut=request.tokens >= self._cap,
            first_token_s=self._first_token_s(request),
        )
        self._queue.handle(PROMPTS, generator.name, RolloutDone(rollout), now)

    def _first_token_s(self, request: Request) -> float:
        """Seconds from the lease; -1, as from engines that do not say, without a first pass."""
        if not self._model.prefill_samples:
            return -1.0
        return request.first_token_at - request.leased_at

    # --- deaths -----------------------------------------------------------------------------------

    def _await_death(self, generator: Generator) -> None:
        if not (rate := self._faults.deaths_per_engine_hour / 3600.0):
            return
        when = self._agenda.now + self._draw.expovariate(rate)
        self._agenda.at(when, partial(self._die, generator))

    def _die(self, generator: Generator) -> None:
        self._note(generator)
        generator.is_alive = False
        generator.arriving, generator.takes_until = {}, 0.0
        generator.handing_over.clear()
        self._deaths += 1
        dead = generator.engine
        generator.engine = self._new_engine()
        generator.engine.tokens, generator.engine.retractions = dead.tokens, dead.retractions
        generator.engine.counted = dead.counted
        generator.engine.set_speed(self._speed, self._agenda.now)
        self._agenda.at(
            self._agenda.now + self._faults.restart_s, partial(self._come_back, generator)
        )
        self._on_change()

    def _come_back(self, generator: Generator) -> None:
        self._note(generator)
        generator.is_alive = True
        generator.session += 1
        self._await_death(generator)
        self._on_restart(generator)
