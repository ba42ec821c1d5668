"""The rules of scoring. Used by the verifier and its grading processes."""

from typing import Self

import pydantic

from megatron_rl.config.reward import RewardConfig, TaskConfig
from megatron_rl.config.staging import longest_stage
from megatron_rl.config.thinking import HOUSE_TAGS, ThinkTags
from megatron_rl.config.tree import Config
from megatron_rl.protocol.prompt import LengthRule
from verification.verdict import GradingError


class RewardRules(pydantic.BaseModel):
    """The reward section of a run, the length that its penalty refers to, and its think tags."""

    model_config = pydantic.ConfigDict(frozen=True)

    reward: RewardConfig = RewardConfig()
    max_tokens: int
    """Limit of a completion, the paper's l_max."""
    tags: ThinkTags = HOUSE_TAGS
    """Tags around thoughts."""

    @classmethod
    def of(cls, config: Config) -> Self:
        """The rules of a run."""
        # Training completions bring the rule of their stage along; evaluations are judged by this.
        longest = longest_stage(config)
        return cls(
            reward=longest.reward,
            max_tokens=longest.sampling.max_new_tokens,
            tags=config.render.tags,
        )

    @property
    def length_rule(self) -> LengthRule:
        """The length rule for completions whose request gives none."""
        reward = self.reward
        return LengthRule(self.max_tokens, reward.length_margin_tokens, reward.length)

    def task(self, name: str) -> TaskConfig:
        """The task of that name; GradingError when there is none."""
        tasks = self.reward.all_tasks
        if name not in tasks:
            raise GradingError(f"unknown task {name!r}: known are {', '.join(tasks)}")
        return tasks[name]
