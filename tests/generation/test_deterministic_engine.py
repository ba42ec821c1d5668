"""An engine under `expert.generator.deterministic`: completions depend on their seed alone."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from generation.engine import Completion, EngineError, load_engine
from megatron_rl.protocol.types import Sampling
from tests.generation.engine_driver import Driver, driven, make_setup
from tests.generation.precision import PATIENCE, assert_near, load_reference, on_the_cpu
from tests.generation.tiny_model import logprobs, make_model

pytestmark = [pytest.mark.slow(60), pytest.mark.timeout(200 * PATIENCE)]
PROMPT = [5, 6, 7, 8, 9, 10, 11]
TOKENS, COUNT = 40, 12
# Wide enough for the reordered copies of SGLang's weights.
WIDE = {"hidden_size": 512, "intermediate_size": 512, "head_dim": 64,
        "initializer_range": 0.05}  # fmt: skip


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "old"
    make_model(folder, 0, **WIDE)
    return folder


@pytest.fixture(scope="module", params=["sglang", pytest.param("hf", marks=on_the_cpu)])
def driver(
    request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Driver]:
    log_path = tmp_path_factory.mktemp("logs") / f"{request.param}.log"
    setup = make_setup(model_dir.parent, log_path, is_deterministic=True, seed=3)
    with driven(load_engine(request.param)(setup)) as found:
        yield found


def drawn(driver: Driver, prompt: list[int], seeds: dict[int, int]) -> dict[int, Completion]:
    """Completions by index; seeds: by index."""
    sampling = Sampling(TOKENS, 1.0, draw_seeds=tuple(seeds.values()))
    found = driver.run(driver.collect(prompt, sampling, list(seeds)))
    return {completion.index: completion for completion in found}


def same(one: Completion, other: Completion) -> bool:
    return one.token_ids == other.token_ids and one.logprobs == other.logprobs


def test_tokens_and_logprobs_are_those_of_the_seed_alone_and_among_others(driver: Driver) -> None:
    seeds = {index: 1000 + index for index in range(COUNT)}
    together = drawn(driver, PROMPT, seeds)
    # Each seed draws its own completion; short ones may coincide.
    assert len({tuple(one.token_ids) for one in together.values()}) >= COUNT - 2
    for index in (0, 5, COUNT - 1):
        assert same(drawn(driver, PROMPT, {index: seeds[index]})[index], together[index])
    # Three at once, in another order, under other indices.
    backwards = drawn(driver, PROMPT, {9: seeds[2], 4: seeds[1], 0: seeds[0]})
    assert same(backwards[9], together[2]) and same(backwards[0], together[0])


def test_other_prompts_beside_it_change_nothing(driver: Driver) -> None:
    seeds = {index: 77 + index for index in range(3)}
    alone = drawn(driver, PROMPT, seeds)
    others = [[12 + n, 5, *range(6, 7 + n)] for n in range(8)]

    async def all_at_once() -> list[list[Completion]]:
        streams = [
            driver.collect(prompt, Sampling(TOKENS, 1.0, draw_seeds=(5, 6)), [0, 1])
            for prompt in others
        ]
        sampling = Sampling(TOKENS, 1.0, draw_seeds=tuple(seeds.values()))
        return await asyncio.gather(*streams, driver.collect(PROMPT, sampling, list(seeds)))

    *_, beside = driver.run(all_at_once())
    assert all(same(one, alone[one.index]) for one in beside)


def test_seeded_draws_follow_the_probabilities(driver: Driver, model_dir: Path) -> None:
    model = load_reference(model_dir)
    draws = 400
    sampling = Sampling(1, 1.0, draw_seeds=tuple(range(draws)))
    found = driver.run(driver.collect(PROMPT, sampling, list(range(draws))))
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0, -1].double().softmax(-1) * draws
    counts = torch.zeros_like(expected)
    for completion in found:
        counts[completion.token_ids[0]] += 1
        wanted = logprobs(model, PROMPT, completion.token_ids)
        assert_near(completion.logprobs, wanted, exact=5e-5)
    often = expected >= 5
    chi_squared = float(((counts - expected) ** 2 / expected)[often].sum())
    degrees = int(often.sum())
    # Of a chi-squared distribution: mean and standard deviation.
    assert degrees >= 3 and chi_squared < degrees + 4 * (2 * degrees) ** 0.5


@on_the_cpu
def test_sglang_without_our_patches_is_refused_on_the_cpu(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_RL_SGLANG_PATCHES", "needed")
    setup = make_setup(model_dir.parent, tmp_path / "engine.log", is_deterministic=True)

    async def start() -> None:
        engine = load_engine("sglang")(setup)
        try:
            await engine.start()
        finally:
            await engine.close()

    with pytest.raises(EngineError, match="unset MEGATRON_RL_SGLANG_PATCHES"):
        asyncio.run(start())
