"""Messages between the rollout queue and verifiers about classes of equal answers.

Imported by every process. On the verify endpoint; they share the ids of score requests.
"""

import msgspec

NO_ANSWER = -1
"""Class of a completion without an answer."""


class ClassRequest(msgspec.Struct, frozen=True, tag="ClassRequest"):
    """Find the completions of one prompt with equal answers; none of the answers is right."""

    request_id: int
    """From the same counter as the ids of score requests; a ScoreFailed may answer it."""
    task: str
    texts: list[str]
    prompt_tails: list[str]
    """For each text, as in Rollout."""
    problem: str = ""
    """The question."""
    entry: str = ""
    """The prompt's `entry`, only for a user-defined comparison."""


class ClassDone(msgspec.Struct, frozen=True, tag="ClassDone"):
    """The classes of a request."""

    request_id: int
    classes: list[int]
    """For each text: 0, 1, ... in order of first appearance, or NO_ANSWER."""
