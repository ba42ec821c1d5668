"""Generator process: leases completions from the queue and returns each as it finishes.

Entry: `python -m generation.worker --config RUN_DIR/config.toml [--index 0]`. DEALER to the queue's
prompts endpoint (GeneratorReady, Lease, Cancel, Hold, RolloutDone, RolloutsTaken, RolloutFailed,
Stop) and to the trainer's weights endpoint (see `weight_client.py`). It never waits for the
trainer. It keeps each completion until the queue confirms it by RolloutsTaken.

Concurrency, one event loop:

| task          | waits for                    | produces                   | ends               |
|---------------|------------------------------|----------------------------|--------------------|
| `_receive`    | the queue's next message     | a `_serve` for each lease  | at Stop            |
| `_serve` (n)  | the engine's next completion | RolloutDone, RolloutFailed | at its end, Cancel |
| `_report`     | a clock                      | GeneratorReady             | never              |
| weight client | the syncer's next message | Ack, Failed; new versions  | never              |
| engine watch  | the death of the engine      | EngineError                | then               |
| `watch_work`  | a clock                      | EngineError                | when it hangs      |
| `_leave`      | SIGUSR2, then its leases     | GeneratorReady             | when it has left   |
| `interrupted` | SIGTERM, SIGINT              | the signal's number        | then               |

The first of these tasks to end, `_serve` excepted, ends the process: the others are cancelled, then
the sockets and the engine are closed. `_serve` tasks belong to `_receive`; the capacity in
GeneratorReady bounds the queue's leases, and so their number.
"""

import argparse
import asyncio
import logging
import math
import sys
import time
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from generation.async_sockets import AsyncDealer
from generation.engine import Engine, EngineError, engine_setup, load_engine
from generation.episodes import Environments, Episodes, capacity_of, open_environments
from generation.health import Activity, CountingEngine, EngineHealth, watch_work
from generation.meeting import call_path
from generation.rollouts import Completions, Work
from generation.sglang_nodes import SpreadSGLangEngine
from generation.tasks import LeaveRequest, end_with_first, interrupted
from generation.unconfirmed import Unconfirmed
from generation.weight_client import WeightClient, start_engine
from megatron_rl.config.algorithm import GoldConfig
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.protocol.endpoints import PROMPTS, WEIGHTS
from megatron_rl.protocol.generator_messages import PROMPT_UNRENDERABLE
from megatron_rl.protocol.keys import load_keys
from megatron_rl.protocol.process import EXIT_FAILED, Interrupted, run_main, set_up_logging
from megatron_rl.protocol.render import Renderer, RenderError, forbid_torch, open_renderer
from megatron_rl.protocol.types import (
    Cancel,
    GeneratorReady,
    Hold,
    Lease,
    RolloutDone,
    RolloutFailed,
    RolloutsTaken,
    Stop,
)
from megatron_rl.protocol.wire import WireError

log = logging.getLogger(__name__)

READY_S = 2.0
LOOK_S = 0.2
GOODBYE_S = 5.0
"""Wait of a leaving generator for the queue's last word."""
RECEIVE_S = 60.0
FAIL_PAUSE_S = 1.0
"""Seconds before a failure is reported: SGLang's server outlives its scheduler by less."""
SERVED = ("sglang", "vllm")
"""Engines that are a child of this process, which therefore needs no torch."""


