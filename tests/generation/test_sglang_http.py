"""SGLang's two ways to be asked, each on a real server: by HTTP, as with CUDA, and directly."""

import asyncio
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import aclosing, suppress
from pathlib import Path

import aiohttp
import psutil
import pytest
from transformers import LlamaForCausalLM

from generation.engine import Completion, EngineError
from generation.sglang_direct import DirectRequests, direct_request
from generation.sglang_engine import SGLangEngine
from generation.sglang_http import HttpRequests
from megatron_rl.backend.cpu import sglang as sglang_cpu
from megatron_rl.protocol.types import Sampling, VersionSpan
from tests.generation.engine_driver import make_setup
from tests.generation.precision import assert_near
from tests.generation.test_engine_contract import PROMPT
from tests.generation.tiny_model import logprobs

pytestmark = [pytest.mark.slow(40), pytest.mark.timeout(300)]


class HttpEngine(SGLangEngine):
    """Asked by HTTP wherever it runs."""

    may_ask_directly = False


Engines = tuple[asyncio.AbstractEventLoop, SGLangEngine, HttpEngine]


@pytest.fixture(scope="module")
def engines(models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    logs = tmp_path_factory.mktemp("logs")
    loop = asyncio.new_event_loop()
    direct = SGLangEngine(make_setup(models_dir, logs / "direct.log"))
    by_http = HttpEngine(make_setup(models_dir, logs / "http.log"))

    async def start() -> None:
        await asyncio.gather(direct.start(), by_http.start())

    try:
        loop.run_until_complete(start())
        yield loop, direct, by_http
    finally:
        loop.run_until_complete(direct.close())
        loop.run_until_complete(by_http.close())
        loop.close()


def listening_addresses() -> dict[str, str]:
    """Inode -> local address of listening TCP sockets, read from the kernel's tables."""
    found = {}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            local, state, inode = (line.split()[place] for place in (1, 3, 9))
            if state == "0A":
                words = bytes.fromhex(local.partition(":")[0])
                parts = [words[i : i + 4][::-1] for i in range(0, len(words), 4)]
                found[inode] = socket.inet_ntop(family, b"".join(parts))
    return found


def test_an_engine_listens_on_loopback_alone_and_hears_nobody_without_its_key(
    engines: Engines,
) -> None:
    loop, *both = engines
    listening = listening_addresses()
    for engine in both:
        server = psutil.Process(engine._child._process.pid)
        parts = [server, *server.children(recursive=True)]
        opened = [path for one in parts for path in Path(f"/proc/{one.pid}/fd").iterdir()]
        links = [str(path.readlink()) for path in opened if path.is_symlink()]
        inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
        # HTTP, and gloo's connections between ranks.
        assert {listening[inode] for inode in inodes & listening.keys()} == {"127.0.0.1"}
        assert (
            engine._private_folder is not None
            and stat.S_IMODE(engine._private_folder.stat().st_mode) == 0o700
        )
        file = engine._private_folder / "api_key.yaml"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        key = file.read_text().split()[1]
        assert len(key) == 64
        lines = []
        for child in psutil.Process().children(recursive=True):
            # One that ends meanwhile, or has ended, has no command line.
            with suppress(psutil.NoSuchProcess):
                lines.append(" ".join(child.cmdline()))
        assert any(str(file) in line for line in lines)
        assert not any(key in line for line in lines)
        assert key not in engine._setup.log_path.read_text()

    async def answers(engine: SGLangEngine, key: str) -> list[int]:
        place = f"http://{engine._setup.host}:{engine._setup.port}"
        async with aiohttp.ClientSession(place, headers={"Authorization": key}) as stranger:
            found = []
            for path in ("/generate", "/pause_generation", "/update_weights_from_disk"):
                async with stranger.post(path, json={}) as response:
                    found.append(response.status)
            async with stranger.get("/server_info") as response:
                found.append(response.status)
            return found

    for engine in both:
        for key in ("", "Bearer ", "Bearer " + 64 * "0"):
            assert loop.run_until_complete(answers(engine, key)) == [401] * 4


async def collect(engine: SGLangEngine, sampling: Sampling, count: int) -> list[Completion]:
    async with aclosing(engine.generate(PROMPT, sampling, list(range(count)))) as answers:
        return [completion async for completion in answers]


def test_http_returns_what_the_model_says(engines: Engines, old_model: LlamaForCausalLM) -> None:
    loop, _, by_http = engines
    found = loop.run_until_complete(collect(by_http, Sampling(24, 1.0), 12))
    assert sorted(completion.index for completion in found) == list(range(12))
    for completion in found:
        expected = logprobs(old_model, PROMPT, completion.token_ids)
        assert_near(completion.logprobs, expected)
        assert completion.spans == [VersionSpan(0, 0, len(completion.token_ids))]


def test_both_ways_return_the_same_greedy_tokens(engines: Engines) -> None:
    loop, direct, by_http = engines
    (one,) = loop.run_until_complete(collect(direct, Sampling(20, 0.0), 1))
    (other,) = loop.run_until_complete(collect(by_http, Sampling(20, 0.0), 1))
    assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)


