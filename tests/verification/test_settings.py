import pytest

from megatron_rl.protocol.config import Config, PromptSource, SamplingConfig, VerifierConfig
from megatron_rl.protocol.process import InputError
from verification.settings import check_sources, rules_of


def test_rules_come_from_the_configuration() -> None:
    config = Config(
        verifier=VerifierConfig(length_margin_tokens=8, correct_reward=2.0, format_reward=0.5),
        sampling=SamplingConfig(max_new_tokens=64),
    )
    rules = rules_of(config)
    assert (rules.correct_reward, rules.format_reward) == (2.0, 0.5)
    assert (rules.max_tokens, rules.margin_tokens) == (64, 8)


def test_untrustworthy_dataset_is_refused_at_start() -> None:
    check_sources([PromptSource(kind="reasoning_gym", name="chain_sum"), PromptSource()])
    with pytest.raises(InputError, match="'n_queens' is refused: its scorer evaluates"):
        check_sources([PromptSource(kind="reasoning_gym", name="n_queens")])
