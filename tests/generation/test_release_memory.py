"""A real SGLang server gives its memory back in the middle of completions, and goes on with them.

On the CPU there is no memory saver: weights and cache stay where they are, unless a loader wipes
them. The rest is real: SGLang's demand that nothing runs, requests that are put back, the order of
calls.
`tests/gpu/test_release_cuda.py` measures the memory.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from generation.engine import Completion, EngineError, ReleasingEngine
from generation.hf_engine import HFEngine
from generation.sglang_engine import SGLangEngine
from megatron_rl.protocol.types import Sampling
from megatron_rl.weights.layout.shape import read_shape
from tests.generation.engine_driver import Driver, driven, make_setup
from tests.generation.inspected_engine import InspectedEngine
from tests.generation.layout_loader import tensors_of
from tests.generation.layout_models import write_model
from tests.generation.precision import IS_EXACT, PATIENCE, assert_near, on_the_cpu
from tests.generation.syncer import SliceSyncer, TrainerProcess
from tests.generation.test_sglang_http import HttpEngine
from tests.generation.tiny_model import logprobs

pytestmark = [pytest.mark.slow(20), pytest.mark.timeout(150 * PATIENCE)]
PROMPTS = [[3 + (7 * row + i) % 60 for i in range(20 + row)] for row in range(6)]
GREEDY, SHORT = Sampling(300, 0.0), Sampling(12, 0.0)
ROOT = Path(__file__).resolve().parents[2]
UNPADDED = {"vocab_size": 256, "intermediate_size": 128, "moe_intermediate_size": 64}
"""Sizes that SGLang's CPU mode does not pad: no weight sync fills padding."""
HELD_S = 0.7
"""That the memory stays released: in it an engine that runs would end each completion."""


@pytest.fixture(
    scope="module",
    params=[SGLangEngine, pytest.param(HttpEngine, marks=[pytest.mark.exhaustive, on_the_cpu])],
)
def driver(
    request: pytest.FixtureRequest, models_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Driver]:
    """Asked as on this host, and as with CUDA."""
    log_path = tmp_path_factory.mktemp("logs") / "sglang.log"
    changes = {"recomputes_kv_cache": True, "releases_memory": True}
    with driven(request.param(make_setup(models_dir, log_path, **changes))) as found:
        yield found


@pytest.fixture(scope="module")
def syncer(driver: Driver, models_dir: Path) -> Iterator[SliceSyncer]:
    trainer = TrainerProcess()
    found = SliceSyncer(driver.engine, trainer, read_shape(models_dir / "old"), "released")
    driver.run(found.open())
    yield found
    driver.run(found.close())
    trainer.close()


def releasing(driver: Driver) -> ReleasingEngine:
    assert isinstance(driver.engine, ReleasingEngine)
    return driver.engine


async def all_prompts(
    driver: Driver, arrived: list[int], counts: asyncio.Event
) -> list[Completion]:
    """The first completion of each prompt that ends once it counts; `arrived` grows with each.

    Earlier ones are asked for again: so some are in flight then, however slow the machine is.
    """

    async def one(prompt: list[int]) -> Completion:
        while True:
            [completion] = await driver.collect(prompt, GREEDY, [0])
            if counts.is_set():
                arrived.append(len(completion.token_ids))
                return completion

    return list(await asyncio.gather(*(one(prompt) for prompt in PROMPTS)))


def at_once() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


async def take_turns(
    driver: Driver, syncer: SliceSyncer, model: LlamaForCausalLM
) -> list[Completion]:
    """Completions, all of which a turn of the trainer met: release, hold, weight sync the model."""
    engine, arrived, begins = releasing(driver), list[int](), asyncio.Event()
    asked = asyncio.create_task(all_prompts(driver, arrived, begins))
    await asyncio.sleep(0)
    # The last to be asked for: when it ends, the others have begun.
    await driver.collect(PROMPTS[0], SHORT, [0])
    begins.set()
    await engine.release()
    before = len(arrived)
    await asyncio.sleep(HELD_S)
    assert len(arrived) == before < len(PROMPTS), "completions ended while there was no memory"
    await engine.reclaim()
    await asyncio.sleep(0.1)
    assert len(arrived) == before, "completions went on before their weights were there"
    await syncer.sync(model, driver.engine.version + 1)
    return await asked


def test_completions_go_on_as_if_the_memory_had_been_kept(
    driver: Driver, syncer: SliceSyncer, old_model: LlamaForCausalLM
) -> None:
    undisturbed = driver.run(all_prompts(driver, [], at_once()))
    version = driver.engine.version
    found = driver.run(take_turns(driver, syncer, old_model))
    spanning = [completion for completion in found if len(completion.spans) == 2]
    assert spanning, "no completion was in flight"
    for prompt, before, after in zip(PROMPTS, undisturbed, found, strict=True):
        assert {span.version for span in after.spans} <= {version, version + 1}
        if IS_EXACT:
            assert after.token_ids == before.token_ids
        assert_near(after.logprobs, logprobs(old_model, prompt, after.token_ids), exact=1e-4)


def test_tokens_after_the_turn_are_those_of_the_new_weights_alone(
    driver: Driver,
    syncer: SliceSyncer,
    old_model: LlamaForCausalLM,
    new_model: LlamaForCausalLM,
) -> None:
    version = driver.engine.version
    found = driver.run(take_turns(driver, syncer, new_model))
    assert any(len(completion.spans) == 2 for completion in found)
    for prompt, completion in zip(PROMPTS, found, strict=True):
        first, tokens = completion.spans[0], completion.token_ids
        cut = first.end if first.version == version else 0
        old, new = (logprobs(model, prompt, tokens) for model in (old_model, new_model))
        assert_near(completion.logprobs[:cut], old[:cut], exact=1e-4)
        assert_near(completion.logprobs[cut:], new[cut:], exact=1e-4)
    driver.run(syncer.sync(old_model, driver.engine.version + 1))


