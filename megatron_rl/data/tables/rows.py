"""Turns a row of a data set into a prompt, or into a fault with its name.

Pure. A row may be mathematics, code or an entry of reasoning_gym, whatever its neighbours are.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from megatron_rl.config.errors import InputError
from megatron_rl.config.prompts import PromptSource
from megatron_rl.config.reward import CODE
from megatron_rl.data.answers import texts_of_list
from megatron_rl.data.jsonl_source import (
    COMPARED,
    QUESTIONS,
    BadLine,
    check_keys,
    make_prompt,
    refuse_half_pairs,
    refuse_marked,
    with_columns,
)
from megatron_rl.data.messages import plain_turns, refuse_tools
from megatron_rl.data.tables.columns import NOTHING, ColumnMap
from megatron_rl.data.tables.data_sets import TASK_TYPE, NoAnswer, take_part
from megatron_rl.data.tables.plain_values import BadTests
from megatron_rl.data.tables.test_forms import entry_of, tests_in_answer, with_demands
from megatron_rl.data.tables.where import decoded, value_of
from megatron_rl.protocol.prompt import NotText
from megatron_rl.protocol.types import ChatMessage, Prompt
from verification.code.problem import parse_tests
from verification.gym_answer import REFUSED_DATASETS
from verification.verdict import GradingError

OWN_TESTS = "entry"
_OTHER_ENTRY = (
    '; an entry for the environment or the reward of another task needs that task: write "task" '
    "into the row, or set prompts.task"
)
_CODE_KIND = re.compile(r"(?<![a-z])cod(?:e|ing)")


class RowFault(NamedTuple):
    """A row that is not a prompt."""

    place: str
    reason: str
    """One word, for counts."""
    text: str
    """Message that begins with the place."""


class RowReader:
    """Reads rows of one source by its columns."""

    def __init__(self, source: PromptSource, columns: ColumnMap) -> None:
        self._source = source
        self._columns = columns
        self.systems_replaced = 0
        """Rows whose own system message was removed."""
        self._is_open = source.task == PromptSource().task
        """Whether a row that names no task has the task of its form."""
        self._used = {name.split(".")[0] for name in columns.names}
        self._asking = {*QUESTIONS, columns.question.split(".")[0]}
        """Columns that may hold the question."""
        self.never_seen = {
            key: column
            for key, column in source.columns.model_dump().items()
            if column not in ("", NOTHING)
        }
        """Configured columns, by their key, in which no row had a value."""

    def read(self, fields: dict[str, Any], place: str, name: str) -> Prompt | RowFault:
        """The prompt of a row. name: its id unless a column has one."""
        for key, column in list(self.never_seen.items()):
            if value_of(fields, column.split(", ")[0]) is not None:
                del self.never_seen[key]
        try:
            if not self._columns.question:
                check_keys({k: v for k, v in fields.items() if k not in self._used}, place)
            refuse_marked(fields, place)
            refuse_tools(fields)
            ours = self._our_fields(fields)
            prompt = make_prompt(ours, place, name=name, task=self._source.task)
            prompt = self._changed(prompt, fields)
            refuse_half_pairs(prompt, place)
            return prompt
        except (BadTests, NoAnswer, NotText, InputError, RecursionError) as error:
            return _fault_of(error, fields, place)

    def _our_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The row with our keys. Raises NoAnswer, BadTests, NotText, BadLine."""
        columns = self._columns
        if not columns.question:
            found = {key: fields[key] for key in QUESTIONS if key in fields}
        else:
            found = _question(value_of(fields, columns.question), columns.question)
        answer = value_of(fields, columns.answer) if columns.answer else None
        found |= self._tests(fields, answer)
        if "answer" not in found and answer is not None:
            found["answer"] = self._answers(take_part(answer, columns.part))
        elif "entry" in found:
            found["answer"] = ""
        elif columns.answer and (columns.question or columns.answer != "answer"):
            raise NoAnswer(f"the column {columns.answer!r} has no value")
        if columns.gym and isinstance(found.get("answer"), str | int | float):
            found["entry"] = _gym_entry(fields, str(found["answer"]), columns)
            found |= {"task": "reasoning_gym"} if self._is_open else {}
        for key in ("id", "task", "language", "split", "pass_rate"):
            column = getattr(columns, key)
            value = value_of(fields, column) if column else None
            if value is not None:
                found[key] = value
        if "answer" not in found and self._source.columns.answer == NOTHING:
            found |= self._without_answer(fields, found.get("task", self._source.task))
        return found

    def _without_answer(self, fields: dict[str, Any], task: Any) -> dict[str, Any]:
        """Our keys of a row that shall have no answer: a reward of the user's own reads the row."""
        if task in COMPARED:
            return {"answer": ""}
        others = {name: value for name, value in fields.items() if name not in self._asking}
        return {"answer": "", "entry": json.dumps(others, default=str)}

    def _tests(self, fields: dict[str, Any], answer: Any) -> dict[str, Any]:
        """The tests of a row of code, as our keys; {} for a row of mathematics.

        Raises BadTests, or BadLine for a row that is neither.
        """
        columns = self._columns
        first, *more = columns.tests.split(", ")
        tests = value_of(fields, first) if first else None
        if tests is not None and first == OWN_TESTS:
            if isinstance(tests, str) or self._has_own_entry(fields):
                return {"entry": tests}
        # In verification_info an answer or tests may stand.
        if columns.answer.startswith(f"{first}.") and answer is not None:
            tests = None
        says = value_of(fields, columns.kind) if columns.kind else None
        says = says if isinstance(says, str) else ""
        is_code = _CODE_KIND.search(says.casefold()) is not None
        if columns.kind == TASK_TYPE and says and not is_code:
            if "math" not in says.casefold():
                raise BadLine(f"{columns.kind} = {says!r} is neither math nor code", "other_kind")
            tests = None
        entry = None
        if tests is not None:
            beside = {name: value_of(fields, name) for name in more}
            try:
                entry = entry_of(tests, {name: v for name, v in beside.items() if v is not None})
            except BadTests as error:
                hint = _OTHER_ENTRY if first == OWN_TESTS else ""
                raise BadTests(f"{error}{hint}") from error
        elif self._is_open:
            entry = tests_in_answer(answer)
        if entry or (entry is not None and not answer):
            found = {"entry": _usable(entry), "answer": ""}
            return found | ({"task": CODE} if self._is_open else {})
        if is_code:
            raise BadTests(f"{columns.kind} = {says!r}, but the row has no tests that are known")
        if answer is None and columns.answer in ("", "answer") and first not in ("", OWN_TESTS):
            raise BadTests("the row has no tests")
        return {}

    def _has_own_entry(self, fields: Mapping[str, Any]) -> bool:
        """Whether the row's `entry` is left as it is: for the reward of a task that is named."""
        if self._source.kind == "jsonl":
            return True
        task = value_of(fields, self._columns.task) if self._columns.task else None
        is_named = bool(task) or not self._is_open
        return is_named and (task or self._source.task) != CODE

    def _answers(self, answer: Any) -> Any:
        """The answer; a list if a text of this column is a list of accepted answers."""
        listed = texts_of_list(answer) if isinstance(answer, str) else None
        return listed if listed is not None and self._columns.has_lists else answer

    def _changed(self, prompt: Prompt, fields: dict[str, Any]) -> Prompt:
        """The prompt in prompts.template, without what the configuration leaves out."""
        if self._source.system == "replace":
            count = len(prompt.messages)
            prompt = without_system(prompt)
            self.systems_replaced += len(prompt.messages) < count
        has_tests = bool(prompt.entry) and not self._columns.gym
        own = fields.get(OWN_TESTS)
        is_ours = prompt.entry == own or (own is not None and self._has_own_entry(fields))
        starter = value_of(fields, "starter_code")

        def change(text: str) -> str:
            text = self._shorten(text)
            if has_tests and not is_ours:
                text = with_demands(text, prompt.entry, starter)
            return self._source.template.replace("{question}", text)

        return _with_question(prompt, change)

    def _shorten(self, text: str) -> str:
        """The question without the data set's instructions."""
        prefix, suffix = self._columns.prefix, self._columns.suffix
        if prefix or suffix:
            text = text.strip().removeprefix(prefix).removesuffix(suffix).strip()
        return text