class GeneratorWorker:
    """Serves leases with one engine."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        queue: AsyncDealer,
        capacity: int,
        *,
        gold: GoldConfig | None = None,
        request_timeout_s: float = 300.0,
        environments: Environments | None = None,
    ) -> None:
        """gold: find the place of the reference answer in completions.

        request_timeout_s: of the engine, after which it hangs. environments: of its tasks, if any.
        """
        counts_passes = isinstance(engine, CountingEngine)
        health = EngineHealth(request_timeout_s, counts_passes=counts_passes)
        work = Work(engine, renderer, health, Activity())
        self._health, self._activity = work.health, work.activity
        self._completions = Completions(work, gold)
        self._episodes = Episodes(work, environments or Environments({}))
        self._engine = engine
        self._queue = queue
        self._capacity = capacity
        self._session = time.time_ns()
        self._owed: dict[int, set[int]] = {}
        """Lease -> indices of completions that the queue awaits."""
        self._unconfirmed = Unconfirmed()
        self._serving: dict[int, asyncio.Task[None]] = {}
        """Lease -> its task."""
        self._is_leaving = False
        self._weights: WeightClient | None = None

    async def run(self, weights: AsyncDealer, leave: LeaveRequest | None = None) -> None:
        """Serve until the queue says Stop. Raises EngineError when the engine dies or hangs.

        leave: the request to leave the run.
        """
        self._weights = WeightClient(weights, self._engine, self.announce)
        await end_with_first(
            self._receive(),
            self._report(),
            self._weights.run(),
            self._watch_engine(),
            watch_work(self._engine, self._health, self._activity, self._weights),
            self._leave(leave or LeaveRequest()),
        )

    def announce(self) -> None:
        """Report capacity, version and activity to the queue."""
        if self._engine.version >= 0:
            self._activity.start(time.monotonic())
        is_held = self._weights is not None and self._weights.is_held
        self._queue.send(
            GeneratorReady(
                self._capacity,
                self._engine.version,
                self._session,
                is_held,
                self._unfinished(),
                activity=self._episodes.add_to(self._activity.report(time.monotonic())),
                active=self._episodes.pop_active(),
                is_leaving=self._is_leaving,
            )
        )

    def _unfinished(self) -> list[int]:
        """Leases that the queue should not take for lost; when leaving, all unconfirmed ones."""
        owed = {lease_id for lease_id, waiting in self._owed.items() if waiting}
        now = math.inf if self._is_leaving else time.monotonic()
        return sorted(owed | self._unconfirmed.late_leases(now))

    async def _leave(self, request: LeaveRequest) -> None:
        """Once asked, finish the leases within the limit, give the others back, and end."""
        await request.asked.wait()
        assert self._weights is not None
        log.info("leaves the run with %d leases, within %.0f s", len(self._owed), request.limit_s)
        self._is_leaving = True
        self._weights.leave()
        self.announce()
        ends_at = time.monotonic() + request.limit_s
        while self._unfinished() and time.monotonic() < ends_at:
            await asyncio.sleep(LOOK_S)
        for task in self._serving.values():
            task.cancel()
        self._owed.clear()
        self._unconfirmed = Unconfirmed()
        self.announce()
        # The queue's Stop comes sooner.
        await asyncio.sleep(GOODBYE_S)

    def _hold(self, *, is_held: bool) -> None:
        assert self._weights is not None
        # The syncer first: once the queue knows, it admits a later version.
        self._weights.hold(is_held=is_held)
        self.announce()

    async def _receive(self) -> None:
        """Serve leases until Stop. Raises errors that `_serve` does not report to the queue."""
        try:
            await self._receive_leases()
        except ExceptionGroup as group:
            # A fault of the queue is logged as one line, not as a group with a traceback.
            wire_error = next((e for e in group.exceptions if isinstance(e, WireError)), None)
            if wire_error is None:
                raise
            raise wire_error from None

    async def _receive_leases(self) -> None:
        serving = self._serving
        async with asyncio.TaskGroup() as leases:
            while True:
                message = await self._queue.next_message(RECEIVE_S)
                match message:
                    case Lease() if self._is_leaving:
                        # It crossed the announcement, which does not name it.
                        continue
                    case Lease(lease_id) if lease_id in serving:
                        log.warning("lease %d came twice", lease_id)
                    case Lease():
                        self._owed[message.lease_id] = set(message.indices)
                        task = leases.create_task(self._serve(message))
                        serving[message.lease_id] = task
                        task.add_done_callback(partial(self._forget, message.lease_id))
                    case Cancel(lease_id):
                        # None: the lease finished while the message was on its way.
                        if (task := serving.get(lease_id)) is not None:
                            log.info("lease %d is cancelled", lease_id)
                            # A cancel is no progress: leases of a hanging engine are cancelled too.
                            task.cancel()
                    case Hold(is_held):
                        self._hold(is_held=is_held)
                    case RolloutsTaken(completions):
                        self._unconfirmed.confirm(completions)
                    case Stop():
                        log.info("the queue said stop: %s", message.reason)
                        break
                    case None:
                        continue
                    case _:
                        raise WireError(f"the queue sent a {type(message).__name__}")
            for task in serving.values():
                task.cancel()

    async def _serve(self, lease: Lease) -> None:
        """Generate the completions of a lease; report each failure with its reason."""
        waiting = self._owed.setdefault(lease.lease_id, set(lease.indices))
        try:
            if self._engine.version < 0:
                # For a dead generator of this name, or sent before the queue knew of the fence.
                raise EngineError("it has no weights of the trainer yet")
            is_episode = lease.prompt.task in self._episodes.targets
            source = self._episodes if is_episode else self._completions
            rollouts = source.rollouts(lease)
            async with aclosing(rollouts):
                async for one in rollouts:
                    waiting.discard(one.index)
                    if isinstance(one, RolloutFailed):
                        log.warning("prompt %s: %s", lease.prompt.id, one.reason)
                        self._queue.send(one)
                        continue
                    done = RolloutDone(one)
                    self._unconfirmed.note_sent(done, time.monotonic())
                    self._queue.send(done)
        except EngineError as error:
            # A dying engine fails all requests at once: the watch of its end cancels this task.
            await asyncio.sleep(FAIL_PAUSE_S)
            self._fail(lease, waiting, str(error))
        except RenderError as error:
            self._fail(lease, waiting, str(error), drop_as=PROMPT_UNRENDERABLE)

    def _forget(self, lease_id: int, task: object) -> None:
        del self._serving[lease_id]
        # Also a lease that was cancelled before it began.
        self._owed.pop(lease_id, None)

    def _fail(self, lease: Lease, waiting: set[int], reason: str, drop_as: str = "") -> None:
        log.warning("lease %d of prompt %s: %s", lease.lease_id, lease.prompt.id, reason)
        for index in sorted(waiting):
            self._queue.send(RolloutFailed(lease.lease_id, index, reason, drop_as))

    async def _report(self) -> None:
        while True:
            for done in self._unconfirmed.pop_due(time.monotonic()):
                self._queue.send(done)
            self.announce()
            await asyncio.sleep(READY_S)

    async def _watch_engine(self) -> None:
        raise EngineError(await self._engine.failed())


@dataclass(frozen=True)
class Spread:
    """An engine with ranks on several nodes, led by this node."""

    nodes: int
    address: str
    """Address of this node, for the others."""


def open_engine(
    config: Config, index: int, stop_ids: tuple[int, ...], spread: Spread | None
) -> Engine:
    """Make the engine of a generator, not started; needs an event loop if it has several nodes."""
    setup = engine_setup(config, index, stop_ids)
    if spread is None:
        return load_engine(config.generator.engine)(setup)
    call = call_path(config.run.dir, index)
    return SpreadSGLangEngine(setup, nodes=spread.nodes, address=spread.address, call=call)


async def generate_for(
    config: Config, index: int, renderer: Renderer, spread: Spread | None, scorer: str
) -> None:
    """Start the engine and serve; everything is closed on the way out."""
    engine = open_engine(config, index, renderer.stop_ids, spread)
    identity = f"generator-{index}"
    leave = LeaveRequest(config.nodes.leave_timeout_s)
    leave.listen()
    host, ports = config.ports.host, config.ports
    connect = partial(
        AsyncDealer, identity=identity, keys=load_keys(ports.keys_dir), label=ports.label
    )
    try:
        # Early: an engine that shares the trainer's memory asks the trainer before it starts.
        with connect(f"{host}:{ports.weights}", endpoint=WEIGHTS) as weights:
            await end_with_first(start_engine(config, engine, weights), leave.asked.wait())
            if leave.asked.is_set():
                return
            with connect(f"{host}:{ports.prompts}", endpoint=PROMPTS) as queue:
                async with open_environments(config, identity, scorer) as environments:
                    worker = GeneratorWorker(
                        engine,
                        renderer,
                        queue,
                        capacity_of(config),
                        gold=config.algorithm.used_gold,
                        request_timeout_s=config.generator.request_timeout_s,
                        environments=environments,
                    )
                    await worker.run(weights, leave)
        if isinstance(engine, SpreadSGLangEngine):
            engine.dismiss()
    finally:
        await engine.close()


def main(
    config_path: Path, overrides: list[str], index: int, spread: Spread | None, scorer: str
) -> None:
    """Serve until the queue says Stop or a signal arrives. scorer: address of its node."""
    config = load_config(config_path, overrides)
    set_up_logging(f"generator-{index}", config.run.dir / "logs", in_background=True)
    if config.generator.engine in SERVED:
        forbid_torch()
    renderer = open_renderer(config)
    work = generate_for(config, index, renderer, spread, scorer)
    try:
        number = asyncio.run(end_with_first(interrupted(), work))
    except EngineError as error:
        log.error("%s", error)
        raise SystemExit(EXIT_FAILED) from error
    if number is not None:
        raise Interrupted(128 + number)


def parse_arguments() -> argparse.Namespace:
    """Command line of a generator."""
    parser = argparse.ArgumentParser(description="Generator: completions from one engine.")
    parser.add_argument(
        "--config", type=Path, required=True, help="resolved config.toml of the run"
    )
    parser.add_argument("--index", type=int, default=0, help="which generator of the run this is")
    parser.add_argument("--nodes", type=int, default=1, help="nodes of the engine")
    parser.add_argument("--address", default="", help="of this node, for the engine's other nodes")
    parser.add_argument("--scorer", default="", help="address of the judge's node")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    return parser.parse_intermixed_args()


def start() -> int:
    """Entry of the process."""
    options = parse_arguments()
    spread = Spread(options.nodes, options.address) if options.nodes > 1 else None
    work = partial(main, options.config, options.overrides, options.index, spread, options.scorer)
    return run_main(f"generator-{options.index}", work)


if __name__ == "__main__":
    sys.exit(start())
