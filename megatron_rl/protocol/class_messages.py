"""Messages between the rollout queue and verifiers about classes of equal answers.

Imported by every process. On the verify endpoint; they share the ids of score requests.
"""

import msgspec

from megatron_rl.protocol.limits import Id, Version

NO_ANSWER = -1
"""Class of a completion without an answer."""


class ClassRequest(msgspec.Struct, frozen=True, tag="ClassRequest"):
    """Find the completions of one prompt with equal answers; none of the answers is right."""

    request_id: Id
    """From the same counter as the ids of score requests; a ScoreFailed may answer it."""
    task: str
    texts: list[str]
    prompt_tails: list[str]
    """For each text, as in Rollout."""
    problem: str = ""
    """The question."""
    entry: str = ""
    """The prompt's `entry`, only for a user-defined comparison."""

    def find_fault(self) -> str:
        """Why the request contradicts itself; "" if it does not."""
        if len(self.texts) == len(self.prompt_tails):
            return ""
        return f"{len(self.texts)} texts and {len(self.prompt_tails)} prompt tails"


class ClassDone(msgspec.Struct, frozen=True, tag="ClassDone"):
    """The classes of a request."""

    request_id: Id
    classes: list[Version]
    """For each text: 0, 1, ... in order of first appearance, or NO_ANSWER."""
