"""A real SGLang server serves all positions of a model, more than it counts itself."""

from dataclasses import replace
from pathlib import Path

import pytest

from generation.engine import EngineSetup, engine_setup
from generation.sglang_engine import SGLangEngine
from megatron_rl.config.files import load_config
from megatron_rl.protocol.types import Sampling
from tests.generation.engine_driver import driven, make_setup
from tests.generation.precision import PATIENCE, assert_near, load_reference
from tests.generation.tiny_model import logprobs, make_model

YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
POSITIONS = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, `old`, whose config.json is as Qwen3's recipe makes it."""
    found = tmp_path_factory.mktemp("stretched")
    # No token ends a completion before its length.
    changes = {"max_position_embeddings": 40, "rope_parameters": YARN, "eos_token_id": None}
    make_model(found / "old", seed=0, **changes)
    return found


def run_setup(folder: Path, context_tokens: int) -> EngineSetup:
    given = [f"model.path={folder / 'old'}", f"generator.context_tokens={context_tokens}"]
    return engine_setup(load_config(None, [*given, "sampling.max_new_tokens=20"]), 0, ())


@pytest.mark.parametrize(
    ("context_tokens", "is_told"), [(40, True), (41, True), (POSITIONS, True), (129, False)]
)
def test_sglang_is_told_of_all_positions_and_of_no_more(
    folder: Path, context_tokens: int, is_told: bool
) -> None:
    assert run_setup(folder, context_tokens).may_exceed_model is is_told


@pytest.mark.exhaustive
@pytest.mark.slow(20)
@pytest.mark.timeout(200 * PATIENCE)
def test_completions_beyond_max_position_embeddings_are_the_models(
    folder: Path, tmp_path: Path
) -> None:
    setup = replace(
        make_setup(folder, tmp_path / "sglang.log", context_tokens=POSITIONS),
        may_exceed_model=run_setup(folder, POSITIONS).may_exceed_model,
        stop_ids=(),
    )
    prompt, tokens = [3 + i % 50 for i in range(20)], POSITIONS - 20
    with driven(SGLangEngine(setup)) as driver:
        found = driver.run(driver.collect(prompt, Sampling(tokens, 1.0), [0, 1, 2]))
    model = load_reference(folder / "old")
    for completion in found:
        assert len(completion.token_ids) == tokens > 40
        expected = logprobs(model, prompt, completion.token_ids)
        assert_near(completion.logprobs, expected, exact=1e-4)