def without_system(prompt: Prompt) -> Prompt:
    """The prompt without its own system messages, so that ours is added."""
    turns = [turn for turn in prompt.messages if turn.role != "system"]
    return msgspec.structs.replace(prompt, messages=turns)


def _usable(entry: str) -> str:
    """The entry. Raises BadTests for tests that can grade nothing."""
    if not entry:
        raise BadTests("the tests are empty")
    try:
        parse_tests(entry)
    except GradingError as error:
        raise BadTests(str(error)) from error
    return entry


def _gym_entry(fields: dict[str, Any], answer: str, columns: ColumnMap) -> str:
    """The entry for reasoning_gym's scorer. Raises BadLine for a data set that is refused."""
    metadata = decoded(value_of(fields, columns.gym))
    name = metadata.get("source_dataset") if isinstance(metadata, Mapping) else None
    if not isinstance(name, str) or name in REFUSED_DATASETS:
        why = REFUSED_DATASETS.get(str(name), "the row names no data set")
        text = f"the data set {name!r} of reasoning_gym is refused: {why}"
        raise BadLine(text, "refused_data_set")
    question = value_of(fields, columns.question or "question")
    record = {"dataset": name, "question": question, "answer": answer, "metadata": metadata}
    return json.dumps(record)


def _fault_of(error: Exception, fields: dict[str, Any], place: str) -> RowFault:
    if isinstance(error, BadLine):
        error = with_columns(error, fields, place)
    reasons = {BadTests: "bad_tests", NoAnswer: "no_answer"}
    reason = getattr(error, "reason", reasons.get(type(error), "malformed"))
    text = str(error)
    return RowFault(place, reason, text if text.startswith(place) else f"{place}: {text}")


def _question(value: Any, column: str) -> dict[str, Any]:
    """The question with our key; messages keep only role and content. Raises NotText, BadLine."""
    if value is None or value == "" or value == []:
        raise BadLine(f"the column {column!r} has no value: there is no question", "no_question")
    turns = plain_turns(value)
    return {"messages" if isinstance(turns, list) else "prompt": turns}


def _with_question(prompt: Prompt, change: Callable[[str], str]) -> Prompt:
    """The prompt with another text in the user's last message."""
    messages = list(prompt.messages)
    places = [place for place, message in enumerate(messages) if message.role == "user"]
    if not places:
        return prompt
    text = change(messages[places[-1]].content)
    if text == messages[places[-1]].content:
        return prompt
    messages[places[-1]] = ChatMessage("user", text)
    return msgspec.structs.replace(prompt, messages=messages)
