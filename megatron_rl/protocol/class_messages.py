"""Messages of the rollout queue and verifiers about which answers are the same.

Imported by every process. On the verify endpoint; they share the ids of score requests.
"""

import msgspec

NO_ANSWER = -1
"""Class of a completion without an answer."""


class ClassRequest(msgspec.Struct, frozen=True, tag="ClassRequest"):
    """Say which of these completions of one prompt give the same answer; none of them is right."""

    request_id: int
    """From the same counter as the ids of score requests; a ScoreFailed may answer it."""
    task: str
    texts: list[str]
    prompt_tails: list[str]
    """Of each text, as in Rollout."""
    problem: str = ""
    """The question."""
    entry: str = ""
    """The prompt's `entry`, for a comparison of the user's own; others get none."""


class ClassDone(msgspec.Struct, frozen=True, tag="ClassDone"):
    """The classes of a request."""

    request_id: int
    classes: list[int]
    """Of each text: 0, 1, ... in the order in which classes come first, or NO_ANSWER."""
