"""An unfinished score, and the questions and findings that pass between steps of grading.

Used by the verifier and its grading processes. ScoreRequest -> Draft -> (Question -> Finding ->
Draft)* -> Score: the verifier holds the draft; only questions and findings travel.
"""

import msgspec

from megatron_rl.config.reward import CUSTOM, Step, StepKind
from megatron_rl.protocol.types import Score, ScoreRequest
from verification.format import FormatResult


class Question(msgspec.Struct, frozen=True):
    """One step of one score, as sent to a grading process."""

    kind: StepKind
    request: ScoreRequest
    """Without its text unless a user's function reads it."""
    checked: FormatResult
    """Without thoughts and final part unless the step judges the language."""


class Finding(msgspec.Struct, frozen=True):
    """The result of a step."""

    parts: dict[str, float]
    """Addends of the reward."""
    reason: str = ""
    """Reason of the verdict; only the step "judge" sets it, `tests` and `detail`."""
    tests: tuple[int, int] = (0, 0)
    """As in Score."""
    detail: str = ""
    """As in Score."""


class Draft(msgspec.Struct, frozen=True):
    """The parts of a score known so far, and the remaining steps."""

    request: ScoreRequest
    checked: FormatResult
    steps: tuple[Step, ...]
    """Next one first; never empty."""
    found: Finding = Finding({})
    """Of the steps taken; before the answer is judged without a reason, and "correct" is 0."""

    @property
    def question(self) -> Question:
        """The next step, as sent to a grading process."""
        request, checked, (kind, pool) = self.request, self.checked, self.steps[0]
        # Text and thoughts are nearly all of a completion: they travel only if a step reads them.
        if pool != CUSTOM:
            request = msgspec.structs.replace(request, text="")
        if kind != "language":
            checked = checked._replace(thoughts="", final="")
        return Question(kind, request, checked)

    def add(self, finding: Finding) -> "Draft | Score":
        """The draft after its next step; the score when that was the last."""
        one, other = self.found, finding
        found = Finding(
            parts=one.parts | other.parts,
            reason=one.reason or other.reason,
            tests=max(one.tests, other.tests),
            detail=one.detail or other.detail,
        )
        if len(self.steps) > 1:
            return Draft(self.request, self.checked, self.steps[1:], found)
        reward = sum(found.parts.values())
        return Score(reward, found.parts, found.reason, found.tests, found.detail)
