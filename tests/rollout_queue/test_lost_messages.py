"""A run over real sockets on which the first message of a kind is lost: it goes on all the same.

The queue's server, generator workers and the trainer's client are the real ones. Engines and the
verifier follow a script. `test_lost_weight_messages`, `test_node_link` and `test_scorer_link` play
the other links.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import generation.worker
from generation.async_sockets import AsyncDealer
from generation.engine import Completion, EngineError
from generation.worker import GeneratorWorker
from megatron_rl.config.tree import RenderConfig
from megatron_rl.protocol.metrics import read_jsonl
from megatron_rl.protocol.render import Renderer
from megatron_rl.protocol.types import (
    Cancel,
    ChatMessage,
    ClassDone,
    ClassRequest,
    Hold,
    Sampling,
    ScoreDone,
    ScoreFailed,
    ScoreRequest,
    VerifierReady,
    VersionSpan,
)
from megatron_rl.protocol.wire import Dealer, Router
from megatron_rl.rollout_queue import peers, server
from megatron_rl.rollout_queue.coordinator import BATCHES, PROMPTS, VERIFY
from megatron_rl.rollout_queue.stall import LoopClock
from megatron_rl.trainer import batch_client
from megatron_rl.trainer.batch_client import BatchClient
from megatron_rl.trainer.leader import Leader
from megatron_rl.weights.sync.control import Control
from tests.generation.tiny_model import write_tokenizer
from tests.lossy_router import LINKS, Loss, LossyRouter
from tests.ports import free_port
from tests.rollout_queue.makers import make_score
from tests.rollout_queue.virtual import open_coordinator

STEPS = 4
TOKENS = 16
ALL = [(link, kind) for link in (PROMPTS, VERIFY, BATCHES) for kind in LINKS[link]]
SLOW_PROMPT = "question t13"
"""The first one. One engine fails it at once, the other one takes longer than the run."""


class ScriptedEngine:
    """One token a completion, after a while."""

    name, engine_version, world_size, ffn_multiple, expert_parallel = "scripted", "1", 1, 1, 1

    def __init__(self, number: int, prompt_ids: list[int]) -> None:
        self.number, self.version = number, -1
        self.slow_prompt_ids = prompt_ids
        self.failures = 1

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, indices: list[int]
    ) -> AsyncIterator[Completion]:
        if prompt_ids == self.slow_prompt_ids:
            if self.number == 0:
                await asyncio.sleep(0.05)
                raise EngineError("it cannot do this prompt")
            await asyncio.sleep(600)
        for index in indices:
            await asyncio.sleep(0.02)
            # A token for each index, so that completions of a group differ.
            spans = [VersionSpan(self.version, 0, 2)]
            yield Completion(index, [10 + index, 1], [-0.5, -0.5], spans, "stop")

    async def failed(self) -> str:
        await asyncio.sleep(3600)
        return "never"


class Generators:
    """Two real workers on one event loop, whose versions follow the trainer's."""

    def __init__(self, folder: Path, ports: dict[str, int]) -> None:
        self.folder, self.ports = folder, ports
        self.synced = -1
        self.workers: list[GeneratorWorker] = []
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.task = self.loop.create_task(self._serve())
        try:
            self.loop.run_until_complete(self.task)
        except asyncio.CancelledError:
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())

    async def _serve(self) -> None:
        write_tokenizer(self.folder)
        config, format_checks = RenderConfig(system_prompt=""), {"math": "none"}
        renderer = Renderer(config, self.folder, context_tokens=256, format_checks=format_checks)
        slow = renderer.render([ChatMessage("user", SLOW_PROMPT)], TOKENS, task="math")
        with ExitStack() as stack:
            running = [self._follow()]
            for number in range(2):
                prompts, weights = (
                    stack.enter_context(
                        AsyncDealer(f"127.0.0.1:{self.ports[link]}", f"generator-{number}")
                    )
                    for link in (PROMPTS, "weights")
                )
                worker = GeneratorWorker(ScriptedEngine(number, slow), renderer, prompts, 2)
                self.workers.append(worker)
                running.append(worker.run(weights))
            await asyncio.gather(*running)

    async def _follow(self) -> None:
        """Each worker that is not held gets the version that is synced."""
        while True:
            for worker in self.workers:
                held = worker._weights is not None and worker._weights.is_held
                if worker._engine.version != self.synced and not held:
                    worker._engine.version = self.synced
                    worker.announce()
            await asyncio.sleep(0.02)

    def sync(self, version: int) -> None:
        self.synced = version
        time.sleep(0.1)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.task.cancel)
        self.thread.join(60)


class Verifier:
    """Answers at once, and fails one request of each kind; says what it owes."""

    def __init__(self, port: int) -> None:
        self.port, self.is_over = port, threading.Event()
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        room, ready_at, has_failed = {"answers": 8, "code": 8, "custom": 8}, 0.0, False
        with Dealer(f"127.0.0.1:{self.port}", "verifier") as dealer:
            while not self.is_over.is_set():
                if time.monotonic() >= ready_at:
                    ready_at = time.monotonic() + 0.1
                    dealer.send(VerifierReady(room, 1, []))
                message = dealer.receive(0.05)
                match message:
                    case ScoreRequest() if not has_failed:
                        has_failed = True
                        dealer.send(ScoreFailed(message.request_id, "once"))
                    case ScoreRequest():
                        # Of each group the first completion is right.
                        is_right = len(message.text) > 0 and message.request_id % 4 == 0
                        dealer.send(ScoreDone(message.request_id, make_score(float(is_right))))
                    case ClassRequest():
                        dealer.send(ClassDone(message.request_id, [0] * len(message.texts)))

    def close(self) -> None:
        self.is_over.set()
        self.thread.join(60)


