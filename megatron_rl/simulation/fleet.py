"""The simulated generators: engines that take leases, return rollouts, die and come back.

Used by the simulation. Says to the queue what real generators say, in the same messages.
"""

import dataclasses
import random
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
from megatron_rl.simulation.engine import RESERVE_TOKENS, Engine, EngineModel, Request
from megatron_rl.simulation.events import EventClock
from megatron_rl.simulation.machines import Faults
from megatron_rl.simulation.queue import make_rollout
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


@dataclasses.dataclass(frozen=True)
class FleetTotals:
    """Over all generators since the last reset."""

    idle_s: float
    """With nothing in flight, dead ones included."""
    running_s: float
    latency_s: float
    finished: int
    tokens: int
    iterations: int
    retractions: int
    deaths: int
    timeouts: int
    """Completions that took longer than expert.generator.request_timeout_s."""


class Fleet:
    """All generators of a run."""

    def __init__(
        self,
        clock: EventClock,
        queue: Coordinator,
        model: EngineModel,
        workload: Workload,
        *,
        replicas: int,
        max_new_tokens: int,
        request_timeout_s: float,
        faults: Faults,
        on_restart: Callable[[Generator], None],
    ) -> None:
        """on_restart: called with an engine that restarted and waits for weights."""
        self._clock, self._queue, self._model = clock, queue, model
        self._workload, self._faults = workload, faults
        self._cap, self._timeout_s = max_new_tokens, request_timeout_s
        self._on_restart = on_restart
        self._draw = random.Random(f"{workload.seed}/faults")
        names = [f"generator-{i}" for i in range(replicas)]
        self.generators = {name: Generator(name, self._new_engine()) for name in names}
        self._deaths = self._timeouts = 0
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
        now, workload = self._clock.now, self._workload
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
        for request in requests:
            generator.engine.add(request, now)
        self._changed(generator)

    def take_cancel(self, name: str, cancel: Cancel) -> None:
        """Stop what is left of a lease."""
        generator = self.generators[name]
        self._note(generator)
        generator.engine.cancel(cancel.lease_id, self._clock.now)
        self._changed(generator)

    def pause(self, generator: Generator, session: int) -> None:
        """A weight sync to a generator begins."""
        if generator.is_alive and generator.session == session:
            self._note(generator)
            generator.engine.pause(self._clock.now)
            self._changed(generator)

    def resume(self, generator: Generator, session: int, version: int) -> None:
        """It has the weights of a version."""
        if generator.is_alive and generator.session == session:
            self._note(generator)
            generator.engine.resume(version, self._clock.now)
            self._changed(generator)
            self.announce(generator)

    def announce(self, generator: Generator) -> None:
        """Tell the queue of a generator."""
        engine = generator.engine
        version = engine.version if engine.pending_version is None else engine.pending_version
        ready = GeneratorReady(self._model.max_running, version, generator.session)
        self._queue.handle(PROMPTS, generator.name, ready, self._clock.now)

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

    def reset(self) -> None:
        """Count from here on."""
        self._deaths = self._timeouts = 0
        for generator in self.generators.values():
            self._note(generator)
            generator.idle_s = generator.running_s = generator.latency_s = 0.0
            generator.finished = 0
            generator.engine.tokens = generator.engine.retractions = 0
            generator.engine.counted_iterations = 0

    def totals(self) -> FleetTotals:
        """Since the last reset."""
        for generator in self.generators.values():
            self._note(generator)
            if generator.is_alive:
                generator.engine.advance(self._clock.now)
                self._deliver(generator)
        everybody = self.generators.values()
        return FleetTotals(
            idle_s=sum(g.idle_s for g in everybody),
            running_s=sum(g.running_s for g in everybody),
            latency_s=sum(g.latency_s for g in everybody),
            finished=sum(g.finished for g in everybody),
            tokens=sum(g.engine.tokens for g in everybody),
            iterations=sum(g.engine.counted_iterations for g in everybody),
            retractions=sum(g.engine.retractions for g in everybody),
            deaths=self._deaths,
            timeouts=self._timeouts,
        )

    # --- time -------------------------------------------------------------------------------------

    def _note(self, generator: Generator) -> None:
        """Count the time since the last look, in which nothing joined or ended."""
        passed = self._clock.now - generator.seen_at
        generator.seen_at = self._clock.now
        if not generator.is_alive or not generator.engine.in_flight:
            generator.idle_s += passed
        else:
            generator.running_s += passed * generator.engine.running

    def _changed(self, generator: Generator) -> None:
        self._deliver(generator)
        self._set_event(generator)

    def _set_event(self, generator: Generator) -> None:
        generator.stamp += 1
        when = generator.engine.next_at()
        if when < float("inf"):
            self._clock.at(when, partial(self._wake, generator, generator.stamp))

    def _wake(self, generator: Generator, stamp: int) -> None:
        if stamp != generator.stamp or not generator.is_alive:
            return
        self._note(generator)
        generator.engine.advance(self._clock.now)
        self._changed(generator)

    def _deliver(self, generator: Generator) -> None:
        for _, request in generator.engine.take_finished():
            self._hand_over(generator, request)

    def _hand_over(self, generator: Generator, request: Request) -> None:
        now = self._clock.now
        generator.latency_s += now - request.leased_at
        generator.finished += 1
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
        )
        self._queue.handle(PROMPTS, generator.name, RolloutDone(rollout), now)

    # --- deaths -----------------------------------------------------------------------------------

    def _await_death(self, generator: Generator) -> None:
        if not (rate := self._faults.deaths_per_engine_hour / 3600.0):
            return
        when = self._clock.now + self._draw.expovariate(rate)
        self._clock.at(when, partial(self._die, generator))

    def _die(self, generator: Generator) -> None:
        self._note(generator)
        generator.is_alive = False
        self._deaths += 1
        dead = generator.engine
        generator.engine = self._new_engine()
        generator.engine.tokens, generator.engine.retractions = dead.tokens, dead.retractions
        generator.engine.counted_iterations = dead.counted_iterations
        self._clock.at(
            self._clock.now + self._faults.restart_s, partial(self._come_back, generator)
        )

    def _come_back(self, generator: Generator) -> None:
        self._note(generator)
        generator.is_alive = True
        generator.session += 1
        self._await_death(generator)
        self._on_restart(generator)
