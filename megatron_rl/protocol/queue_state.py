"""What the queue saves with a checkpoint: a message to the trainer, which writes it as JSON.

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


class QueueState(msgspec.Struct, frozen=True, tag="QueueState"):
    """What the queue needs to go on after batch number `step`; a checkpoint holds it as JSON."""

    step: int
    cursor: PromptCursor
    groups_opened: int
    """Groups get numbers from here on."""
    unfinished: list[UnfinishedGroup]
    """Opened, but neither trained on nor counted as dropped: they are generated again."""
    evaluated: list[str]
    """Labels of the evaluations that are done."""
