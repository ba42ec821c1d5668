"""SGLang's overlap scheduler beside weight syncs: where the recorded versions of tokens are exact.

One server with it on serves both tests; `weights.kv_cache` decides how it is paused.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from generation.engine import Completion, load_engine
from megatron_rl.protocol.types import Sampling
from megatron_rl.weights.layout.shape import read_shape
from tests.generation.engine_driver import Driver, driven, make_setup
from tests.generation.precision import assert_near, is_near
from tests.generation.syncer import SliceSyncer, TrainerProcess
from tests.generation.tiny_model import logprobs, mixed_logprobs

PROMPT = [3 + i % 50 for i in range(40)]
EXACT = 1e-4
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def driver(
    models_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Driver, TrainerProcess]]:
    trainer = TrainerProcess()
    log_path = tmp_path_factory.mktemp("logs") / "sglang.log"
    engine = load_engine("sglang")(make_setup(models_dir, log_path, overlaps_schedule=True))
    try:
        with driven(engine) as found:
            yield found, trainer
    finally:
        trainer.close()


def sync_amid(
    driver: tuple[Driver, TrainerProcess], models: Path, model: LlamaForCausalLM, name: str
) -> list[Completion]:
    """Completions that a weight sync met, each of two versions."""
    served, trainer = driver
    syncer = SliceSyncer(served.engine, trainer, read_shape(models / "old"), name)
    served.run(syncer.open())
    sync = syncer.sync(model, served.engine.version + 1)
    found = served.run(served.collect_amid(sync, PROMPT, Sampling(150, 1.0), 40))
    served.run(syncer.close())
    spanning = [completion for completion in found if len(completion.spans) == 2]
    assert spanning, "no completion was in flight during the weight sync"
    return spanning


def test_keys_and_values_that_are_kept_leave_the_boundary_one_token_early(
    driver: tuple[Driver, TrainerProcess],
    models_dir: Path,
    old_model: LlamaForCausalLM,
    new_model: LlamaForCausalLM,
) -> None:
    """Why it is off then: SGLang takes the token that is in flight for one of the new weights."""
    late = 0
    for completion in sync_amid(driver, models_dir, new_model, "kept"):
        found, end = torch.tensor(completion.logprobs), completion.spans[0].end
        at, after = (
            mixed_logprobs(old_model, new_model, PROMPT, completion.token_ids, cut=cut)
            for cut in (end, end + 1)
        )
        assert is_near(found, at, exact=EXACT) or is_near(found, after, exact=EXACT)
        late += not is_near(found, at, exact=EXACT)
    assert late
    sync_amid(driver, models_dir, old_model, "back")


def test_versions_are_exact_when_a_weight_sync_drops_keys_and_values(
    driver: tuple[Driver, TrainerProcess],
    models_dir: Path,
    old_model: LlamaForCausalLM,
    new_model: LlamaForCausalLM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = driver[0].engine
    monkeypatch.setattr(engine, "_setup", replace(engine._setup, recomputes_kv_cache=True))
    for completion in sync_amid(driver, models_dir, new_model, "dropped"):
        cut, tokens = completion.spans[0].end, completion.token_ids
        older, newer = (logprobs(model, PROMPT, tokens) for model in (old_model, new_model))
        found = torch.tensor(completion.logprobs)
        assert_near(found, torch.cat([older[:cut], newer[cut:]]), exact=EXACT)
