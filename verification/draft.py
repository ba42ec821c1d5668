"""A score in the making: what is passed on from one step of grading to the next.

Used by the verifier and its grading processes. ScoreRequest -> Draft -> (Question -> Finding ->
Draft)* -> Score: the verifier holds the draft; only questions and findings travel.
"""

import msgspec

from megatron_rl.config.reward import CUSTOM, Step, StepKind
from megatron_rl.protocol.types import Score, ScoreRequest
from verification.format_checks import FormatResult


class Question(msgspec.Struct, frozen=True):
    """One step of one score, as a grading process is asked to take it."""

    kind: StepKind
    request: ScoreRequest
    """Its text is left out where no function of the user's own reads it."""
    checked: FormatResult
    """Its thoughts and its final part are left out but for the language."""


class Finding(msgspec.Struct, frozen=True):
    """What a step has found."""

    parts: dict[str, float]
    """Addends of the reward."""
    reason: str = ""
    """Reason of the verdict, from the step "judge" alone."""
    tests: tuple[int, int] = (0, 0)
    """As in Score, from the step "judge" alone."""
    detail: str = ""
    """As in Score, from the step "judge" alone."""


class Draft(msgspec.Struct, frozen=True):
    """What is known of a completion that passed its format check, and the steps that are left."""

    request: ScoreRequest
    checked: FormatResult
    parts: dict[str, float]
    """Addends of the reward found so far; "correct" is 0 before the answer is judged."""
    reason: str
    """Reason of the verdict; empty before the answer is judged."""
    steps: tuple[Step, ...]
    """Next one first; never empty."""
    tests: tuple[int, int] = (0, 0)
    """As in Score."""
    detail: str = ""
    """As in Score."""

    @property
    def question(self) -> Question:
        """What a grading process needs to know for the next step."""
        request, checked, (kind, pool) = self.request, self.checked, self.steps[0]
        # Text and thoughts are nearly all of a completion: they travel only where they are read.
        if pool != CUSTOM:
            request = msgspec.structs.replace(request, text="")
        if kind != "language":
            checked = checked._replace(thoughts="", final="")
        return Question(kind, request, checked)

    def add(self, finding: Finding) -> "Draft | Score":
        """The draft after its next step; the score when that was the last."""
        parts = self.parts | finding.parts
        reason = self.reason or finding.reason
        tests = max(self.tests, finding.tests)
        detail = self.detail or finding.detail
        if len(self.steps) == 1:
            return Score(sum(parts.values()), parts, reason, tests, detail)
        return Draft(self.request, self.checked, parts, reason, self.steps[1:], tests, detail)
