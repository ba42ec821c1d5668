"""What a score depends on beside the completion. Used by the verifier and its grading processes."""

from typing import Self

import pydantic

from megatron_rl.config.reward import RewardConfig, TaskConfig
from megatron_rl.config.tree import Config
from verification.verdict import GradingError


class RewardRules(pydantic.BaseModel):
    """The reward section of a run, and the length that its penalty refers to."""

    model_config = pydantic.ConfigDict(frozen=True)

    reward: RewardConfig = RewardConfig()
    max_tokens: int
    """Limit of a completion, the paper's l_max."""

    @classmethod
    def of(cls, config: Config) -> Self:
        """The rules of a run."""
        return cls(reward=config.reward, max_tokens=config.sampling.max_new_tokens)

    def task(self, name: str) -> TaskConfig:
        """The task of that name; GradingError when there is none."""
        tasks = self.reward.all_tasks
        if name not in tasks:
            raise GradingError(f"unknown task {name!r}: known are {', '.join(tasks)}")
        return tasks[name]
