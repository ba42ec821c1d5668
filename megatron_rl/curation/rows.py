"""Reads and writes rows of prompts for the data tools, with a run's readers.

A row keeps every key of its line as written, unknown keys too. The output has each row's `id`,
because an id from the line number would change with the next tool, and the task of --task. Rows of
data sets get our keys for the columns that a run reads, and keep the other columns.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.config.errors import InputError
from megatron_rl.config.prompts import PromptSource
from megatron_rl.data.jsonl_source import QUESTIONS, BadLine, is_ours, read_lines
from megatron_rl.data.tables.columns import ColumnMap
from megatron_rl.data.tables.files import format_of
from megatron_rl.data.tables.rows import RowFault
from megatron_rl.data.tables.source import is_in_our_form, read_kept
from megatron_rl.data.tables.where import value_of
from megatron_rl.protocol.types import ChatMessage, Prompt

_ASSUMED_TASK = "math"
"""Task that a run assumes for lines without one (prompts.task)."""


class Row(msgspec.Struct, frozen=True):
    """A line of a prompts file."""

    fields: dict[str, Any]
    """Keys of the line, with values or raw JSON."""
    prompt: Prompt

    def line(self) -> dict[str, Any]:
        """A line of the output: the fields, the id, and a task that a run would not assume."""
        task = {} if self.prompt.task == _ASSUMED_TASK else {"task": self.prompt.task}
        return {"id": self.prompt.id, **task, **self.fields}

    def with_fields(self, **values: Any) -> "Row":
        """The row with further keys that are not keys of a prompt."""
        return Row({**self.fields, **values}, self.prompt)

    def replace(self, **values: str) -> "Row":
        """The row with another id, answer, entry or language."""
        # Another answer replaces all accepted ones.
        others: list[str] = [] if "answer" in values else self.prompt.other_answers
        prompt = msgspec.structs.replace(self.prompt, **values, other_answers=others)
        return Row({**self.fields, **values}, prompt)

    def with_question(self, question: str) -> "Row":
        """The row with another text in the user's last message, under the key of the line."""
        messages = list(self.prompt.messages)
        last = max(i for i, message in enumerate(messages) if message.role == "user")
        messages[last] = ChatMessage("user", question)
        key = next(key for key in QUESTIONS if key in self.fields)
        is_text = bytes(msgspec.json.encode(self.fields[key])).lstrip().startswith(b'"')
        value = question if is_text else msgspec.to_builtins(messages)
        prompt = msgspec.structs.replace(self.prompt, messages=messages)
        return Row({**self.fields, key: value}, prompt)


def read_rows(
    path: Path,
    *,
    task: str = _ASSUMED_TASK,
    subset: str = "",
    split: str = "",
    left_out: dict[str, list[RowFault]] | None = None,
) -> list[Row]:
    """All rows of a file or folder of prompts. Raises InputError, also for a repeated id.

    task: of rows without a task. subset, split: of a folder, as in a run. left_out: by reason,
    gets the faulty rows of that reason; any other faulty row is refused, and so is a file of
    faulty rows alone.
    """
    found = left_out or {}

    def leave_out(fault: RowFault) -> None:
        if fault.reason not in found:
            raise InputError(fault.text)
        found[fault.reason].append(fault)

    rows = _read(path, task, subset=subset, split=split, on_fault=leave_out)
    if not rows:
        faults = [fault for of_reason in found.values() for fault in of_reason]
        raise InputError(faults[0].text if faults else f"{path} has no prompts")
    place_of: dict[str, str] = {}
    for row in rows:
        first = place_of.setdefault(row.prompt.id, row.prompt.place)
        if first != row.prompt.place:
            raise InputError(f"{row.prompt.place}: id {row.prompt.id!r} is that of {first} too")
        if not row.prompt.question:
            raise InputError(f"{row.prompt.place}: there is no message of the user")
    return rows


def _read(
    path: Path, task: str, *, subset: str, split: str, on_fault: Callable[[RowFault], None]
) -> list[Row]:
    source = PromptSource(path=path, task=task, subset=subset, dataset_split=split, repeated="keep")
    # Any other file, such as a pipe, has lines and can be read only once.
    is_other = not path.is_dir() and not format_of(path)
    if is_other or is_in_our_form(source):

        def on_bad(place: str, bad: BadLine) -> None:
            on_fault(RowFault(place, bad.reason, str(bad)))

        lines = read_lines(path, task=task, on_bad=on_bad)
        return [Row(line.fields, line.prompt) for line in lines]
    kept = read_kept(source, on_fault)
    return [Row(_our_fields(fields, prompt, kept.columns), prompt) for fields, prompt in kept.rows]


def _our_fields(fields: dict[str, Any], prompt: Prompt, columns: ColumnMap) -> dict[str, Any]:
    """The columns of a row, with our keys for the prompt's columns.

    A run makes the same prompt of the written line as of the row.
    """
    question = columns.question or next(key for key in QUESTIONS if key in fields)
    # Messages may be written as JSON text.
    is_text = isinstance(value_of(fields, question), str) and len(prompt.messages) == 1
    key = question if question in QUESTIONS else "question" if is_text else "messages"
    key_of = {
        columns.tests.split(", ")[0]: "entry",
        question: key, columns.answer: "answer", columns.id: "id",
        columns.task: "task", columns.language: "language", columns.split: "split",
        columns.pass_rate: "pass_rate",
    }  # fmt: skip
    names = ("answer", "entry", "id", "task", "language", "split", "pass_rate")
    values: dict[str, Any] = {name: getattr(prompt, name) for name in names}
    if prompt.other_answers:
        values["answer"] = prompt.answers
    values[key] = prompt.question if is_text else msgspec.to_builtins(prompt.messages)
    found: dict[str, Any] = {}
    for column, value in fields.items():
        name = key_of.get(column, "")
        if name:
            # A number that equals the prompt's text stays a number.
            found[name] = value if str(value) == str(values[name]) else values[name]
        else:
            # Under its own name a run would read this column from the line.
            is_read = is_ours(column) or question.startswith(f"{column}.")
            found[f"original_{column}" if is_read else column] = value
    named = {"answer"} | {n for column, n in key_of.items() if value_of(fields, column) is not None}
    if "entry" in named or prompt.entry:
        named.add("entry")
        named.add("task")
    return found | {n: value for n, value in values.items() if n in named and n not in found}


def encode_lines(lines: list[Any]) -> str:
    """The lines as JSONL."""
    return "".join(msgspec.json.encode(line).decode() + "\n" for line in lines)
