"""What every engine must do; the same tests for each, on a real one.

vLLM's need `bash tools/install.sh cpu --with vllm`. With CUDA SGLang is the only one, in bfloat16.
"""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
import torch
from transformers import LlamaForCausalLM

from generation.engine import Completion, EngineError, load_engine
from generation.weight_client import WeightClient
from megatron_rl.protocol.types import Fence, Sampling, VersionSpan
from megatron_rl.weights.layout.shape import read_shape
from tests.generation.engine_driver import Driver, make_setup
from tests.generation.precision import (
    IS_EXACT,
    MOST,
    PATIENCE,
    assert_near,
    load_reference,
    on_the_cpu,
)
from tests.generation.sampling_checks import ENDS, check_ends, check_stop, check_truncation
from tests.generation.syncer import SliceSyncer, TrainerProcess
from tests.generation.test_health import Sent
from tests.generation.test_worker import still_running
from tests.generation.tiny_model import logprobs, make_model, mixed_logprobs
from tests.generation.vllm_installed import NEEDS_VLLM

pytestmark = [pytest.mark.slow(60), pytest.mark.timeout(150 * PATIENCE)]
PROMPT = [5, 6, 7, 8, 9, 10, 11]
LONG = 2e-5
"""How near logprobs are behind many positions, whose sums are in another order: SGLang's have been
8.6e-6 apart behind 200, vLLM's 1.3e-5 behind 400."""


@pytest.fixture(scope="module")
def trainer() -> Iterator[TrainerProcess]:
    process = TrainerProcess()
    yield process
    process.close()


@pytest.fixture(scope="module")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As everywhere, but with heads of a size that vLLM computes on the CPU."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "old", seed=0, head_dim=32)
    make_model(folder / "new", seed=1, head_dim=32)
    return folder


@pytest.fixture(scope="module")
def old_model(models_dir: Path) -> LlamaForCausalLM:
    return load_reference(models_dir / "old")


@pytest.fixture(scope="module")
def new_model(models_dir: Path) -> LlamaForCausalLM:
    return load_reference(models_dir / "new")


@pytest.fixture(
    scope="module",
    params=[
        "sglang",
        pytest.param("sglang unpatched", marks=[on_the_cpu, pytest.mark.exhaustive]),
        pytest.param("hf", marks=on_the_cpu),
        pytest.param("vllm", marks=[on_the_cpu, NEEDS_VLLM]),
    ],
)
def driver(
    request: pytest.FixtureRequest,
    trainer: TrainerProcess,
    models_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Driver]:
    # The trainer's process is not one of the engine's.
    log_path = tmp_path_factory.mktemp("logs") / f"{request.param}.log"
    loop = asyncio.new_event_loop()
    before = set(psutil.Process().children(recursive=True))
    setup = make_setup(models_dir, log_path, stop_ids=ENDS, stops_at_text=request.param != "vllm")
    engine = load_engine(request.param.partition(" ")[0])(setup)
    wanted = {"MEGATRON_RL_SGLANG_PATCHES": "needed" if " " in request.param else ""}

    def started() -> list[psutil.Process]:
        return list(set(psutil.Process().children(recursive=True)) - before)

    try:
        with patch.dict(os.environ, wanted):
            loop.run_until_complete(engine.start())
        yield Driver(engine, loop, setup.port, started())
    finally:
        processes = started()
        loop.run_until_complete(engine.close())
        loop.close()
    assert not still_running(processes, 5), "closing the engine left processes"


@pytest.fixture
def old_weights(
    driver: Driver, trainer: TrainerProcess, models_dir: Path, old_model: LlamaForCausalLM
) -> Iterator[SliceSyncer]:
    """A syncer; after the test the engine holds the old weights again, under a newer version."""
    shape = read_shape(models_dir / "old")
    syncer = SliceSyncer(driver.engine, trainer, shape, f"group_{driver.engine.version}")
    driver.run(syncer.open())
    yield syncer
    driver.run(syncer.sync(old_model, driver.engine.version + 1))
    driver.run(syncer.close())


