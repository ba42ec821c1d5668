"""Think tags: the texts around a model's thoughts. Imported by every process."""

from typing import Any, Self

from pydantic import model_validator

from megatron_rl.config.section import Section

_AUTO = "auto"
ANSWER_CHANNEL = "<|channel|>final<|message|>"
"""Begins the answer of gpt-oss, which writes thoughts and answer as separate messages."""


class ThinkTags(Section):
    """Texts around the model's thoughts. `thinking = "auto"` and `thinking = "none"` stand for
    both keys."""

    open: str = _AUTO
    """Text that begins the thoughts, such as "[THINK]"; "": the model does not think. auto: the
    tags that render.system_prompt, the chat template or the vocabulary names; without any, <think>
    where a cold start or a format check has thoughts, else "" (docs/verification.md). The
    config.toml of a run has the result."""
    close: str = _AUTO
    """Text that ends the thoughts, such as "[/THINK]"; set it together with open."""

    @property
    def is_auto(self) -> bool:
        """Whether the model decides."""
        return self.open == _AUTO

    @property
    def is_none(self) -> bool:
        """Whether the model does not think."""
        return not self.open

    @property
    def are_channels(self) -> bool:
        """Whether the model writes thoughts and answer as separate messages, as gpt-oss does."""
        return self.close.endswith(ANSWER_CHANNEL)

    def fill(self, text: str) -> str:
        """The text with the tags in place of {open} and {close}."""
        return text.replace("{open}", self.open).replace("{close}", self.close)

    def around(self, thoughts: str) -> str:
        """The thoughts between the tags."""
        return f"{self.open}{thoughts}{self.close}"

    def is_in(self, text: str) -> bool:
        """Whether either tag is in a text."""
        return self.open in text or self.close in text

    def around_thoughts(self, thoughts: str) -> str:
        """Thoughts as models write them before an answer: on their own lines, but for channels."""
        if self.are_channels:
            return self.around(thoughts)
        return self.around(f"\n{thoughts.strip()}\n") + "\n\n"

    def removed_from(self, text: str) -> str:
        """The text without the tags."""
        return text.replace(self.open, "").replace(self.close, "")

    def is_opened_by(self, prompt_tail: str) -> bool:
        """Whether a prompt with this end opens the thoughts, as DeepSeek-R1's and QwQ's."""
        return prompt_tail.rstrip().endswith(self.open)

    def is_closed_by(self, prompt_tail: str) -> bool:
        """Whether a prompt with this end closes the thoughts, as Qwen3's without thinking."""
        return prompt_tail.rstrip().endswith(self.close)

    @model_validator(mode="before")
    @classmethod
    def _read_word(cls, given: Any) -> Any:
        words = {_AUTO: _AUTO, "none": ""}
        if isinstance(given, str) and given in words:
            return {"open": words[given], "close": words[given]}
        return given

    @model_validator(mode="after")
    def _check_pair(self) -> Self:
        pair = f'render.thinking = {{open = "{self.open}", close = "{self.close}"}}'
        example = 'give two texts, such as {open = "[THINK]", close = "[/THINK]"}, "auto" or "none"'
        if self.open == self.close and self.open in (_AUTO, ""):
            return self
        if {self.open, self.close} & {_AUTO, ""}:
            raise ValueError(f"{pair} names one tag of two: {example}")
        if self.open in self.close or self.close in self.open:
            raise ValueError(f"{pair}: one tag holds the other: {example}")
        if any(tag != tag.strip() for tag in (self.open, self.close)):
            raise ValueError(f"{pair}: a tag begins or ends with blanks: {example}")
        return self


def _pair(name: str, start: str = "<", end: str = ">") -> ThinkTags:
    return ThinkTags(open=f"{start}{name}{end}", close=f"{start}/{name}{end}")


HOUSE_TAGS = _pair("think")
"""Tags of models that have none of their own."""
CHANNEL_TAGS = ThinkTags(
    open="<|channel|>analysis<|message|>", close=f"<|end|><|start|>assistant{ANSWER_CHANNEL}"
)
"""gpt-oss': a message of thoughts ends, and another one begins."""
MODEL_TAGS = (
    _pair("THINK", "[", "]"), HOUSE_TAGS, _pair("think", "◁", "▷"), _pair("seed:think"),
    CHANNEL_TAGS,
)  # fmt: skip
"""Tags that chat templates and vocabularies are searched for, in this order."""
KNOWN_TAGS = (*MODEL_TAGS, *map(_pair, ("thinking", "thought", "thoughts", "reasoning")))
"""Tags that other people's examples may have."""


def in_tags(response: str, tags: ThinkTags) -> str:
    """An example's response whose thoughts are between these tags.

    Thoughts in other known tags are converted; thoughts without an opening, as a template that
    opens them leaves behind, get one.
    """
    for pair in (tags, *KNOWN_TAGS):
        before, opening, rest = response.partition(pair.open)
        if not opening:
            before, rest = "", response
        thoughts, closing, answer = rest.partition(pair.close)
        if closing and not before.strip():
            return tags.around(thoughts) + answer
    return response


def continued(response: str, tags: ThinkTags, prompt_tail: str) -> str:
    """An example's response behind a prompt that ends with this text.

    A prompt that opens the thoughts takes the opening away, and a prompt that closes them takes
    the thoughts away.
    """
    text, is_opened = in_tags(response, tags), tags.is_opened_by(prompt_tail)
    if not text.startswith(tags.open) or not (is_opened or tags.is_closed_by(prompt_tail)):
        return text
    _, _, rest = text.partition(tags.open if is_opened else tags.close)
    return rest if prompt_tail == prompt_tail.rstrip() else rest.lstrip()


def without_thoughts(text: str) -> str:
    """A served model's text without its thoughts, in whatever known tags.

    The chat template may have opened the thoughts, so that only the closing tag is there.
    """
    for tags in KNOWN_TAGS:
        before, opening, rest = text.partition(tags.open)
        if not opening:
            text = text.split(tags.close)[-1]
            continue
        _, closing, after = rest.partition(tags.close)
        if closing:
            text = before.rstrip() + after
    return text
