"""The section `[eval]` of the configuration tree."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from megatron_rl.config.prompts import PromptSource
from megatron_rl.config.section import Section

MAX_SAMPLES = 1024
"""Maximum completions per prompt, for the exact count of votes."""
AUTO_PROMPTS = 256
"""Maximum prompts of eval.prompts = "auto"."""
CLEAR_ERRORS = 3
"""Combined standard errors below which a difference of two accuracies may be chance."""
_Samples = Annotated[int, Field(ge=1, le=MAX_SAMPLES)]


class EvalSet(Section):
    """One evaluation set: its own prompts and its own sampling. Not given: as in [eval]."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]+$")
    """Name of the set in figures and files: letters, digits, - and _."""
    prompts: PromptSource
    """Source of the set's prompts, as in [[prompts]]. All lines count except "split": "train"; the
    trainer never trains on their questions."""
    problems: PositiveInt | None = None
    """Number of prompts to use, from the first; not given: all."""
    samples: _Samples | None = None
    """Number of completions per prompt."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus sampling: total probability of the tokens to sample from."""
    top_k: int | None = Field(default=None, ge=0)
    """Sample from the k most likely tokens; 0: from all."""
    min_p: float | None = Field(default=None, ge=0, lt=1)
    """Leave out tokens less likely than this share of the most likely token's probability."""
    max_new_tokens: PositiveInt | None = None
    """Maximum number of new tokens per completion."""


class EvalConfig(Section):
    """Evaluation by the generators, on held-out prompts and on sets by name."""

    prompts: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Number of held-out prompts to evaluate on. auto: all, at most 256; 0: none. A hash holds out
    no prompts beyond this number; with auto and eval.sets, none at all."""
    samples: _Samples = 1
    """Number of completions per prompt. auto: 4, or 1 with temperature 0."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy, which makes reasoning models repeat themselves."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: total probability of the tokens to sample from."""
    top_k: int = Field(default=0, ge=0)
    """Sample from the k most likely tokens; 0: from all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Leave out tokens less likely than this share of the most likely token's probability."""
    max_new_tokens: PositiveInt | None = None
    """Limit of a completion; not given: sampling.max_new_tokens."""
    sets: list[EvalSet] = []
    """Evaluation sets besides the held-out prompts, each evaluated separately."""
    every_steps: int = Field(default=0, ge=0)
    """Number of steps between evaluations; 0: evaluate only before and after training."""
    replicas: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Number of generators that keep the evaluated version while the others generate for training.
    0: all evaluate, and the batch that makes the next version waits. auto: a quarter of
    generator.replicas, at least one where there are two."""
    timeout_s: PositiveFloat = 600.0
    """Seconds that an evaluation may take, for each set; auto: twice
    expert.queue.lease_timeout_s, at least 600 s times run.patience. A late evaluation ends without
    missing prompts (eval/lost) and missing grades (eval/not_graded); training continues. In a run
    that only evaluates, missing prompts end the run."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [one.name for one in self.sets]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"eval.sets: the name {repeated[0]!r} is given twice: choose another")
        return self

    @property
    def all_timeout_s(self) -> float:
        """Maximum seconds for all sets of a version, one after the other."""
        return (bool(self.prompts) + len(self.sets)) * self.timeout_s

    @property
    def is_wanted(self) -> bool:
        """Whether any prompts are evaluated."""
        return bool(self.prompts or self.sets)

    def most_held_out(self, *, chooses: bool) -> int:
        """Maximum number of prompts that a hash holds out.

        chooses: held-out prompts choose a model of the cold start.
        """
        if self.prompts != "auto":
            return self.prompts
        return 0 if self.sets and not chooses else AUTO_PROMPTS

    def longest(self, training: int) -> int:
        """Longest completion of any evaluation, in tokens; training: sampling.max_new_tokens."""
        default = self.max_new_tokens or training
        return max([default, *(one.max_new_tokens or default for one in self.sets)])