class Trainer:
    """The real client: batches, weight syncs, and states of checkpoints."""

    def __init__(self, port: int, generators: Generators) -> None:
        self.port, self.generators = port, generators
        self.steps: list[int] = []
        self.states: list[int] = []
        self.owed: set[int] = set()
        """Leases that generators work on when the run ends."""
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._guarded)

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001  # shown by the test's thread
            self.error = error

    def _run(self) -> None:
        with BatchClient(
            f"127.0.0.1:{self.port}", dp_rank=0, dp_size=1,
            leader=Leader(dist.group.WORLD, Control(dist.group.WORLD)), timeout_s=25,
        ) as batches:  # fmt: skip
            step = 0
            self.generators.sync(0)
            batches.announce(0, is_final=False)
            while (batch := batches.next(step)) is not None:
                self.steps.append(batch.step)
                step += 1
                self.states.append(batches.queue_state(step, 20.0).step)
                self.generators.sync(step)
                batches.announce(step, is_final=step == STEPS)


@contextmanager
def one_rank() -> Iterator[None]:
    address = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats, repetitions and graces a tenth as long."""
    for module, name, value in (
        (generation.worker, "READY_S", 0.1),
        (peers, "ABSENT_S", 0.4),
        (batch_client, "REASK_S", 0.4), (batch_client, "TURN_S", 0.1),
        (batch_client, "STOP_S", 1.0), (server, "_TICK_S", 0.1),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)


def play(folder: Path, losing: list[tuple[str, str]]) -> tuple[Trainer, dict[str, Any]]:
    """A whole run; the trainer, and the routers by link."""
    ports = {link: free_port() for link in (PROMPTS, VERIFY, BATCHES, "weights")}
    sections = {
        "train": {"steps": STEPS, "prompts_per_batch": 2, "group_size": 4},
        "queue": {"max_staleness": 1, "lease_timeout_s": 600.0},
        "eval": {"every_steps": 2, "samples": 2, "replicas": 1, "prompts": 2},
        "generator": {"replicas": 2},
        "sampling": {"max_new_tokens": TOKENS},
    }
    with ExitStack() as stack:
        stack.enter_context(one_rank())
        coordinator = stack.enter_context(open_coordinator(folder, held_out=2, **sections))
        routers = {
            link: stack.enter_context(
                LossyRouter(
                    "127.0.0.1", ports[link], loss=Loss({k for at, k in losing if at == link})
                )
            )
            for link in (PROMPTS, VERIFY, BATCHES)
        }
        stack.enter_context(Router("127.0.0.1", ports["weights"]))
        clock = LoopClock()
        coordinator.deadline.note_progress(clock.read())
        generators, verifier = Generators(folder, ports), Verifier(ports[VERIFY])
        trainer = Trainer(ports[BATCHES], generators)
        for one in (generators, verifier, trainer):
            one.thread.start()
            if one is not trainer:
                stack.callback(one.close)
        deadline = threading.Timer(40.0, setattr, (coordinator, "is_over", True))
        deadline.start()
        server.serve(coordinator, routers, clock)
        deadline.cancel()
        trainer.owed = {lease_id for worker in generators.workers for lease_id in worker._owed}
        trainer.thread.join(60)
    return trainer, routers


def check(folder: Path, trainer: Trainer, routers: dict[str, Any], lost: list) -> None:
    if trainer.error is not None:
        raise trainer.error
    assert trainer.steps == list(range(STEPS))
    assert trainer.states == list(range(1, STEPS + 1))
    found = [(link, kind) for link, router in routers.items() for kind in router.loss.kinds]
    assert sorted(found) == sorted(lost), "a kind that was to be lost never came"
    rows = read_jsonl(folder / "metrics.jsonl")
    evaluated = [row["label"] for row in rows if "eval/n" in row]
    assert evaluated == ["before", "step_2", "after"]
    prompts = routers[PROMPTS].loss
    for peer, message in prompts.lost:
        if isinstance(message, Cancel):
            assert message.lease_id not in trainer.owed, "it was not cancelled again"
        if isinstance(message, Hold):
            assert (peer, message) in prompts.sent, "the order was not repeated"


def test_a_run_outlives_the_first_loss_of_every_kind(tmp_path: Path, quick: None) -> None:
    trainer, routers = play(tmp_path, list(ALL))
    check(tmp_path, trainer, routers, list(ALL))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("link", "kind"), ALL)
def test_a_run_outlives_the_loss_of_one_message(
    tmp_path: Path, quick: None, link: str, kind: str
) -> None:
    trainer, routers = play(tmp_path, [(link, kind)])
    check(tmp_path, trainer, routers, [(link, kind)])
