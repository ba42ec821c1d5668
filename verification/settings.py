"""What the configuration of a run means to the verifier.

Used by the verifier's entry, and by whoever wants to refuse a bad configuration before a run.
Apart from `score.py`, so that grading processes start without the configuration tree.
"""

from collections.abc import Iterable

from megatron_rl.protocol.config import Config, PromptSource
from megatron_rl.protocol.process import InputError
from verification.gym_answer import REFUSED_DATASETS
from verification.score import RewardRules


def rules_of(config: Config) -> RewardRules:
    """The reward rules of a run."""
    return RewardRules(
        correct_reward=config.verifier.correct_reward,
        format_reward=config.verifier.format_reward,
        max_tokens=config.sampling.max_new_tokens,
        margin_tokens=config.verifier.length_margin_tokens,
    )


def check_sources(sources: Iterable[PromptSource]) -> None:
    """Raise InputError for prompt sources whose completions could not be graded faithfully."""
    for source in sources:
        if source.kind == "reasoning_gym" and source.name in REFUSED_DATASETS:
            raise InputError(
                f"reasoning_gym dataset {source.name!r} is refused: "
                f"{REFUSED_DATASETS[source.name]}. Choose another dataset for prompts"
            )