def test_first_tokens_are_timed_when_they_come(engines: Engines) -> None:
    loop, *both = engines

    async def ends(engine: SGLangEngine) -> list[tuple[Completion, float]]:
        answers = engine.generate(PROMPT, Sampling(96, 1.0), list(range(16)))
        async with aclosing(answers):
            return [(completion, time.monotonic()) async for completion in answers]

    def began_before_another_ended(engine: SGLangEngine) -> bool:
        asked_at = time.monotonic()
        found = loop.run_until_complete(ends(engine))
        times = [(c.first_token_at, ended_at) for c, ended_at in found if len(c.token_ids) >= 48]
        assert all(asked_at < first_token_at < ended_at for first_token_at, ended_at in times)
        # Timed at its end, only the first of them has a first token by then.
        first_end = min((ended_at for _, ended_at in times), default=0.0)
        return sum(first_token_at < first_end for first_token_at, _ in times) > 1

    # On a busy machine completions may run one after the other, or be read together.
    for engine in both:
        assert any(began_before_another_ended(engine) for _ in range(20))


def test_both_refuse_an_impossible_prompt_and_go_on(engines: Engines) -> None:
    loop, *both = engines
    too_long = [3 + i % 70 for i in range(600)]

    async def ask(engine: SGLangEngine) -> None:
        async with aclosing(engine.generate(too_long, Sampling(4, 1.0), [0, 1])) as answers:
            await anext(answers)

    for engine in both:
        with pytest.raises(EngineError):
            loop.run_until_complete(ask(engine))
        assert len(loop.run_until_complete(collect(engine, Sampling(4, 1.0), 3))) == 3


def test_completions_of_a_prompt_share_its_keys_and_values(engines: Engines) -> None:
    loop, *both = engines
    prompt = [70 - i for i in range(40)]

    async def cached_tokens(engine: SGLangEngine) -> list[int]:
        request = direct_request(engine._setup, prompt, Sampling(8, 1.0), prefix_key="0")
        answers = engine._requests.generate(request, list(range(6)), loop.time() + 60)
        return [ended.cached_tokens async for _, ended in answers]

    for engine in both:
        # The last token of a prompt is always computed: its logits are wanted.
        found = loop.run_until_complete(cached_tokens(engine))
        assert sorted(found) == [0] + [len(prompt) - 1] * 5


def test_a_turn_finds_the_earlier_turn_and_its_reply_in_the_cache(
    engines: Engines, old_model: LlamaForCausalLM
) -> None:
    loop, *both = engines

    async def talk(engine: SGLangEngine, begin: int) -> None:
        ids = [begin - i for i in range(30)]
        for turn in range(4):
            known = len(ids)
            ids += [5, 6, 7 + turn] if turn else []
            async for reply in engine.generate(ids, Sampling(8, 1.0, is_turn=True), [0]):
                assert_near(reply.logprobs, logprobs(old_model, ids, reply.token_ids))
                # Nothing was computed of the last token of the earlier reply.
                assert not turn or reply.cached_tokens == known - 1 >= 30
                ids += reply.token_ids

    async def talks(engine: SGLangEngine) -> None:
        await asyncio.gather(*(talk(engine, 40 + number) for number in range(8)))

    for engine in both:
        loop.run_until_complete(talks(engine))


def test_closing_stops_completions_that_wait_for_their_first_token(engines: Engines) -> None:
    loop, *both = engines

    async def load(engine: SGLangEngine) -> tuple[int, int]:
        async with engine._session.get("/v1/loads?include=core") as response:
            (found,) = (await response.json())["loads"]
        return found["num_waiting_reqs"], found["num_running_reqs"]

    async def before_and_after(engine: SGLangEngine) -> list[tuple[int, int]]:
        # 48 of them run at once: without an abort the others take nine times as long as these.
        began = loop.time()
        answers = engine.generate(PROMPT, Sampling(450, 1.0), list(range(480)))
        async with aclosing(answers):
            await anext(answers)
            # The report is as old as the scheduler's last one: ask until it counts these.
            while (before := await load(engine))[0] == 0 and loop.time() < began + 20:
                await asyncio.sleep(0.01)
        ends_at = loop.time() + 4 * (loop.time() - began)
        while (after := await load(engine)) != (0, 0) and loop.time() < ends_at:
            await asyncio.sleep(0.1)
        return [before, after]

    for engine in both:
        before, after = loop.run_until_complete(before_and_after(engine))
        assert before[0] > 0 and after == (0, 0)


def test_only_the_engine_with_the_patch_asks_directly(engines: Engines) -> None:
    _, direct, by_http = engines
    assert isinstance(by_http._requests, HttpRequests)
    assert isinstance(direct._requests, DirectRequests) == sglang_cpu.is_needed()
