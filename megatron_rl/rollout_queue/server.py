"""The rollout queue: `python -m megatron_rl.rollout_queue.server --config RUN/config.toml`.

One process without torch. Its one loop binds the endpoints "prompts" (generators), "verify"
(verifiers) and "batches" (trainer leaders), and sleeps until a message arrives or a check is due.
Threads keep it awake: they write records (`record_files.py`), metrics and logs
(`protocol/background.py`), and deal batches to ranks (`batch_thread.py`). The loop itself writes
the ledger (`ledger.py`) with one call in each pass, and then sends what depends on it. A process
that finds the ledger of a killed one continues it.
"""

import argparse
import gc
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import zmq

from megatron_rl.config.files import load_config
from megatron_rl.config.staging import resolve_stages
from megatron_rl.config.tree import Config, PortsConfig
from megatron_rl.data.dropped_prompts import read_dropped
from megatron_rl.data.prompts import prompts_of_run
from megatron_rl.protocol.background import BackgroundJsonlWriter
from megatron_rl.protocol.checkpoint_folder import find_resume, read_queue_state
from megatron_rl.protocol.endpoints import BATCHES, PROMPTS, VERIFY, Endpoint
from megatron_rl.protocol.generator_messages import RolloutsTaken
from megatron_rl.protocol.keys import load_keys
from megatron_rl.protocol.metrics import JsonlWriter
from megatron_rl.protocol.process import note_ready, raise_file_limit, run_main, set_up_logging
from megatron_rl.protocol.rollout_files import FOLDER
from megatron_rl.protocol.stop_request import is_stop_requested
from megatron_rl.protocol.types import AnyMessage, RolloutDone
from megatron_rl.protocol.wire import Router, WireError
from megatron_rl.rollout_queue.batch_thread import LOOK_S, BatchThread, store_batch
from megatron_rl.rollout_queue.coordinator import Coordinator, Outgoing
from megatron_rl.rollout_queue.faults import FaultyRollout
from megatron_rl.rollout_queue.ledger import Ledger
from megatron_rl.rollout_queue.record_files import RecordFiles, RecordThread, Thinner
from megatron_rl.rollout_queue.recovery import Live, Start
from megatron_rl.rollout_queue.stall import LoopClock

log = logging.getLogger(__name__)

_TICK_S = 1.0
"""Seconds between two checks for overdue work."""
BURST_S = 0.005
"""Time to read from one endpoint before the next: generators wait while long rollouts are read."""
DRAIN_S = 0.5
"""Limit for reading waiting messages before a peer is judged to be silent."""
RECONNECT_S = 5.0
"""Limit for the peers of a killed queue to connect again, which they try every 2 s."""
TURNED_AWAY = "queue/messages_turned_away"
"""Metric: messages of peers that belong to another phase or start of the run."""
_SWITCH_S, _GARBAGE_OBJECTS = 0.0005, 50_000
FILES = 512
"""Files and sockets of the queue, without the two sockets to each peer."""
REFUSED = "queue/messages_refused"
"""Metric: messages that could not be read, or that contradict the state."""
STALLED = "queue/loop_stalled_s"
"""Metric: seconds for which the loop stood still."""
_RECORDED_BATCHES = 2
"""Batches whose groups may wait to be recorded."""


