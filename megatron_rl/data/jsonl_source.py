"""Reads prompts of a JSONL file: the forms of a line, and the split of lines without one.

Used by the rollout queue at start, and by tools that need the same prompts or lines.
"""

import difflib
import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from megatron_rl.config.errors import InputError
from megatron_rl.config.lookup import nearest
from megatron_rl.config.reward import CODE
from megatron_rl.config.tree import PromptSource
from megatron_rl.data.answers import accepted_answers, has_placeholder, is_placeholder, read_rate
from megatron_rl.data.messages import plain_turns, refuse_tools
from megatron_rl.protocol.line_errors import half_pair_fault, json_fault, text_lines
from megatron_rl.protocol.prompt import NotText
from megatron_rl.protocol.types import ChatMessage, Prompt

_SPLITS = ("train", "held_out")
QUESTIONS = ("messages", "prompt", "question", "problem")
_EXPECTED = (
    'expected one JSON object a line: {"question": "...", "answer": "..."}, or "messages": '
    '[{"role": "user", "content": "..."}] in place of the question; with optional "task", '
    '"split" ("train" or "held_out"), "id", "entry", "language", "pass_rate" (0 to 1). "answer" '
    'may be a list of accepted answers, and may be missing beside an "entry"'
)
_NO_ANSWER = "missing required field `answer`"
_NO_QUESTION = f"there is no question; {_EXPECTED}"
COMPARED = ("math", "exact")
"""Our tasks that compare with the answer."""
_IMAGE_MARKS = ("<image>", "<video>", "<|image_pad|>")
ENDS_IN_ANSWER = "the messages end in an answer of the assistant"
"""Fault of a conversation: the model would see the answer."""
_SHORTEN = (
    "allowed are messages that end with the user's question; remove the last message, and put the "
    'result that the reward compares with into "answer". Rows to imitate are for sft.dataset, as '
    '{"messages", "response"}'
)


class BadLine(InputError):
    """A row that is no prompt."""

    def __init__(self, text: str, reason: str = "malformed") -> None:
        super().__init__(text)
        self.reason = reason
        """One word, for counts."""


class _Line(msgspec.Struct, frozen=True):
    """One line; the question has one of four names."""

    answer: str | int | float | list[str | int | float | None]
    messages: list[ChatMessage] = []
    prompt: str | list[ChatMessage] = ""
    question: str = ""
    problem: str = ""
    task: str = ""
    """Empty: that of the source."""
    id: str | int = ""
    split: str = ""
    """Empty: chosen by a hash of the question."""
    entry: str = ""
    language: str = ""
    pass_rate: float | str | None = None
    """From 0 to 1, or text such as "5/8"; for the curriculum."""

    @property
    def conversation(self) -> list[ChatMessage]:
        """The messages; a plain question becomes a user message. [] without a question."""
        found = self.messages or self.prompt or self.question or self.problem
        if isinstance(found, str):
            return [ChatMessage("user", found)] if found.strip() else []
        return found


class PromptLine(NamedTuple):
    """A line and its prompt."""

    fields: dict[str, msgspec.Raw]
    """All keys of the line, also unknown ones, with their JSON as written."""
    prompt: Prompt


_KEYS = tuple(field.name for field in msgspec.structs.fields(_Line))


def load_jsonl(source: PromptSource, seed: int) -> list[Prompt]:
    """Prompts of a file with one `_Line` a line; errors name file and line."""
    if source.path is None:
        raise InputError('a prompt source of kind "jsonl" needs a path (prompts.path)')
    try:
        prompts = [line.prompt for line in read_lines(source.path, task=source.task)]
    except BadLine as error:
        if error.reason not in ("no_question", "no_answer"):
            raise
        said = 'for other names of columns leave out prompts.kind = "jsonl"'
        raise BadLine(f"{error}; {said}", error.reason) from error
    return with_splits(prompts, source.held_out_share)


def read_lines(
    path: Path, *, task: str, on_bad: Callable[[str, BadLine], None] | None = None
) -> list[PromptLine]:
    """Lines of a file; `split` is empty for a line without a split. Raises InputError.

    on_bad: called with the place of a line that is no prompt, and the fault; None: it is raised.
    """
    hint = "" if path.suffix == ".jsonl" else "; other formats are read by prompts.kind='files'"
    lines = text_lines(path, holds="the prompts ", hint=hint)
    found = []
    for number, line in lines:
        try:
            found.append(_parse_line(line, path, number, task))
        except BadLine as error:
            if on_bad is None:
                raise
            on_bad(f"{path}:{number}", error)
    return found