def test_logprobs_equal_transformers(driver: Driver, old_model: LlamaForCausalLM) -> None:
    found = driver.run(driver.collect(PROMPT, Sampling(40, 1.0), list(range(8))))
    for completion in found:
        expected = logprobs(old_model, PROMPT, completion.token_ids)
        assert_near(completion.logprobs, expected)


def test_a_string_ends_a_completion_and_its_tokens_stay(driver: Driver) -> None:
    if driver.engine.name == "vllm":
        pytest.skip("vLLM's core finds no strings")
    check_stop(driver, PROMPT)


def test_top_k_and_min_p_leave_out_tokens_and_logprobs_are_of_all(
    driver: Driver, old_model: LlamaForCausalLM
) -> None:
    if driver.engine.name == "hf":
        with pytest.raises(EngineError, match="samples from all tokens"):
            driver.run(driver.collect(PROMPT, Sampling(4, 1.0, top_k=2), [0]))
    else:
        check_truncation(driver, old_model, PROMPT)


def test_no_port_is_taken_that_another_role_was_given(driver: Driver) -> None:
    # Roles' ports are below what the kernel hands out to those who ask for any.
    kernels_own = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    sockets = [c for process in driver.processes for c in process.net_connections("tcp")]
    listening = {c.laddr.port for c in sockets if c.status == psutil.CONN_LISTEN}
    chosen = {port for port in listening if port < kernels_own}
    is_server = driver.engine.name == "sglang"
    # SGLang's ranks of one node meet by a file, not by the port that is kept for them.
    assert chosen == ({driver.port} if is_server else set())


def test_server_does_not_close_an_idle_connection_first(driver: Driver) -> None:
    # A request over a connection that the server is closing would be lost; its default is 5 s.
    if driver.engine.name != "sglang":
        pytest.skip("only SGLang is asked over connections")
    driver.run(driver.collect(PROMPT, Sampling(4, 1.0), [0]))
    driver.run(asyncio.sleep(7))
    states = {c.status for c in psutil.Process().net_connections("tcp") if c.raddr}
    assert psutil.CONN_ESTABLISHED in states and psutil.CONN_CLOSE_WAIT not in states


def test_prompts_of_all_lengths_at_once_keep_their_logprobs(
    driver: Driver, old_model: LlamaForCausalLM
) -> None:
    prompts = [[3 + (7 * i + j) % 70 for j in range(1 + 9 * i)] for i in range(24)]

    async def all_at_once() -> list[list[Completion]]:
        return await asyncio.gather(
            *(driver.collect(prompt, Sampling(24, 1.0), [0, 1]) for prompt in prompts)
        )

    for prompt, found in zip(prompts, driver.run(all_at_once()), strict=True):
        for completion in found:
            expected = logprobs(old_model, prompt, completion.token_ids)
            assert_near(completion.logprobs, expected, exact=LONG)


def test_each_index_comes_once_and_spans_cover_the_tokens(driver: Driver) -> None:
    asked_at = time.monotonic()
    found = driver.run(driver.collect(PROMPT, Sampling(16, 1.0), [7, 2, 5]))
    ended_at = time.monotonic()
    version = driver.engine.version
    assert sorted(completion.index for completion in found) == [2, 5, 7]
    for completion in found:
        assert len(completion.logprobs) == len(completion.token_ids) <= 16
        assert completion.spans == [VersionSpan(version, 0, len(completion.token_ids))]
        assert asked_at < completion.first_token_at < ended_at


@pytest.mark.parametrize("room", [1, 2, 7, 40])
def test_a_completion_may_fill_the_context(
    driver: Driver, old_model: LlamaForCausalLM, room: int
) -> None:
    prompt = [3 + i % 70 for i in range(driver.engine._setup.context_tokens - room)]
    for completion in driver.run(driver.collect(prompt, Sampling(room, 1.0), [0, 1, 2])):
        ended = completion.token_ids[-1] in ENDS
        assert len(completion.token_ids) == room or ended
        assert completion.finish_reason == ("stop" if ended else "length")
        expected = logprobs(old_model, prompt, completion.token_ids)
        assert_near(completion.logprobs, expected, exact=LONG)


def test_completions_of_a_group_differ_and_each_end_ends_some(driver: Driver) -> None:
    found = check_ends(driver, PROMPT)
    assert len({tuple(completion.token_ids) for completion in found}) >= 24