def test_a_request_that_comes_meanwhile_waits_and_is_of_the_new_version(
    driver: Driver, syncer: SliceSyncer, old_model: LlamaForCausalLM
) -> None:
    engine, version = releasing(driver), driver.engine.version + 1

    async def ask_meanwhile() -> list[Completion]:
        await engine.release()
        asked = asyncio.create_task(driver.collect(PROMPTS[0], GREEDY, [0, 1]))
        await asyncio.sleep(HELD_S)
        assert not asked.done()
        await engine.reclaim()
        await syncer.sync(old_model, version)
        return await asked

    for completion in driver.run(ask_meanwhile()):
        assert {span.version for span in completion.spans} == {version}


def test_requests_that_are_given_up_meanwhile_harm_neither_the_engine_nor_others(
    driver: Driver,
    syncer: SliceSyncer,
    old_model: LlamaForCausalLM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their time runs on while the trainer computes."""
    engine, setup = releasing(driver), driver.engine._setup

    async def give_up() -> tuple[list[BaseException | list[Completion]], list[Completion]]:
        kept = asyncio.create_task(driver.collect(PROMPTS[1], GREEDY, [0]))
        await asyncio.sleep(0)  # its deadline is that of its start
        monkeypatch.setattr(driver.engine, "_setup", replace(setup, request_timeout_s=0.4))
        begun = asyncio.create_task(driver.collect(PROMPTS[2], Sampling(400, 1.0), [*range(16)]))
        await asyncio.sleep(0)
        await engine.release()
        waiting = asyncio.create_task(driver.collect(PROMPTS[3], GREEDY, [0]))
        failed = await asyncio.gather(begun, waiting, return_exceptions=True)
        await engine.reclaim()
        await syncer.sync(old_model, driver.engine.version + 1)
        return failed, await kept

    (begun, waiting), [kept] = driver.run(give_up())
    monkeypatch.undo()
    for error in (begun, waiting):
        assert isinstance(error, EngineError) and "expert.generator.request_timeout_s" in str(error)
    assert len(kept.token_ids) == len(kept.logprobs) > 0
    [again] = driver.run(driver.collect(PROMPTS[1], GREEDY, [0]))
    assert not IS_EXACT or kept.token_ids == again.token_ids


def test_a_syncer_that_knows_nothing_of_the_release_can_sync(
    driver: Driver, syncer: SliceSyncer, old_model: LlamaForCausalLM
) -> None:
    """As of a trainer that was started again; orders that come twice do nothing."""
    engine, version = releasing(driver), driver.engine.version + 1

    async def twice() -> Completion:
        for _ in range(2):
            await engine.release()
        for _ in range(2):
            await engine.reclaim()
        await syncer.sync(old_model, version)
        await engine.reclaim()
        [completion] = await driver.collect(PROMPTS[0], GREEDY, [0])
        return completion

    completion = driver.run(twice())
    assert [span.version for span in completion.spans] == [version]
    assert_near(completion.logprobs, logprobs(old_model, PROMPTS[0], completion.token_ids))


@on_the_cpu
@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("Glm4Moe", 1),
        pytest.param("DeepseekV3", 1, marks=pytest.mark.exhaustive),
        pytest.param("GptOss", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_parameters_that_no_weight_sync_sends_come_back_too(
    family: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for seed, name in enumerate(("old", "new")):
        model = write_model(tmp_path / name, family=family, is_tied=False, seed=seed, **UNPADDED)
    logs = tmp_path / "logs"
    logs.mkdir()
    setup = make_setup(
        tmp_path, logs / "server.log", tensor_parallel=ranks, context_tokens=200,
        recomputes_kv_cache=True, releases_memory=True,
    )  # fmt: skip
    trainer = TrainerProcess()
    with driven(InspectedEngine(setup)) as driver:
        shape = read_shape(tmp_path / "new")
        syncer = SliceSyncer(driver.engine, trainer, shape, f"unsent-{family}")

        async def lose_all(version: int) -> None:
            await releasing(driver).release()
            (logs / "wipe").touch()
            await releasing(driver).reclaim()
            await syncer.sync_tensors(tensors_of(tmp_path / "new"), version)

        driver.run(syncer.open())
        # The first comes before any weight sync.
        for version in (1, 2):
            driver.run(lose_all(version))
        found = driver.run(driver.collect(PROMPTS[0], SHORT, [0]))
        driver.run(syncer.close())
    trainer.close()
    for rank in range(ranks):
        held = torch.load(logs / f"held-{rank}.pt")
        assert [name for name, value in held.items() if not value.isfinite().all()] == []
        corrections = [held[name] for name in held if "correction_bias" in name]
        assert len(corrections) == (family != "GptOss")
        for correction in corrections:
            assert torch.equal(correction, torch.linspace(-0.5, 0.5, 4))
        biases = [held[name] for name in held if name.endswith("w2_weight_bias")]
        assert [bool(bias.any()) for bias in biases] == [rank == 0] * (2 * (family == "GptOss"))
    for completion in found:
        expected = logprobs(model, PROMPTS[0], completion.token_ids)
        assert_near(completion.logprobs, expected, exact=1e-4)


def test_only_sglangs_engine_gives_memory_back(driver: Driver) -> None:
    assert isinstance(driver.engine, ReleasingEngine)
    assert not issubclass(HFEngine, ReleasingEngine)
