"""Receivers of messages bear whatever a broken or hostile peer sends: they refuse and count it."""

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from generation.async_sockets import AsyncRouter
from generation.engine import EngineError
from generation.scorer import Scorer
from generation.sglang_direct import DirectRequests, read_ended
from megatron_rl.config.errors import InputError
from megatron_rl.config.reward import WORKER_POOLS
from megatron_rl.config.tree import Config, NodesConfig, PortsConfig
from megatron_rl.launcher import node_link
from megatron_rl.protocol.endpoints import BATCHES, ENDPOINTS, NODES, PROMPTS, VERIFY, WEIGHTS
from megatron_rl.protocol.engine_requests import Abort, Ended, Generate, order_decoder, pack, unpack
from megatron_rl.protocol.frames import decode_frames
from megatron_rl.protocol.limits import INT32_MAX
from megatron_rl.protocol.node_messages import PhaseKind, RoleRestart, RunPhase
from megatron_rl.protocol.prompt import LengthRule
from megatron_rl.protocol.scorer_messages import LogprobRequest
from megatron_rl.protocol.types import AnyMessage, ClassRequest, ScoreRequest
from megatron_rl.protocol.wire import (
    MAX_REFUSED,
    Dealer,
    Router,
    WireError,
    encode_frames,
    labelled,
)
from megatron_rl.rollout_queue.coordinator import Coordinator
from megatron_rl.rollout_queue.server import _Inbox
from megatron_rl.rollout_queue.stall import LoopClock
from megatron_rl.weights.sync.link import GeneratorLink
from tests.launcher.test_node_registry import state
from tests.ports import free_port
from tests.protocol.fuzz import (
    LABEL,
    Attack,
    Counted,
    Frames,
    Fuzzer,
    Memory,
    of_kinds,
    replayable,
    run_attack,
)
from tests.protocol.test_wire import examples
from tests.rollout_queue.makers import make_score
from tests.rollout_queue.played_queue import PlayedQueue
from verification.classes import ClassDesk
from verification.pool.pool import Pool
from verification.rules import RewardRules
from verification.worker import Leave, Verifier

FEW, MANY = 2_000, 100_000
"""Frames of one receiver; there are ten."""
each_number = pytest.mark.parametrize(
    "number",
    [
        FEW,
        pytest.param(MANY, marks=[pytest.mark.exhaustive, pytest.mark.timeout(600)]),
    ],
)


@pytest.fixture(autouse=True)
def no_logs() -> Iterator[None]:
    """pytest would keep every line, which grows."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@each_number
def test_decoders_refuse_what_is_no_message_and_raise_nothing_else(number: int) -> None:
    fuzzer, memory, sides = Fuzzer(1), Memory(2 * number), 2 * len(ENDPOINTS)
    decoded = 0
    for endpoint in ENDPOINTS:
        for kinds in (endpoint.router_hears, endpoint.dealer_hears):
            sound = of_kinds(examples(), kinds)
            for _ in range(2 * number // sides):
                frames = fuzzer.spoil(fuzzer.chance.choice(sound))
                with replayable([*frames]):
                    decode_frames(frames, kinds)
                    decoded += 1
            memory.look(number)
    assert 0.02 < decoded / (2 * number) < 0.6


class Overheard:
    """A coordinator that remembers the messages of sound peers, which an attack then spoils."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.messages: dict[str, deque[AnyMessage]] = {
            endpoint.name: deque(maxlen=50) for endpoint in (PROMPTS, VERIFY, BATCHES)
        }

    def handle(self, endpoint: str, peer: str, message: AnyMessage, now: float) -> None:
        self.messages[endpoint].append(message)
        self._coordinator.handle(endpoint, peer, message, now)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coordinator, name)


PATIENT = {
    "max_attempts": 10**6, "max_lost_attempts": 10**6, "max_failed_groups": 10**6,
    "lease_timeout_s": 400.0, "score_patience_s": 1e6,
    "max_staleness": 1, "breaker_share": 1.0,
}  # fmt: skip


@each_number
@pytest.mark.parametrize(
    ("endpoint", "honest"), [(PROMPTS, "g"), (VERIFY, "v"), (BATCHES, "t")],
    ids=lambda one: getattr(one, "name", ""),
)  # fmt: skip
def test_the_queue_serves_on_whatever_comes(
    endpoint: Any, honest: str, number: int, tmp_path: Path
) -> None:
    queue = PlayedQueue(
        tmp_path, lambda prompt, index: make_score(float(index % 2)),
        train={"steps": 10**6, "batch_timeout_s": 1e9}, queue=PATIENT,
    )  # fmt: skip
    coordinator, port = queue.coordinator, free_port()
    overheard = queue.coordinator = Overheard(coordinator)
    with ExitStack() as stack:
        router = stack.enter_context(Counted("127.0.0.1", port, endpoint=endpoint, label=LABEL))
        attack = stack.enter_context(Attack(f"127.0.0.1:{port}", honest, seed=2))
        inbox = _Inbox(coordinator, {endpoint.name: router}, LoopClock(begin=queue.now))
        queue.start()

        def read() -> None:
            inbox.receive_bursts()

        def messages() -> list[AnyMessage]:
            queue.play(1)
            return [*overheard.messages[endpoint.name]]

        run_attack(attack, router, frames=number, messages=messages, read=read)
    if endpoint is not BATCHES:
        served_after_the_attack(queue)