def test_greedy_is_the_argmax_every_time(driver: Driver, old_model: LlamaForCausalLM) -> None:
    first, second = driver.run(driver.collect(PROMPT, Sampling(20, 0.0), [0, 1]))
    assert first.token_ids == second.token_ids
    with torch.no_grad():
        logits = old_model(torch.tensor([PROMPT + first.token_ids])).logits[0]
    rows = logits[len(PROMPT) - 1 : -1]
    if IS_EXACT:
        assert rows.argmax(-1).tolist() == first.token_ids
    chosen = rows.gather(1, torch.tensor(first.token_ids)[:, None])[:, 0]
    # Two of nearly the same logit change places in bfloat16.
    assert (rows.amax(-1) - chosen).max() < MOST


def test_finished_ones_are_delivered_before_the_slowest(driver: Driver) -> None:
    async def race() -> tuple[list[str], list[int]]:
        order: list[str] = []

        async def slow() -> None:
            found = await driver.collect(PROMPT, Sampling(300, 1.0), list(range(32)))
            order.append("slow")
            lengths.extend(len(completion.token_ids) for completion in found)

        async def fast() -> None:
            await driver.collect(PROMPT[:3], Sampling(2, 1.0), [0])
            order.append("fast")

        lengths: list[int] = []
        # The slow ones last half a second: on a busy machine a later request comes too late.
        await asyncio.gather(fast(), slow())
        return order, lengths

    order, lengths = driver.run(race())
    assert order == ["fast", "slow"]
    # Within the group too: by rising length, but for the steps that some were admitted later.
    longest_before = [max(lengths[: n + 1]) for n in range(len(lengths))]
    late = [before - length for before, length in zip(longest_before, lengths, strict=True)]
    assert max(late) <= 32 and lengths[-1] - lengths[0] > 64


def test_weight_sync_in_flight_switches_weights_at_the_recorded_boundary(
    driver: Driver,
    old_weights: SliceSyncer,
    old_model: LlamaForCausalLM,
    new_model: LlamaForCausalLM,
) -> None:
    version = driver.engine.version
    sync = old_weights.sync(new_model, version + 1)
    found = driver.run(driver.collect_amid(sync, PROMPT, Sampling(400, 1.0), 24))
    spanning = [completion for completion in found if len(completion.spans) == 2]
    assert spanning, "no completion was in flight during the weight sync"
    for completion in spanning:
        assert [span.version for span in completion.spans] == [version, version + 1]
        expected = mixed_logprobs(
            old_model, new_model, PROMPT, completion.token_ids, cut=completion.spans[0].end
        )
        assert_near(completion.logprobs, expected, exact=LONG)


def test_after_a_weight_sync_no_request_reuses_the_older_prefix(
    driver: Driver, old_weights: SliceSyncer, new_model: LlamaForCausalLM
) -> None:
    long_prompt = [3 + i % 60 for i in range(64)]
    driver.run(driver.collect(long_prompt, Sampling(4, 1.0), [0, 1]))
    version = driver.engine.version + 1
    driver.run(old_weights.sync(new_model, version))
    for completion in driver.run(driver.collect(long_prompt, Sampling(16, 1.0), [0, 1, 2])):
        assert {span.version for span in completion.spans} == {version}
        expected = logprobs(new_model, long_prompt, completion.token_ids)
        assert_near(completion.logprobs, expected)


def test_a_request_to_an_engine_without_weights_waits_for_them(
    driver: Driver, old_weights: SliceSyncer, new_model: LlamaForCausalLM
) -> None:
    if driver.engine.name != "sglang":
        pytest.skip("only SGLang shares prefixes by version")
    engine, version = driver.engine, driver.engine.version + 1
    prompt = [3 + i % 60 for i in range(64)]

    async def fence() -> list[Completion]:
        client = WeightClient(Sent(), engine, on_version=lambda: None)
        await driver.collect(prompt, Sampling(4, 1.0), [0])
        await client._answer(Fence("missed a weight sync"))
        waiting = asyncio.create_task(driver.collect(prompt, Sampling(8, 1.0), [0, 1]))
        await asyncio.sleep(1.0)
        assert not waiting.done()
        await old_weights.sync(new_model, version)
        return await waiting

    for completion in driver.run(fence()):
        assert {span.version for span in completion.spans} == {version}
        assert_near(completion.logprobs, logprobs(new_model, prompt, completion.token_ids))