def _parse_line(text: str, path: Path, number: int, task: str) -> PromptLine:
    place = f"{path}:{number}"
    try:
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        check_keys(fields, place)
        values = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"{place}: {json_fault(text, error)}; {_EXPECTED}") from error
    refuse_marked(values, place)
    try:
        prompt = make_prompt(values, place, name=f"{path.stem}:{number}", task=task)
    except BadLine as error:
        raise with_columns(error, values, place) from error
    refuse_half_pairs(prompt, place)
    return PromptLine({key: raw.copy() for key, raw in fields.items()}, prompt)


def make_prompt(fields: dict[str, Any], place: str, *, name: str, task: str) -> Prompt:
    """The prompt of a row with our keys; `split` is empty without one. Raises BadLine.

    name, task: id and task of a row without them.
    """
    if entry := fields.get("entry"):
        # Graders and environments read JSON, and may need nothing else.
        text = entry if isinstance(entry, str) else msgspec.json.encode(entry).decode()
        fields = {"answer": "", **fields, "entry": text}
    try:
        refuse_tools(fields)
        line = msgspec.convert({**fields, **_plain_questions(fields)}, _Line)
    except NotText as error:
        raise BadLine(f"{place}: {error}", error.reason) from error
    except msgspec.ValidationError as error:
        text = str(error)
        has_none = _NO_ANSWER in text or "at `$.answer" in text
        reason = "no_answer" if has_none else "malformed"
        raise BadLine(f"{place}: {error}; {_EXPECTED}", reason) from error
    return _prompt_of(line, place, name=name, task=task)


def refuse_half_pairs(prompt: Prompt, place: str) -> None:
    """Raise BadLine for a prompt with half of a surrogate pair, which no message can hold."""
    try:
        msgspec.json.encode(prompt)
    except UnicodeEncodeError as error:
        raise BadLine(f"{place}: {half_pair_fault(error.object[error.start])}") from error