def served_after_the_attack(queue: PlayedQueue) -> None:
    """The sound peers get a further batch, once the others have fallen silent."""
    before = len(queue.batches)
    for _ in range(100):
        queue.sync(before)
        queue.play(20)
        if len(queue.batches) > before:
            break
    else:
        raise AssertionError(queue.coordinator.describe(queue.now))
    for batch in queue.batches:
        assert batch.find_fault() == ""


@each_number
def test_rank_0_bears_what_generators_send(number: int) -> None:
    port = free_port()
    with ExitStack() as stack:
        router = stack.enter_context(Counted("127.0.0.1", port, endpoint=WEIGHTS, label=LABEL))
        attack = stack.enter_context(Attack(f"127.0.0.1:{port}", "generator-0", seed=3))
        link = GeneratorLink(router)
        sound = of_kinds(examples(), WEIGHTS.router_hears)
        run_attack(attack, router, frames=number, messages=lambda: sound, read=link.listen)
    assert set(link.peers) <= {"generator-0", "stranger"}
    assert sum(map(len, link._acks.values())) <= 2 * len(WEIGHTS.dealer_hears.__args__)


@each_number
def test_the_first_node_bears_what_others_send(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_link, "Router", Counted)
    config = Config(
        ports=PortsConfig(nodes=free_port(), label=LABEL),
        nodes=NodesConfig(start_timeout_s=1e6, silence_timeout_s=1e6),
    )
    with ExitStack() as stack:
        link = stack.enter_context(node_link.FirstNodeLink(config, 3))
        attack = stack.enter_context(Attack(f"127.0.0.1:{config.ports.nodes}", "node-1", seed=4))
        restart = RoleRestart("generator-1", "generator", -9, 1, 3, 1)
        sound = [state(1), state(1, ended=1, restarts=(restart,), given_up={"verifier": 1})]

        def read() -> None:
            try:
                link.exchange(0.0)
            except (InputError, node_link.NodeLost):
                # A state that can be read, of a node that was started wrongly or has left.
                link.registry._states.clear()

        assert isinstance(link._router, Counted)
        run_attack(attack, link._router, frames=number, messages=lambda: sound, read=read)


REQUESTS = [
    ScoreRequest(
        0, "math", "7", "", "It is \\boxed{7}.", 5, True, "3+4?", "en", other_answers=["7.0"]
    ),
    ScoreRequest(
        0,
        "exact",
        "ab",
        "",
        "<think>so</think>\\boxed{ba}",
        9,
        False,
        length_rule=LengthRule(8, 2, 0.1),
    ),
    ScoreRequest(0, "code", "", '{"inputs": ["1"], "outputs": ["1"]}', "no program", 3, True),
    ScoreRequest(0, "reasoning_gym", "", "{}", "\\boxed{1}", 3, True, prompt_tail="<think>"),
    ClassRequest(0, "math", ["\\boxed{7}", "\\boxed{14/2}", "none"], ["", "", ""], "3+4?"),
]


@each_number
def test_a_verifier_answers_each_request_that_can_be_read(number: int) -> None:
    port, fuzzer, memory = free_port(), Fuzzer(8), Memory(number)
    config = Config()
    asked, answered = Counter[int](), Counter[int]()
    with ExitStack() as stack:
        router = stack.enter_context(Router("127.0.0.1", port, endpoint=VERIFY, label=LABEL))
        address = f"127.0.0.1:{port}"
        dealer = stack.enter_context(Dealer(address, "verifier", endpoint=VERIFY, label=LABEL))
        rules = RewardRules.of(config)
        pool = stack.enter_context(Pool(config.verifier, rules))
        desk = ClassDesk(pool, rules, answer_within_s=60.0)
        verifier = Verifier(
            dealer, pool, desk, rules=rules, capacity=dict.fromkeys(WORKER_POOLS, 512),
            leave=Leave(threading.Event(), 60.0),
        )  # fmt: skip

        def serve(frames: Frames) -> None:
            with replayable([*frames]):
                verifier._receive()
            verifier._send_finished()
            while (received := router.receive(0)) is not None:
                answered[received[1].request_id] += 1

        verifier._send_heartbeat_if_due()
        while router.receive(1.0) is None:
            pass
        for sent in range(number):
            kind = fuzzer.chance.choice(REQUESTS)
            frames = fuzzer.spoil(msgspec.structs.replace(kind, request_id=sent))
            with suppress(WireError):
                message = decode_frames([*frames], VERIFY.dealer_hears)
                assert isinstance(message, ScoreRequest | ClassRequest)
                asked[message.request_id] += message.request_id >= 0
            router.socket.send_multipart([labelled("verifier", LABEL), *frames])
            while asked.total() - answered.total() > 100:
                serve(frames)
            memory.look(sent)
        ends_at = time.monotonic() + 120
        while asked != answered:
            assert time.monotonic() < ends_at, (asked - answered, answered - asked)
            serve(frames)
    assert 0.02 < asked.total() / number < 0.9


