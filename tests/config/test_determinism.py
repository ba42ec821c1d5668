"""Which keys `expert.generator.deterministic` refuses, and what it seeds."""

import pytest

from megatron_rl.config.staging import resolve_stages
from megatron_rl.config.tree import Config

EXACT = {
    "generator": {"deterministic": True},
    "queue": {"max_staleness": 0},
    "train": {"steps": 1, "deterministic": True},
}


def test_deterministic_synchronous_run_is_accepted() -> None:
    assert Config.model_validate(EXACT).generator.deterministic


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        ("queue", {"max_staleness": 1}, "queue.max_staleness=1: the time of a weight sync"),
        ("train", {"steps": 1}, "needs train.deterministic=true"),
        ("generator", {"deterministic": True, "engine": "vllm"}, "use 'sglang' or 'hf'"),
    ],
)
def test_key_that_makes_a_resume_inexact_is_refused(
    section: str, values: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match="expert.generator.deterministic=true") as error:
        Config.model_validate(EXACT | {section: values})
    assert words in str(error.value)


def test_scorer_is_refused() -> None:
    algorithm = {"preset": "grpo", "reference": {"source": "engine"}}
    with pytest.raises(ValueError, match="algorithm.reference.source='trainer'"):
        Config.model_validate(EXACT | {"algorithm": algorithm})


def test_evaluation_alone_needs_no_trainer() -> None:
    given = {"generator": {"deterministic": True}, "train": {"steps": 0}}
    assert Config.model_validate(given).generator.deterministic


def test_stage_may_not_become_asynchronous() -> None:
    stages = [{"at_step": 3, "queue": {"max_staleness": 1}}]
    with pytest.raises(ValueError, match="queue.max_staleness=1"):
        resolve_stages(Config.model_validate(EXACT | {"stages": stages}))