def _plain_questions(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of questions, with messages as plain turns. Raises NotText."""
    found: dict[str, Any] = {}
    for key in QUESTIONS:
        value = plain_turns(fields[key]) if key in fields else None
        if isinstance(value, list) and key in ("question", "problem"):
            # A question in parts.
            found |= {key: "", "messages": value}
        elif value is not None:
            found[key] = value
    return found


def refuse_marked(fields: Mapping[str, Any], place: str) -> None:
    """Raise BadLine for a row that a column marks as a placeholder, as in NeMo Gym's blends."""
    for key, value in fields.items():
        if "placeholder" in key.casefold() and value:
            raise BadLine(
                f"{place}: {key!r} says that the row is a placeholder: fill the rows in by the "
                "script of the data set",
                "placeholder",
            )


def with_columns(error: BadLine, fields: Mapping[str, Any], place: str) -> BadLine:
    """The fault of a row; one without an answer, or a question, names the row's columns."""
    if _NO_QUESTION in str(error) and not any(key in fields for key in QUESTIONS):
        wanted = "question"
    elif _NO_ANSWER in str(error):
        wanted = "answer"
    else:
        return error
    if wanted == "answer" and (example := example_fault(fields)):
        return BadLine(f"{place}: {example}", error.reason)
    text = (
        f"{place}: there is no {wanted!r}; the row has {', '.join(fields)}"
        f"{nearest(wanted, fields)}. Rename the column, or name it by prompts.columns.{wanted}"
    )
    if wanted == "answer" and fields.get("task") not in (None, "", CODE, *COMPARED):
        text += '; where the task\'s environment or reward needs no answer, write "answer": ""'
    return BadLine(text, error.reason)


def example_fault(fields: Mapping[str, Any]) -> str:
    """Error for a row without "answer" that is an SFT example; empty for another row."""
    for key in ("messages", "prompt"):
        turns = fields.get(key)
        last = turns[-1] if isinstance(turns, list) and turns else None
        if isinstance(last, Mapping) and last.get("role") == "assistant":
            return f"{ENDS_IN_ANSWER}; {_SHORTEN}"
    for key in ("completion", "response"):
        if key in fields:
            return (
                f'there is a {key!r} to imitate and no "answer"; allowed is a question with the '
                f'"answer" that the reward compares with; rename {key!r} to "answer" if it is the '
                'result alone. Rows to imitate are for sft.dataset, as {"messages", "response"}'
            )
    return ""


def _prompt_of(line: _Line, place: str, *, name: str, task: str) -> Prompt:
    if line.split and line.split not in _SPLITS:
        raise BadLine(
            f'{place}: "split" is {line.split!r}; expected "train" or "held_out", or '
            "prompts.columns.split = '-', which reads no split"
        )
    asked = [m.content for m in line.conversation if m.role == "user"]
    if not line.conversation or (asked and not asked[-1].strip()):
        raise BadLine(f"{place}: {_NO_QUESTION}", "no_question")
    last = line.conversation[-1].role
    if last == "assistant":
        raise BadLine(f"{place}: {ENDS_IN_ANSWER}; {_SHORTEN}", "not_a_question")
    if last != "user":
        said = f"the last message is of the role {last!r}; expected the user's question"
        raise BadLine(f"{place}: {said}", "not_a_question")
    try:
        rate = read_rate(line.pass_rate)
    except ValueError as error:
        raise BadLine(
            f"{place}: \"pass_rate\" is {error}, or prompts.columns.pass_rate = '-', which reads "
            "none"
        ) from error
    task = line.task or task
    answers = _answers_of(line, place, task=task)
    if task != CODE:
        _check_question(asked[-1] if asked else "", place)
    return Prompt(
        id=str(line.id) or name,
        task=task,
        messages=line.conversation,
        answer=answers[0] if answers else "",
        other_answers=answers[1:],
        split=line.split,
        entry=line.entry,
        language=line.language,
        pass_rate=rate,
        place=place,
    )


def _answers_of(line: _Line, place: str, *, task: str) -> list[str]:
    """The accepted answers of a line; [] for a task that needs none. Raises BadLine."""
    is_math = task == "math"
    try:
        # A mathematical label is never a list of quoted texts; a text of another task may be one.
        answers = accepted_answers(line.answer, reads_text=is_math, is_math=is_math)
    except ValueError as error:
        raise BadLine(f"{place}: {error}") from error
    if task in COMPARED and not answers and not line.entry:
        raise BadLine(f"{place}: the answer is empty ({line.answer!r})", "no_answer")
    for answer in answers:
        if task in COMPARED and is_placeholder(answer):
            raise BadLine(f"{place}: the answer {answer!r} is a placeholder", "placeholder")
    return answers


def _check_question(question: str, place: str) -> None:
    """Raise BadLine for a placeholder, and for a question about an image."""
    if has_placeholder(question):
        text = f"{place}: the question {question[:100]!r} is a placeholder, or holds one"
        raise BadLine(text, "placeholder")
    for mark in _IMAGE_MARKS:
        if mark in question:
            text = f"{place}: the question holds {mark}: images are not read"
            raise BadLine(text, "not_text")


def check_keys(line: Mapping[str, Any], place: str) -> None:
    """Raise InputError for two questions or a misspelt key; other unknown keys are ignored."""
    questions = [key for key in QUESTIONS if key in line]
    if len(questions) > 1:
        raise InputError(f"{place}: {' and '.join(questions)} are both given: keep one")
    refuse_slips(line, _KEYS, place)


def refuse_slips(line: Iterable[str], known: tuple[str, ...], place: str) -> None:
    """Raise InputError for a misspelt key; other unknown keys are ignored."""
    for key in line:
        meant = _slip_of(key, known)
        if meant:
            raise InputError(
                f"{place}: unknown key {key!r}; did you mean {meant!r}? Rename or remove it"
            )


def is_ours(key: str) -> bool:
    """Whether a run reads a key of a line, or refuses it as misspelt."""
    return key in _KEYS or bool(_slip_of(key, _KEYS))


@functools.cache
def _slip_of(key: str, known: tuple[str, ...]) -> str:
    """The known key that a misspelt key means; empty for known ones and "question_id" or "tags"."""
    if len(key) < 4 or key in known or not set(known).isdisjoint(key.split("_")):
        return ""
    meant = next(iter(difflib.get_close_matches(key, known, n=1, cutoff=0.8)), "")
    # "answers" is another column, not a slip.
    return "" if key.startswith(meant) else meant


def with_splits(prompts: list[Prompt], held_out_share: float) -> list[Prompt]:
    """The prompts, where a hash of the question gives lines without a split their split.

    A question follows the split that another line gives it. With a share above 0, one of two or
    more questions is held out at least. Prompts held out by a hash are spare, except with a share
    of 1: nothing of that source may be trained on.
    """
    questions = [prompt.normalized_question for prompt in prompts]
    split_of: dict[str, str] = {}
    for question, prompt in zip(questions, prompts, strict=True):
        if prompt.split and split_of.get(question) != "held_out":
            split_of[question] = prompt.split
    places = {question: _place_of(question) for question in set(questions) - split_of.keys()}
    for question, place in places.items():
        split_of[question] = "held_out" if place < held_out_share else "train"
    if held_out_share > 0 and len(places) > 1 and "held_out" not in split_of.values():
        split_of[min(places, key=lambda question: places[question])] = "held_out"
    return [
        prompt
        if prompt.split
        else msgspec.structs.replace(
            prompt,
            split=split_of[question],
            is_spare=held_out_share < 1 and question in places and split_of[question] == "held_out",
        )
        for question, prompt in zip(questions, prompts, strict=True)
    ]


def _place_of(question: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    digest = hashlib.sha256(question.encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48
