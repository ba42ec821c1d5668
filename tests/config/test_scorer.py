"""Which settings a reference in an engine excludes."""

import pytest

from megatron_rl.config.files import ConfigError, load_config

DISTILL = ["algorithm.preset=distill", "algorithm.reference.policy=teacher"]
SAMPLED = [*DISTILL, "algorithm.kl.placement=reward", "algorithm.kl.estimator=k1"]
ENGINE = "algorithm.reference.source=engine"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (DISTILL, 'reads those of the whole vocabulary: set algorithm.kl.placement="reward"'),
        (["algorithm.preset=grpo", "algorithm.reference.policy=ema"], 'set it to "start" or a f'),
        (["algorithm.preset=dro"], "reads the reference's hidden states"),
        ([*SAMPLED, "sampling.temperature=0.7"], "temperature=0.7.*set it to 1"),
        (
            [*SAMPLED, "generator.context_tokens=4096", "scorer.kv_tokens=4096"],
            "scorer.kv_tokens=4096 does not hold one sequence of generator.context_tokens=4096",
        ),
        ([*SAMPLED, "expert.scorer.answer_within_s=500"], "answer_within_s=500 is not above"),
        (["algorithm.preset=grpo", "model.megatron_path=m"], "megatron_path=.*/m: make a fol"),
    ],
)
def test_what_an_engine_cannot_score_is_refused(given: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, [*given, ENGINE])
    # It is the engine that is refused.
    load_config(None, given)


@pytest.mark.parametrize("preset", ["grpo", "agro", "spo", "jepo"])
def test_presets_with_a_frozen_reference_take_an_engine(preset: str) -> None:
    assert load_config(None, [f"algorithm.preset={preset}", ENGINE]).algorithm.needs_scorer
    assert not load_config(None, [f"algorithm.preset={preset}"]).algorithm.needs_scorer


def test_without_a_reference_there_is_no_scorer() -> None:
    assert not load_config(None, [ENGINE]).algorithm.needs_scorer


def test_fp8_parameters_which_cannot_be_swapped_have_a_reference_in_an_engine() -> None:
    given = [
        "model.fp8=tensorwise", "expert.model.fp8_parameters=true",
        "parallel.distributed_optimizer=true", "algorithm.preset=grpo",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="scales that cannot be swapped"):
        load_config(None, given)
    assert load_config(None, [*given, ENGINE]).algorithm.needs_scorer
