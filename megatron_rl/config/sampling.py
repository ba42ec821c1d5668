"""The section `[sampling]`: how training completions are sampled. Part of the tree."""

from typing import Annotated, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from megatron_rl.config.evaluation import EvalConfig
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


def check_sampling(engine: str, sampling: SamplingConfig, evaluation: EvalConfig) -> None:
    """Raise ValueError for what the engine cannot sample."""
    found = [sampling, evaluation, *evaluation.sets]
    for key, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if engine == "hf" and any(getattr(one, key) not in (off, None) for one in found):
            raise ValueError(
                f"generator.engine='hf' samples with {key} = {off:g} alone: leave sampling.{key}, "
                f"eval.{key} and that of eval.sets at {off:g}, or use 'sglang'"
            )
    if engine == "vllm" and sampling.stop:
        raise ValueError(
            f"generator.engine='vllm' knows no sampling.stop (given: {sampling.stop}): leave it "
            "out, or use 'sglang'"
        )
