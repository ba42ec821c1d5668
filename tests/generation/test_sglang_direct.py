"""Requests past SGLang's HTTP server: the generator's end against a plain socket."""

import asyncio
import importlib.util
import socket
import stat
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from types import ModuleType, SimpleNamespace

import msgspec
import pytest

from generation.engine import EngineError
from generation.sglang_direct import DirectRequests, read_ended
from megatron_rl.backend.cpu import sglang as sglang_cpu
from megatron_rl.protocol.engine_requests import (
    Abort,
    Ended,
    Generate,
    ended_decoder,
    names_of,
    order_decoder,
    pack,
    unpack,
)
from megatron_rl.protocol.types import VersionSpan

REQUEST = Generate([], [5, 6], 8, 1.0, 1.0, 0, 0.0, [], [1], "0.0", False, 0)


def ended(name: str, *tokens: int) -> Ended:
    return Ended(name, list(tokens), [-0.5] * len(tokens), [("3", 0, len(tokens))], "stop", "", 0)


class Scheduler:
    """The other end, which answers as it is told."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(path)
        self.socket.setblocking(False)
        self._buffer = bytearray()
        self._orders: list[Generate | Abort] = []

    async def order(self) -> Generate | Abort:
        loop = asyncio.get_running_loop()
        while not self._orders:
            self._buffer += await asyncio.wait_for(loop.sock_recv(self.socket, 1 << 16), 60)
            self._orders += unpack(self._buffer, order_decoder)
        return self._orders.pop(0)


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[DirectRequests, Scheduler]]:
    direct = DirectRequests()
    await direct.open()
    try:
        scheduler = Scheduler(str(direct.path))
        await asyncio.sleep(0.01)
        yield direct, scheduler
        scheduler.socket.close()
    finally:
        await direct.close()
    assert not direct.path.parent.exists()


def in_s(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


def test_no_name_begins_another() -> None:
    names = [*names_of(1, 12), *names_of(11, 2), *names_of(1, 2, is_turn=True)]
    assert not any(a != b and b.startswith(a) for a in names for b in names)


def test_frames_come_out_as_they_went_in_however_they_are_cut() -> None:
    batches = [[ended("a", 1, 2), ended("b")], [], [ended("c", 7)]]
    data = b"".join(map(pack, batches))
    buffer, found = bytearray(), []
    for byte in data:
        buffer.append(byte)
        found += unpack(buffer, ended_decoder)
    assert found == batches and not buffer


def test_a_second_caller_is_refused_and_the_first_ones_connection_stays() -> None:
    async def scenario() -> None:
        async with connected() as (direct, scheduler):
            second = Scheduler(str(direct.path))
            with pytest.raises(ConnectionResetError):
                assert not await asyncio.get_running_loop().sock_recv(second.socket, 1)
                raise ConnectionResetError
            async with aclosing(direct.generate(REQUEST, [4], in_s(5))) as answers:
                coming = asyncio.ensure_future(anext(answers))
                order = await scheduler.order()
                scheduler.socket.send(pack([ended(order.names[0], 7)]))
                assert (await coming)[0] == 4

    asyncio.run(scenario())


def test_completions_come_as_they_end_under_their_indices() -> None:
    async def scenario() -> None:
        async with connected() as (direct, scheduler):
            assert stat.S_IMODE(direct.path.parent.stat().st_mode) == 0o700
            answers = direct.generate(REQUEST, [4, 9, 2], in_s(5))
            first = asyncio.ensure_future(anext(answers))
            names = (await scheduler.order()).names
            assert len(set(names)) == 3
            scheduler.socket.send(pack([ended(names[2], 8), ended("mrl-unknown.", 1)]))
            assert (await first)[0] == 2
            scheduler.socket.send(pack([ended(names[0], 6), ended(names[1], 7)]))
            rest = [(index, answer.token_ids) async for index, answer in answers]
            assert rest == [(4, [6]), (9, [7])]

    asyncio.run(scenario())


def test_what_is_given_up_is_stopped_and_its_answer_ignored() -> None:
    async def scenario() -> None:
        async with connected() as (direct, scheduler):
            async with aclosing(direct.generate(REQUEST, [0, 1], in_s(5))) as answers:
                first = asyncio.ensure_future(anext(answers))
                names = (await scheduler.order()).names
                scheduler.socket.send(pack([ended(names[1], 8)]))
                await first
            assert await scheduler.order() == Abort([names[0]])
            with pytest.raises(TimeoutError):
                await anext(direct.generate(REQUEST, [0], in_s(0.05)))
            late = (await scheduler.order()).names
            assert await scheduler.order() == Abort(late)
            scheduler.socket.send(pack([ended(names[0], 8), ended(late[0], 8)]))
            await asyncio.sleep(0.01)

    asyncio.run(scenario())


def test_a_scheduler_that_hangs_up_fails_all_requests() -> None:
    async def scenario() -> None:
        async with connected() as (direct, scheduler):
            waiting = asyncio.ensure_future(anext(direct.generate(REQUEST, [0], in_s(5))))
            await scheduler.order()
            scheduler.socket.close()
            with pytest.raises(EngineError, match="hung up"):
                await waiting
            with pytest.raises(EngineError, match="hung up"):
                await anext(direct.generate(REQUEST, [0], in_s(5)))

    asyncio.run(scenario())


def test_an_answer_is_read_or_refused() -> None:
    spans = [("4", 0, 1), ("5", 1, 2)]
    good = Ended("n", [7, 1], [-0.5, -1.0], spans, "length", "", 3, b"\1" * 8, 20.5)
    completion = read_ended(good, 6)
    assert (completion.index, completion.token_ids, completion.logprobs) == (6, [7, 1], [-0.5, -1])
    assert completion.spans == [VersionSpan(4, 0, 1), VersionSpan(5, 1, 2)]
    assert completion.finish_reason == "length" and completion.expert_choices == b"\1" * 8
    assert completion.first_token_at == 20.5
    for words, bad in {
        "abort: too long": Ended("n", [], [], [], "abort", "too long", 0),
        "1 logprobs for 2": Ended("n", [7, 1], [-0.5], [("4", 0, 2)], "stop", "", 0),
        "3 bytes of expert choices": Ended("n", [7], [-0.5], [], "stop", "", 0, b"123"),
        "do not cover 2": Ended("n", [7, 1], [-0.5, -1.0], [("4", 0, 1)], "stop", "", 0),
    }.items():
        with pytest.raises(EngineError, match=words):
            read_ended(bad, 0)


# --- the scheduler's end ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shim() -> ModuleType:
    """Loaded as SGLang's processes load it: from a folder that is no package of ours."""
    path = sglang_cpu.SITE_DIR / "direct_requests.py"
    spec = importlib.util.spec_from_file_location("direct_requests", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Wire:
    """What the generator says and hears, without a socket."""

    def __init__(self) -> None:
        self.incoming: list[Generate | Abort] = []
        self.sent: list[Ended] = []

    def receive(self) -> list[Generate | Abort]:
        messages, self.incoming = self.incoming, []
        return messages

    def send(self, answers: list[Ended]) -> None:
        self.sent += answers


class Parameters(SimpleNamespace):
    """Stands for SGLang's own classes, which take ten seconds to import."""

    def normalize(self, tokenizer: None) -> None: ...

    def verify(self, vocab_size: int) -> None:
        if self.max_new_tokens < 0:
            raise ValueError("max_new_tokens must be at least 0")


@pytest.fixture
def requests(shim: ModuleType) -> object:
    sglang = SimpleNamespace(
        SamplingParams=Parameters,
        TokenizedGenerateReqInput=SimpleNamespace,
        AbortReq=SimpleNamespace,
        compute_weight_version_spans=lambda events, version, tokens: [
            SimpleNamespace(version=version, start=0, end=tokens)
        ],
    )
    scheduler = SimpleNamespace(tokenizer=None, model_config=SimpleNamespace(vocab_size=64))
    return shim.Requests(Wire(), scheduler, sglang)


def step_of(name: str, reason: str = "") -> SimpleNamespace:
    finish = SimpleNamespace(to_json=lambda: {"type": reason}) if reason else None
    return SimpleNamespace(
        rid=name, finished_reason=finish, finished_output=None, finished_len=None,
        output_ids=[7, 1], output_ids_through_stop=[7, 1], weight_version_events=[],
        logprob=SimpleNamespace(output_token_logprobs_val=[-0.5, -1.0]),
        cached_tokens=1, routed_experts=None,
    )  # fmt: skip


def take(requests: object, *messages: Generate | Abort) -> list[str]:
    requests._connection.incoming += messages
    return [req.rid for req in requests.take()]


def request(number: int, count: int, max_new_tokens: int = 8) -> Generate:
    return Generate(
        names_of(number, count), [5, 6], max_new_tokens, 1.0, 1.0, 0, 0.0, [], [], "0.0", False, 0
    )


def test_completions_of_a_prompt_follow_the_first_after_its_step(requests: object) -> None:
    names, other = names_of(1, 3), names_of(2, 1)
    assert take(requests, request(1, 3), request(2, 1)) == [names[0], *other]
    assert take(requests) == []
    chunked = step_of(names[0])
    assert requests.note_step([chunked], chunked, "3") == []
    assert take(requests) == []  # Its prompt was not whole yet.
    foreign = step_of("of-sglang")
    assert requests.note_step([chunked, foreign], None, "3") == [foreign]
    assert take(requests) == names[1:]
    assert requests._connection.sent == []


def test_each_end_is_told_once(requests: object) -> None:
    (name,) = names_of(1, 1)
    done = step_of(name, "stop")
    before = time.monotonic()
    for _ in range(2):
        requests.note_step([done], None, "3")
    (told,) = requests._connection.sent
    assert before <= told.first_token_at <= time.monotonic()
    expected = Ended(name, [7, 1], [-0.5, -1.0], [("3", 0, 2)], "stop", "", 1)
    assert msgspec.structs.replace(told, first_token_at=-1.0) == expected


def test_first_token_is_timed_when_it_comes(requests: object) -> None:
    (name,) = names_of(1, 1)
    step = step_of(name)
    requests.note_step([step], step, "3")  # Its prompt is not whole yet.
    begun = time.monotonic()
    requests.note_step([step], None, "3")
    later = time.monotonic()
    time.sleep(0.01)
    requests.note_step([step_of(name, "stop")], None, "3")
    (told,) = requests._connection.sent
    assert begun <= told.first_token_at <= later
    assert requests._first_token_at == {}


def test_followers_do_not_wait_for_a_first_that_is_stopped(requests: object) -> None:
    names = names_of(1, 4)
    take(requests, request(1, 4))
    # The second and the fourth begin, the first and the third are to be stopped.
    due = take(requests, Abort([names[0], names[2]]))
    assert due == [names[1], names[3], names[0], names[2]]
    assert take(requests) == []


def test_followers_go_on_when_the_first_is_refused_while_it_waits(requests: object) -> None:
    names = names_of(1, 2)
    take(requests, request(1, 2))
    requests.note_abort(names[0], {"message": "the queue is full"})
    assert take(requests) == names[1:]
    (told,) = requests._connection.sent
    assert (told.name, told.finish, told.message) == (names[0], "abort", "the queue is full")


def test_impossible_sampling_is_told_and_does_not_end_the_scheduler(requests: object) -> None:
    assert take(requests, request(1, 2, max_new_tokens=-1)) == []
    assert [(told.name, told.finish) for told in requests._connection.sent] == [
        (name, "abort") for name in names_of(1, 2)
    ]
