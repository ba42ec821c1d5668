"""The simulated generators: engines that take leases, return rollouts, die and restart.

Generators exchange the real messages with the queue.
"""

import dataclasses
import random
from collections.abc import Callable
from functools import partial

from megatron_rl.protocol.rollout import ConversationTurn
from megatron_rl.protocol.types import (
    Cancel,
    GeneratorReady,
    Lease,
    RolloutDone,
    RolloutFailed,
)  # fmt: skip
from megatron_rl.rollout_queue.coordinator import PROMPTS
from megatron_rl.simulation.engine import RESERVE_TOKENS, Counts, Engine, Request
from megatron_rl.simulation.queue import VirtualRun, make_rollout


@dataclasses.dataclass
class Generator:
    """One engine and its state."""

    name: str
    engine: Engine
    session: int = 1
    is_alive: bool = True
    stamp: int = 0
    """Number of its last scheduled event; earlier events are void."""
    seen_at: float = 0.0
    """End of its counted time."""
    cancelled: set[int] = dataclasses.field(default_factory=set)
    """Cancelled leases, whose conversations may wait for their environments."""


@dataclasses.dataclass
class FleetTotals(Counts):
    """Totals of all generators since the last reset."""

    idle_s: float = 0.0
    """Time without completions, or dead."""
    running_s: float = 0.0
    """Integral of running completions over time."""
    latency_s: float = 0.0
    """Sum over completions, from lease to end."""
    finished: int = 0
    deaths: int = 0
    timeouts: int = 0
    """Completions that took longer than expert.generator.request_timeout_s."""


