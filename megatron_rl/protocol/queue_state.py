"""The state that the queue saves with a checkpoint: a message to the trainer, which writes JSON.

Imported by every process.
"""

import msgspec


class PromptCursor(msgspec.Struct, frozen=True):
    """Where the stream of train prompts stands."""

    draws: int
    """Prompts given out."""
    taken: list[int]
    """Of these, by source."""
    sizes: list[int]
    """Train prompts of each source."""
    seed: int
    """`run.seed`, which orders them."""


class UnfinishedGroup(msgspec.Struct, frozen=True):
    """A training group whose completions are not trained on."""

    number: int
    prompt_id: str
    stage: int = 0
    """The stage whose rules sampled it, and generate it again."""


class StageState(msgspec.Struct, frozen=True):
    """Where the stages of the run stand."""

    first_steps: list[int]
    """The first batch of each stage, as far as it is known."""
    values: list[float]
    """Of the metric that the next stage waits for, by batch."""


class PromptVisits(msgspec.Struct, frozen=True):
    """What the curriculum knows of a prompt."""

    visits: int
    """Groups of it that were counted."""
    solved: int
    """Of these, the latest ones in a row in which all completions were right."""
    is_retired: bool


class CurriculumState(msgspec.Struct, frozen=True):
    """Where the curriculum stands."""

    admitted_bands: int
    window: list[tuple[int, int]]
    """(right, graded completions) of the latest visits since a band was admitted, oldest first."""
    prompts: dict[str, PromptVisits]
    """By id."""
    readmitted: int
    """Prompts that were retired and are drawn again, so far."""


class UnfinishedEvaluation(msgspec.Struct, frozen=True):
    """An evaluation that was running or due."""

    label: str
    """Its whole name, with that of its set."""
    version: int
    """The policy version that it measures."""
    has_begun: bool
    """Whether the file of its label holds what was done of it."""


class QueueState(msgspec.Struct, frozen=True, tag="QueueState"):
    """What the queue needs to resume after batch number `step`; a checkpoint has it as JSON."""

    step: int
    cursor: PromptCursor
    groups_opened: int
    """Groups get numbers from here on."""
    unfinished: list[UnfinishedGroup]
    """Opened, but neither trained on nor counted as dropped: they are generated again."""
    evaluated: list[str]
    """Labels of the evaluations that are done."""
    stages: StageState = StageState([0], [])
    curriculum: CurriculumState | None = None
    """None without one."""
    unfinished_evaluations: list[UnfinishedEvaluation] = []
    """Running first, then due; checkpoints of earlier releases name none."""