class Zeros:
    """An engine of the scorer."""

    async def logprobs(self, token_ids: list[int], start: int) -> list[float]:
        assert 1 <= start < len(token_ids) and 0 <= min(token_ids)
        return [0.0] * (len(token_ids) - start)

    async def failed(self) -> str:
        await asyncio.Event().wait()
        return ""


class CountedAwaitable(Counted, AsyncRouter):
    """Counts, on an event loop."""


@each_number
def test_the_scorer_serves_on_whatever_comes(number: int) -> None:
    sound = [LogprobRequest(n, np.arange(n + 2, dtype=np.int32), 1) for n in range(9)]

    async def disturb(port: int) -> None:
        with (
            CountedAwaitable("127.0.0.1", port, label=LABEL) as router,
            Attack(f"127.0.0.1:{port}", "trainer-0-reference", seed=5) as attack,
        ):
            serving = asyncio.create_task(Scorer(Zeros(), router, 8).run())
            memory = Memory(number)
            while attack.sent < number:
                attack.send(sound, 100)
                while router.arrived < attack.sent:
                    assert not serving.done(), serving.exception()
                    await asyncio.sleep(0)
                memory.look(attack.sent)
            serving.cancel()
            assert router.refused.total() >= router.raised > 0

    asyncio.run(asyncio.wait_for(disturb(free_port()), 500))


ENDED = [
    [Ended("mrl-0-0.", [5, 6], [-0.5, -1.0], [("0", 0, 1), ("1", 1, 2)], "stop", "", 3)],
    [Ended("mrl-1-0.", [5], [-0.5], [("0", 0, 1)], "length", "", 0, b"\x00" * 8, 5.0)] * 3,
]
ORDERS = [
    Generate(["mrl-0-0."], [1, 2], 8, 1.0, 1.0, 0, 0.0, ["stop"], [2], "key", False, 0),
    Abort(["mrl-0-0.", "mrl-0-1."]),
]


def streams(fuzzer: Fuzzer, sound: list[Any], number: int) -> Iterator[bytes]:
    """What a peer of the engine's socket may write: bodies and lengths are spoilt."""
    for _ in range(number):
        [body] = fuzzer.spoil(fuzzer.chance.choice(sound))[:1]
        length = len(body) + fuzzer.chance.choice([0, 0, 0, 0, 1, -1, 2**31])
        yield max(0, length).to_bytes(4, "little") + body


@each_number
def test_the_engines_socket_bears_what_comes(number: int) -> None:
    fuzzer, memory, completions = Fuzzer(6), Memory(number), 0
    for stream in streams(fuzzer, ORDERS, number // 2):
        with replayable([stream]):
            try:
                unpack(bytearray(stream), order_decoder)
            except msgspec.DecodeError:
                continue
    for stream in streams(fuzzer, ENDED, number // 2):
        requests, heard = DirectRequests(), []
        requests._take = heard.extend  # type: ignore[method-assign]
        with replayable([stream]):
            try:
                requests.data_received(stream)
                found = [read_ended(one, 0) for one in heard]
            except (msgspec.DecodeError, EngineError):
                continue
            for one in found:
                np.array(one.token_ids, np.int32)
                np.frombuffer(one.expert_choices, np.int32)
                completions += 1
    memory.look(number)
    assert completions > 0 and pack(ENDED[0])


def spoilt(seed: int, message: AnyMessage, number: int) -> Iterator[Frames]:
    fuzzer = Fuzzer(seed)
    for _ in range(number):
        yield fuzzer.spoil(message)


@each_number
def test_other_nodes_bear_what_the_first_one_sends(number: int) -> None:
    config = Config(ports=PortsConfig(nodes=free_port(), label=LABEL))
    phase = RunPhase(
        1, PhaseKind.TRAINING, scorer_node=1, addresses={0: "10.0.0.1"}, given_up={"verifier": 1}
    )
    with node_link.OtherNodeLink(config, 1, 3) as link:
        for frames in spoilt(7, phase, number):
            with replayable([*frames]):
                try:
                    link._take(decode_frames(frames, NODES.dealer_hears))
                except node_link.NodeLost:
                    # A phase that can be read, with an error in it.
                    continue
            assert all(abs(count) <= INT32_MAX for count in link.given_up_elsewhere.values())


def test_a_peer_is_turned_away_after_many_refused_messages() -> None:
    port = free_port()
    with Counted("127.0.0.1", port, endpoint=PROMPTS, label=LABEL) as router:
        for number in range(2 * MAX_REFUSED):
            router.refuse("a" if number % 2 else "b", WireError("no message"))
        assert router.refused == {"a": MAX_REFUSED, "b": MAX_REFUSED}
        # Names are bounded, too.
        for number in range(3000):
            router.refuse(f"peer {number}", WireError("no message"))
        assert len(router.refused) <= 1001 and router.refused.total() == 2 * MAX_REFUSED + 3000
        assert encode_frames(ORDERS[0])
