"""Rows of a prompts file, read and written by data tools.

A row keeps every key of its line as it was written, those that are not ours too. Rows are written
with their `id`, because one that comes from the number of the line would change with the next tool.
"""

from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.types import ChatMessage, Prompt
from megatron_rl.rollout_queue.jsonl_source import read_lines

_QUESTIONS = ("messages", "prompt", "question", "problem")


class Row(msgspec.Struct, frozen=True):
    """A line of a prompts file."""

    fields: dict[str, Any]
    """Keys of the line, with values or raw JSON."""
    prompt: Prompt
    """What the fields stand for."""

    def line(self) -> dict[str, Any]:
        """What is written: its fields, with the id."""
        return {"id": self.prompt.id, **self.fields}

    def with_fields(self, **values: Any) -> "Row":
        """With further keys, which are not those of a prompt."""
        return Row({**self.fields, **values}, self.prompt)

    def with_id(self, name: str) -> "Row":
        """Another row that was made from this one."""
        return Row({**self.fields, "id": name}, msgspec.structs.replace(self.prompt, id=name))

    def with_answer(self, answer: str) -> "Row":
        """With another reference answer."""
        prompt = msgspec.structs.replace(self.prompt, answer=answer)
        return Row({**self.fields, "answer": answer}, prompt)

    def with_entry(self, entry: str) -> "Row":
        """With another `entry`, such as other tests."""
        prompt = msgspec.structs.replace(self.prompt, entry=entry)
        return Row({**self.fields, "entry": entry}, prompt)

    def with_language(self, language: str) -> "Row":
        """With the language that the response must be in."""
        prompt = msgspec.structs.replace(self.prompt, language=language)
        return Row({**self.fields, "language": language}, prompt)

    def with_question(self, question: str) -> "Row":
        """With another text in what the user wrote last, under the key that the line has."""
        messages = list(self.prompt.messages)
        last = max(i for i, message in enumerate(messages) if message.role == "user")
        messages[last] = ChatMessage("user", question)
        key = next(key for key in _QUESTIONS if key in self.fields)
        is_text = bytes(msgspec.json.encode(self.fields[key])).lstrip().startswith(b'"')
        value = question if is_text else msgspec.to_builtins(messages)
        prompt = msgspec.structs.replace(self.prompt, messages=messages)
        return Row({**self.fields, key: value}, prompt)


def read_rows(path: Path, *, task: str = "math") -> list[Row]:
    """All rows of a file. task: of lines that name none.

    Raises InputError for a bad line, a file without lines, and an id that occurs twice.
    """
    rows = [Row(line.fields, line.prompt) for line in read_lines(path, task=task)]
    if not rows:
        raise InputError(f"{path} has no prompts")
    place_of: dict[str, str] = {}
    for row in rows:
        first = place_of.setdefault(row.prompt.id, row.prompt.place)
        if first != row.prompt.place:
            raise InputError(f"{row.prompt.place}: id {row.prompt.id!r} is that of {first} too")
        if not row.prompt.question:
            raise InputError(f"{row.prompt.place}: there is no message of the user")
    return rows


def encode_lines(lines: list[Any]) -> str:
    """JSONL of what msgspec can encode."""
    return "".join(msgspec.json.encode(line).decode() + "\n" for line in lines)


def read_jsonl(path: Path, kind: Any, *, expected: str) -> list[tuple[int, Any]]:
    """(number, line as `kind`) of a JSONL file; InputError names the first bad line.

    expected: how a line looks, for the message.
    """
    try:
        # Not splitlines(), which also splits at U+2028 inside JSON strings.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    decoder = msgspec.json.Decoder(kind)
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append((number, decoder.decode(line)))
        except msgspec.MsgspecError as error:
            raise InputError(f"{path}:{number}: {error}; expected {expected}") from error
    if not found:
        raise InputError(f"{path} has no lines; expected {expected}")
    return found
