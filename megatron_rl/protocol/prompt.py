"""A prompt and its length penalty; contents in parts. Imported by every process."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from megatron_rl.protocol.limits import Count, Finite

_TEXT_PARTS = ("text", "input_text", "output_text")


class NotText(ValueError):
    """A message holds something other than text; the text names it."""

    reason = "not_text"


def text_of_parts(parts: Sequence[Any]) -> str:
    """The text of a content in parts. Chat templates, too, put nothing between the parts.

    Raises NotText.
    """
    return "".join(map(_text_of_part, parts))


def _text_of_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise NotText(f"a message has a part of the type {type(part).__name__}; expected text")
    kind, text = part.get("type", "text"), part.get("text")
    if kind not in _TEXT_PARTS or not isinstance(text, str):
        raise NotText(
            f"a message has a part of the type {kind!r} (keys {', '.join(map(str, part))}); only "
            "parts of text are read"
        )
    return text


def normalized(text: str) -> str:
    """Equal for texts that differ only in case and spacing."""
    return " ".join(text.casefold().split())


class LengthRule(msgspec.Struct, frozen=True):
    """The soft penalty near the length limit (`verification/score.py`)."""

    max_tokens: Count
    """The paper's l_max."""
    margin_tokens: Count
    """The paper's l_cache; 0: no penalty."""
    largest: Finite


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str


class _Tests(msgspec.Struct, frozen=True):
    """The fields of a program's tests that say how to run it."""

    cases: list[msgspec.Raw] = []
    entry_point: str = ""


class Prompt(msgspec.Struct, frozen=True):
    """A question with its reference answer."""

    id: str
    task: str
    """"math", "exact", "reasoning_gym", "code", or one of reward.tasks."""
    messages: list[ChatMessage]
    answer: str
    """The reference answer; the first of several accepted ones."""
    split: str = "train"
    """"train" or "held_out"; never both for the same question."""
    entry: str = ""
    """JSON that the task's grader needs: the reasoning_gym entry, the tests of a program."""
    language: str = ""
    """Language of the response, such as "fr"; empty: that of the question."""
    pass_rate: Finite | None = None
    """Share of right completions in an earlier grading; None: unknown."""
    place: str = ""
    """Source as file:line, for messages to the user."""
    is_spare: bool = False
    """Held out only by a hash: it is trained on if no evaluation uses it."""
    other_answers: list[str] = []
    """Further accepted answers: a completion is right if it equals any."""
    is_episode: bool = False
    """Its environment decides the reward: prompts that begin alike are different games."""

    @property
    def answers(self) -> list[str]:
        """All accepted answers."""
        return [self.answer, *self.other_answers]

    @property
    def question(self) -> str:
        """The last user message."""
        return next((m.content for m in reversed(self.messages) if m.role == "user"), "")

    @property
    def is_program(self) -> bool:
        """Whether its tests run the answer as a program instead of calling a function of it."""
        try:
            tests = msgspec.json.decode(self.entry or "{}", type=_Tests)
        except msgspec.DecodeError:
            return False  # an entry of another task
        return bool(tests.cases) and not tests.entry_point

    @property
    def normalized_question(self) -> str:
        """Equal for prompts that differ only in case and spacing; of an environment its id."""
        if self.is_episode:
            return self.id
        return normalized(" ".join(m.content for m in self.messages))