def serve(
    coordinator: Coordinator | Ledger,
    routers: dict[str, Router],
    clock: LoopClock,
    *,
    cold_start: Path | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Run until training and all evaluations are done, then tell all peers to stop.

    cold_start: the folder whose existence marks the end of supervised training, if there is any.
    should_stop: says whether the run is asked to stop before the last step.
    """
    poller = zmq.Poller()
    for router in routers.values():
        poller.register(router.socket, zmq.POLLIN)
    note_ready()
    clock.start()
    inbox = _Inbox(coordinator, routers, clock)
    inbox.await_peers(poller)
    tick_at = clock.read()
    while not coordinator.is_over:
        sleep_s = max(0.0, tick_at - clock.read())
        # The thread that deals a batch does not wake the poller.
        poller.poll(1000 * (min(sleep_s, LOOK_S) if coordinator.is_dealing else sleep_s))
        inbox.receive_bursts()
        now = clock.read()
        if confirms := now >= tick_at:
            if cold_start is not None and cold_start.exists():
                coordinator.expect_trainer(now)
                cold_start = None
            if should_stop():
                coordinator.stop_training()
            has_heard_all = inbox.drain()
            now = clock.read()
            coordinator.tick(now, has_heard_all=has_heard_all)
            inbox.write_counts()
            tick_at = now + _TICK_S
        _send(coordinator, routers, coordinator.outgoing(now))
        if confirms:
            _send(coordinator, routers, inbox.pop_taken())
    inbox.write_counts()
    _send(coordinator, routers, coordinator.farewell(clock.read()))


class _Inbox:
    """Reads the messages of peers, and counts the refused ones."""

    def __init__(
        self, coordinator: Coordinator | Ledger, routers: dict[str, Router], clock: LoopClock
    ) -> None:
        self._coordinator, self._routers = coordinator, routers
        self._clock = clock
        self._taken: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        """(lease id, index) of completions to confirm once the ledger has them, by generator."""
        self._missing: set[tuple[str, str]] = set()
        """(endpoint, name) of the peers of a killed queue that have sent nothing yet."""
        self._told: dict[str, float] = {}

    def await_peers(self, poller: zmq.Poller) -> None:
        """Wait until the peers of a killed queue are connected again, at most RECONNECT_S.

        A message to a peer that is not connected would count as its loss.
        """
        self._missing, until = self._coordinator.peers, time.monotonic() + RECONNECT_S
        while self._missing and time.monotonic() < until:
            poller.poll(int(1000 * LOOK_S))
            self._clock.read()
            self.receive_bursts()

    def pop_taken(self) -> list[Outgoing]:
        """Confirmations of the completions since the last call."""
        taken = [
            Outgoing(PROMPTS.name, peer, RolloutsTaken(completions))
            for peer, completions in self._taken.items()
        ]
        self._taken.clear()
        return taken

    def drain(self) -> bool:
        """Read waiting messages; returns whether none waits any more. Raises as `_hand_on`."""
        until = time.monotonic() + DRAIN_S
        while self.receive_bursts():
            if time.monotonic() > until:
                return False
        return True

    def receive_bursts(self) -> bool:
        """Read from every endpoint for a while; returns whether more may wait.

        Raises as `_hand_on`.
        """
        return any([self._receive_burst(*endpoint) for endpoint in self._routers.items()])

    def _receive_burst(self, endpoint: str, router: Router) -> bool:
        until = time.monotonic() + BURST_S
        while time.monotonic() < until:
            try:
                received = router.receive(timeout_s=0)
            except WireError as error:
                self._refuse(endpoint, error.peer, error)
                continue
            if received is None:
                return False
            self._hand_on(endpoint, *received)
        return True

    def _hand_on(self, endpoint: str, peer: str, message: AnyMessage) -> None:
        """Raises WireError when trainer and queue contradict each other."""
        self._missing.discard((endpoint, peer))
        if isinstance(message, RolloutDone):
            lease_id, index = message.rollout.lease_id, message.rollout.index
            self._taken[peer].append((lease_id, index))
        now, served = self._clock.read(), self._coordinator
        try:
            if isinstance(served, Ledger):
                served.handle(endpoint, peer, message, now, self._routers[endpoint].frames)
            else:
                served.handle(endpoint, peer, message, now)
        except WireError as error:
            # When trainer and queue contradict each other, neither can continue.
            if endpoint == BATCHES.name:
                raise
            self._refuse(endpoint, peer, error)

    def _refuse(self, endpoint: str, peer: str, error: WireError) -> None:
        """Count a message that makes no sense, and give the work of its sender to others."""
        self._routers[endpoint].refuse(peer, error)
        # The completion of a faulty rollout is leased again; its generator keeps the others.
        if not isinstance(error, FaultyRollout):
            self._coordinator.lose(endpoint, peer)

    def write_counts(self) -> None:
        """Write the counts that grew since the last row."""
        counts = {
            TURNED_AWAY: sum(router.turned_away.total() for router in self._routers.values()),
            REFUSED: sum(router.refused.total() for router in self._routers.values()),
            STALLED: round(self._clock.stalled_s, 3),
        }
        grown = {
            name: count - self._told.get(name, 0)
            for name, count in counts.items()
            if count > self._told.get(name, 0)
        }
        self._told = counts
        if grown:
            self._coordinator.write_counts(grown)


def _send(
    coordinator: Coordinator | Ledger, routers: dict[str, Router], messages: Iterable[Outgoing]
) -> None:
    for endpoint, peer, message in messages:
        if not routers[endpoint].send(peer, message):
            coordinator.lose(endpoint, peer)


def main(
    config: Config, *, evaluate_only: str, keeps_evaluated: bool, cold_start: Path | None
) -> None:
    """Load the prompts, open the endpoints, serve."""
    dropped = read_dropped(config.run.dir)
    trains = config.train.steps > 0 and not evaluate_only
    resumed = find_resume(config.checkpoint, config.run.dir) if trains else None
    state = read_queue_state(resumed) if resumed is not None else None
    prompts = prompts_of_run(config, dropped, cursor=state.cursor if state else None)
    log.info("%s", prompts.describe())
    with ExitStack() as stack:
        metrics = BackgroundJsonlWriter(
            config.run.dir / "metrics.jsonl", "queue", limit_s=config.checkpoint.write_timeout_s
        )
        stack.enter_context(closing(metrics))
        live = Live(
            stack.enter_context(_open_maker(config)),
            stack.enter_context(_open_writer(config, metrics)),
            config.run.dir / FOLDER,
            metrics,
            config.run.dir / "metrics.jsonl",
        )
        start = Start(config, prompts, state, live, awaits_cold_start=cold_start is not None)
        served: Coordinator | Ledger
        if trains and config.keeps_ledger:
            served, clock = start.with_ledger()
            stack.enter_context(served)
        else:
            served, clock = start.without_ledger(
                evaluate_only=evaluate_only, keeps_evaluated=keeps_evaluated
            )
        routers = {
            endpoint.name: stack.enter_context(_open_router(config.ports, endpoint))
            for endpoint in (PROMPTS, VERIFY, BATCHES)
        }
        should_stop = partial(is_stop_requested, config.run.dir)
        serve(served, routers, clock, cold_start=cold_start, should_stop=should_stop)
        if isinstance(served, Ledger):
            served.remove()
        log.info("the run is over")


def _open_router(ports: PortsConfig, endpoint: Endpoint) -> Router:
    port, keys = getattr(ports, endpoint.name), load_keys(ports.keys_dir)
    log.info("the %s endpoint is on %s:%d", endpoint.name, ports.host, port)
    return Router(ports.host, port, keys, endpoint=endpoint, label=ports.label)


def _open_maker(config: Config) -> BatchThread:
    if not config.keeps_batches:
        return BatchThread()
    keep_last, limit_s = config.checkpoint.keep_last, config.checkpoint.write_timeout_s
    store = partial(store_batch, config.run.dir, keep_last=keep_last, limit_s=limit_s)
    return BatchThread(store=store)


def _open_writer(config: Config, metrics: JsonlWriter) -> RecordThread:
    folder = config.run.dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    limit_s = config.checkpoint.write_timeout_s
    files = RecordFiles(
        folder,
        keeps_tokens=config.queue.record_tokens,
        thinner=Thinner(config, metrics),
        limit_s=limit_s,
    )
    jobs = _RECORDED_BATCHES * max(stage.sampled_groups for stage in resolve_stages(config))
    return RecordThread(files, jobs=jobs, limit_s=limit_s)


def start() -> int:
    """Entry of the process; returns its exit code."""
    parser = argparse.ArgumentParser(description="the rollout queue of a run")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--evaluate-only", metavar="LABEL", default="")
    parser.add_argument(
        "--keep-evaluated",
        action="store_true",
        help="with --evaluate-only: resume that evaluation from the run folder",
    )
    parser.add_argument(
        "--after",
        metavar="FOLDER",
        type=Path,
        help="supervised training, which ends with this folder, comes before the trainer",
    )
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    options = parser.parse_args()
    set_up_logging("queue")
    return run_main("queue", partial(_load_and_run, options))


def _load_and_run(options: argparse.Namespace) -> None:
    config = load_config(options.config, options.overrides)
    set_up_logging("queue", config.run.dir / "logs", in_background=True)
    # Each call to a socket releases Python's lock, and waits this long for a thread that computes.
    sys.setswitchinterval(_SWITCH_S)
    # Messages have no cycles, and a search for some after every 700 objects slows the loop.
    gc.set_threshold(_GARBAGE_OBJECTS)
    peers = config.generator.replicas + config.parallel.data
    raise_file_limit(FILES + 2 * peers, f"a queue of {peers} generators and trainer leaders")
    main(
        config,
        evaluate_only=options.evaluate_only,
        keeps_evaluated=options.keep_evaluated,
        cold_start=options.after,
    )


if __name__ == "__main__":
    sys.exit(start())