class Fleet:
    def __init__(self, run: VirtualRun, on_restart: Callable[[Generator], None]) -> None:
        """on_restart: called with a restarted generator that waits for weights."""
        self._run, self._on_restart = run, on_restart
        self._cap = run.config.sampling.max_new_tokens
        self._draw = random.Random(f"{run.workload.seed}/faults")
        self._totals = FleetTotals()
        names = [f"generator-{i}" for i in range(run.config.generator.replicas)]
        self.generators = {name: Generator(name, self._new_engine()) for name in names}
        for number, generator in enumerate(self.generators.values()):
            generator.is_alive = number >= run.model.faults.dead_from_start
            if generator.is_alive:
                self._await_death(generator)

    def _new_engine(self) -> Engine:
        reserve_tokens = min(RESERVE_TOKENS, self._cap)
        return Engine(self._run.model.engine, reserve_tokens=reserve_tokens, counts=self._totals)

    # --- messages of the queue and the trainer ------------------------------------------------

    def take_lease(self, name: str, lease: Lease) -> None:
        """Generate the completions of a lease."""
        generator = self.generators[name]
        if not generator.is_alive:
            return
        now, workload = self._run.now, self._run.workload
        group, cap = lease.sampling.seed, lease.sampling.max_new_tokens
        self._count_time(generator)
        for index in lease.indices:
            first, *later = workload.replies(group, index, workload.tokens(group, index, cap))
            request = Request(
                lease.lease_id, index, group, workload.prompt_tokens, first.end,
                leased_at=now, asked_at=now, later=later,
            )  # fmt: skip
            generator.engine.add(request, now)
        self._changed(generator)

    def take_cancel(self, name: str, cancel: Cancel) -> None:
        """Drop the unfinished completions of a lease."""
        generator = self.generators[name]
        self._count_time(generator)
        if self._run.workload.conversation.replies > 1:
            generator.cancelled.add(cancel.lease_id)
        generator.engine.cancel(cancel.lease_id, self._run.now)
        self._changed(generator)

    def pause(self, generator: Generator, session: int) -> None:
        """Begin a weight sync to a generator."""
        if generator.is_alive and generator.session == session:
            self._count_time(generator)
            generator.engine.pause(self._run.now)
            self._changed(generator)

    def resume(self, generator: Generator, session: int, version: int) -> None:
        """End a weight sync of a version to a generator."""
        if generator.is_alive and generator.session == session:
            self._count_time(generator)
            generator.engine.resume(version, self._run.now)
            self._changed(generator)
            self._announce(generator)

    def _announce(self, generator: Generator) -> None:
        engine = generator.engine
        version = engine.version if engine.pending_version is None else engine.pending_version
        slots = self._run.model.engine.max_running
        if self._run.workload.conversation.replies > 1:
            # A conversation that waits for its environment holds no slot of the engine.
            slots = max(slots, self._run.config.environments.max_episodes)
        self._run.say(PROMPTS, generator.name, GeneratorReady(slots, version, generator.session))

    def beat(self) -> None:
        """Send the heartbeats of all live generators."""
        for generator in self.live:
            if generator.engine.version >= 0:
                self._announce(generator)

    # --- state ----------------------------------------------------------------------------------

    @property
    def live(self) -> list[Generator]:
        """Generators that can take a weight sync."""
        return [generator for generator in self.generators.values() if generator.is_alive]

    def reset(self) -> None:
        for generator in self.generators.values():
            self._count_time(generator)
        # The engines count into the same object.
        vars(self._totals).update(vars(FleetTotals()))

    def totals(self) -> FleetTotals:
        for generator in self.generators.values():
            self._count_time(generator)
            if generator.is_alive:
                generator.engine.advance(self._run.now)
                self._deliver(generator)
        return self._totals

    # --- time -------------------------------------------------------------------------------------

    def _count_time(self, generator: Generator) -> None:
        """Count the time since the last call, in which no completion joined or ended."""
        passed = self._run.now - generator.seen_at
        generator.seen_at = self._run.now
        if not generator.is_alive or not generator.engine.in_flight:
            self._totals.idle_s += passed
        else:
            self._totals.running_s += passed * generator.engine.running

    def _changed(self, generator: Generator) -> None:
        """Deliver finished completions and schedule the engine's next change."""
        self._deliver(generator)
        generator.stamp += 1
        when = generator.engine.next_at()
        if when < float("inf"):
            self._run.at(when, partial(self._wake, generator, generator.stamp))

    def _wake(self, generator: Generator, stamp: int) -> None:
        if stamp != generator.stamp or not generator.is_alive:
            return
        self._count_time(generator)
        generator.engine.advance(self._run.now)
        self._changed(generator)

    def _deliver(self, generator: Generator) -> None:
        for _, request in generator.engine.take_finished():
            self._hand_over(generator, request)

    def _go_on(self, generator: Generator, session: int, request: Request) -> None:
        """Request a conversation's next reply, if the conversation still exists."""
        is_same = generator.is_alive and generator.session == session
        if not is_same or request.lease_id in generator.cancelled:
            return
        reply, now, engine = request.later.pop(0), self._run.now, generator.engine
        # Each version of the weights has its own prefix cache.
        request.cached = request.tokens if request.starts[-1][0] == engine.version else 0
        request.generated = request.reply_start = reply.start
        request.tokens, request.asked_at = reply.end, now
        self._count_time(generator)
        engine.add(request, now)
        self._changed(generator)

    def _hand_over(self, generator: Generator, request: Request) -> None:
        now, limit_s = self._run.now, self._run.config.generator.request_timeout_s
        is_late = now - request.asked_at > limit_s
        if request.later or request.turns:
            turn = ConversationTurn(
                request.reply_start, request.tokens, len(request.turns) - 1, [], "",
                request.asked_at - request.leased_at, now - request.leased_at,
                request.prompt_tokens + request.reply_start,
            )  # fmt: skip
            request.turns.append(turn)
        if request.later and not is_late:
            next_reply = partial(self._go_on, generator, generator.session, request)
            self._run.later(request.later[0].wait_s, next_reply)
            return
        self._totals.latency_s += now - request.leased_at
        self._totals.finished += 1
        if is_late:
            self._totals.timeouts += 1
            reason = f"it took longer than {limit_s:.0f} s"
            failed = RolloutFailed(request.lease_id, request.index, reason)
            self._run.say(PROMPTS, generator.name, failed)
            return
        rollout = make_rollout(
            request.lease_id,
            request.index,
            request.spans(),
            prompt_tokens=request.prompt_tokens,
            is_cut=request.tokens >= self._cap,
            turns=request.turns,
        )
        self._run.say(PROMPTS, generator.name, RolloutDone(rollout))

    # --- deaths -----------------------------------------------------------------------------------

    def _await_death(self, generator: Generator) -> None:
        if rate := self._run.model.faults.deaths_per_engine_hour / 3600.0:
            self._run.later(self._draw.expovariate(rate), partial(self._die, generator))

    def _die(self, generator: Generator) -> None:
        self._count_time(generator)
        generator.is_alive = False
        generator.engine = self._new_engine()
        self._totals.deaths += 1
        self._run.later(self._run.model.faults.restart_s, partial(self._restart, generator))

    def _restart(self, generator: Generator) -> None:
        self._count_time(generator)
        generator.is_alive = True
        generator.cancelled.clear()
        generator.session += 1
        self._await_death(generator)
        self._on_restart(generator)
