"""The queue's state in a checkpoint, which the trainer receives and writes as JSON.

Imported by every process.
"""

import msgspec

from megatron_rl.protocol.limits import Count, Id


class PromptCursor(msgspec.Struct, frozen=True):
    """Position in the stream of train prompts."""

    draws: Id
    """Number of drawn prompts."""
    taken: list[Id]
    """Number of drawn prompts by source."""
    sizes: list[Id]
    """Number of train prompts by source."""
    seed: int
    """`run.seed`, which orders the prompts."""


class UnfinishedGroup(msgspec.Struct, frozen=True):
    """A training group that is not trained on."""

    number: Id
    prompt_id: str
    stage: Count = 0
    """The stage whose rules sample it."""
    draw: Id = 0
    """Number of prompts that were drawn before its own, which seeds the group."""


class StageState(msgspec.Struct, frozen=True):
    """State of the stages."""

    first_steps: list[int]
    """The first batch of each stage, as far as known."""
    values: list[float]
    """Plateau metric of the current stage, by batch."""
    plateau_metrics: list[str] = []
    """By stage after the first, to the one that `values` decide: the metric whose plateau begins
    it, or "" for a stage that begins at a step. Earlier releases wrote none."""


class PromptVisits(msgspec.Struct, frozen=True):
    """Statistics of a prompt in the curriculum."""

    visits: int
    """Number of counted groups."""
    solved: int
    """Number of latest groups in a row whose completions were all right."""
    is_retired: bool


class CurriculumState(msgspec.Struct, frozen=True):
    """State of the curriculum."""

    admitted_bands: int
    window: list[tuple[int, int]]
    """(right, graded completions) of the latest visits since a band was admitted, oldest first."""
    prompts: dict[str, PromptVisits]
    """By id."""
    readmitted: int
    """Number of retired prompts that were drawn again."""


class UnfinishedEvaluation(msgspec.Struct, frozen=True):
    """An evaluation that was running or due."""

    label: str
    """With the name of its set."""
    version: int
    """The measured policy version."""
    has_begun: bool
    """Whether the file of its label has its results so far."""


class QueueState(msgspec.Struct, frozen=True, tag="QueueState"):
    """State of the queue from which it resumes after `step` batches; JSON in a checkpoint."""

    step: Count
    cursor: PromptCursor
    groups_opened: Id
    """Number of the next group."""
    unfinished: list[UnfinishedGroup]
    """Groups that are neither trained on nor counted as dropped: they are generated again."""
    evaluated: list[str]
    """Labels of the ended evaluations."""
    stages: StageState = StageState([0], [])
    curriculum: CurriculumState | None = None
    unfinished_evaluations: list[UnfinishedEvaluation] = []
    """The running one first; checkpoints of earlier releases have none."""