def test_requests_racing_with_a_weight_sync_are_exact(
    driver: Driver,
    old_weights: SliceSyncer,
    old_model: LlamaForCausalLM,
    new_model: LlamaForCausalLM,
) -> None:
    version = driver.engine.version
    prompt = [3 + i % 50 for i in range(40)]

    async def race() -> list[Completion]:
        await driver.collect(prompt, Sampling(1, 1.0), [0])
        sync = asyncio.create_task(old_weights.sync(new_model, version + 1))
        found = []
        for _ in range(6):
            found.append(asyncio.create_task(driver.collect(prompt, Sampling(12, 1.0), [0, 1, 2])))
            await asyncio.sleep(0.01)
        await sync
        return [completion for group in await asyncio.gather(*found) for completion in group]

    for completion in driver.run(race()):
        first = completion.spans[0]
        if len(completion.spans) == 2:
            expected = mixed_logprobs(
                old_model, new_model, prompt, completion.token_ids, cut=first.end
            )
        else:
            model = old_model if first.version == version else new_model
            expected = logprobs(model, prompt, completion.token_ids)
        assert_near(completion.logprobs, expected, exact=LONG)


def test_closing_the_iterator_stops_the_rest_in_the_engine(driver: Driver) -> None:
    many = list(range(48))
    # As many completions as run at once: a further one waits for the end of another.
    endless = Sampling(450, 1.0)

    async def time_all() -> float:
        started = time.monotonic()
        await driver.collect(PROMPT, endless, many)
        return time.monotonic() - started

    async def time_after_closing() -> float:
        async with aclosing(driver.engine.generate(PROMPT, endless, many)) as answers:
            async for _ in answers:
                break
        started = time.monotonic()
        await driver.collect(PROMPT, Sampling(3, 1.0), many)
        return time.monotonic() - started

    # A stall of the machine spoils one of them at most.
    soon_s = min(driver.run(time_after_closing()) for _ in range(2))
    assert soon_s < driver.run(time_all()) / 3


def check_holds(driver: Driver, model: LlamaForCausalLM, version: int) -> None:
    for completion in driver.run(driver.collect(PROMPT, Sampling(16, 1.0), [0, 1, 2])):
        assert {span.version for span in completion.spans} == {version}
        expected = logprobs(model, PROMPT, completion.token_ids)
        assert_near(completion.logprobs, expected)


def test_recomputing_leaves_nothing_of_the_older_weights_but_tokens(
    driver: Driver,
    old_weights: SliceSyncer,
    old_model: LlamaForCausalLM,
    new_model: LlamaForCausalLM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if driver.engine.name == "hf":
        pytest.skip("the hf engine refuses it at start")
    setup = replace(driver.engine._setup, recomputes_kv_cache=True)
    monkeypatch.setattr(driver.engine, "_setup", setup)
    version = driver.engine.version
    prompt = [3 + i % 50 for i in range(40)]
    sync = old_weights.sync(new_model, version + 1)
    # More than run at once, so that some wait in the server.
    found = driver.run(driver.collect_amid(sync, prompt, Sampling(150, 1.0), 60))
    spanning = [completion for completion in found if len(completion.spans) == 2]
    assert spanning, "no completion was in flight during the weight sync"
    for completion in found:
        cut = completion.spans[0].end if completion.spans[0].version == version else 0
        tokens = completion.token_ids
        older, newer = (logprobs(model, prompt, tokens) for model in (old_model, new_model))
        expected = torch.cat([older[:cut], newer[cut:]])
        assert_near(completion.logprobs, expected, exact=1e-4)


def test_the_hf_engine_refuses_to_recompute(models_dir: Path, tmp_path: Path) -> None:
    engine = load_engine("hf")(make_setup(models_dir, tmp_path / "hf", recomputes_kv_cache=True))
    with pytest.raises(EngineError, match="weights.kv_cache"):
        asyncio.run(engine.start())
