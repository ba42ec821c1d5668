"""The section `[sampling]`: how training completions are sampled. Part of the tree."""

from typing import Annotated, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from megatron_rl.config.section import Section


class SamplingConfig(Section):
    """Sampling of training completions."""

    max_new_tokens: PositiveInt = 1024
    """Maximum number of new tokens per completion."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: total probability of the tokens to sample from. Below 1 the generator's
    logprobs no longer match the trainer's."""
    top_k: int = Field(default=0, ge=0)
    """Sample from the k most likely tokens; 0: from all. Above 0 the generator's logprobs no longer
    match the trainer's."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Leave out tokens less likely than this share of the most likely token's probability. Above 0
    the generator's logprobs no longer match the trainer's."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Strings that end a completion, in training and in evaluations. The completion keeps all its
    tokens, the one that completes the string included; its finish reason is "stop"."""

    @model_validator(mode="after")
    def _check_stop(self) -> Self:
        if len(set(self.stop)) < len(self.stop):
            raise ValueError(f"sampling.stop={self.stop}: name each string once")
        return self
