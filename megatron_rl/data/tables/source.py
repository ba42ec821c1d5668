"""Reads the prompts of a data set: rows of its files, by their columns.

Order and ids of prompts depend only on file names and row numbers, so a resumed run reads the same
prompts with other versions of the libraries.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash

from megatron_rl.config.errors import InputError
from megatron_rl.config.prompts import PromptSource
from megatron_rl.data.jsonl_source import (
    ENDS_IN_ANSWER,
    QUESTIONS,
    check_keys,
    example_fault,
    make_prompt,
    with_splits,
)
from megatron_rl.data.tables.columns import SAMPLE_ROWS, ColumnMap, find_columns
from megatron_rl.data.tables.data_sets import NoAnswer, take_part
from megatron_rl.data.tables.files import (
    LINES,
    TableRow,
    place_of,
    read_columns,
    read_rows,
)
from megatron_rl.data.tables.folders import TableFiles, find_files
from megatron_rl.data.tables.test_forms import BadTests, entry_of
from megatron_rl.data.tables.where import (
    Condition,
    check_columns,
    holds,
    parse_conditions,
    value_of,
)
from megatron_rl.protocol.types import ChatMessage, Prompt


class RowFault(NamedTuple):
    """A row that is not a prompt."""

    place: str
    reason: str
    """One word, for counts."""
    text: str
    """Message that begins with the place."""


class Reading(NamedTuple):
    """Prompts of a source."""

    prompts: list[Prompt]
    notes: list[str]
    """For the user: columns that were read, rows that were left out."""
    files: list[Path]


class Kept(NamedTuple):
    """Rows of a source with all their columns, for tools."""

    rows: list[tuple[dict[str, Any], Prompt]]
    """(values by column, prompt); `split` is empty for a row without one."""
    columns: ColumnMap


def read_files(source: PromptSource, on_fault: Callable[[RowFault], None] | None = None) -> Reading:
    """Prompts of prompts.path. Raises InputError.

    on_fault: called with each faulty row, which is left out. None: `source.faulty` decides.
    """
    files = _files_of(source)
    return read_table(source, files, str(source.path), on_fault)


def read_kept(source: PromptSource) -> Kept:
    """Rows of prompts.path with all their columns. Raises InputError for the first faulty row."""
    table = _Table(source, _files_of(source), str(source.path), keeps_columns=True)
    prompts: list[Prompt] = []
    for found in table.rows():
        if isinstance(found, RowFault):
            raise InputError(found.text)
        prompts.append(found)
    prompts = table.with_unique_ids(prompts)
    return Kept(list(zip(table.kept, prompts, strict=True)), table.columns)


def is_in_our_form(source: PromptSource) -> bool:
    """Whether prompts.path is one JSONL file in our own form. Raises InputError."""
    files = _files_of(source)
    columns = _Table(source, files, str(source.path)).columns
    is_lines = len(files.files) == 1 and files.files[0].suffix in LINES
    own = (columns.question, columns.answer, columns.part, columns.tests)
    return is_lines and own == ("", "answer", "all", "entry")


def _files_of(source: PromptSource) -> TableFiles:
    if source.path is None:
        raise InputError(f'a prompt source of kind "{source.kind}" needs a path (prompts.path)')
    return find_files(source.path, subset=source.subset, split=source.dataset_split)


def read_table(
    source: PromptSource,
    files: TableFiles,
    label: str,
    on_fault: Callable[[RowFault], None] | None = None,
) -> Reading:
    """Prompts of the rows of files. label: name of the source in notes."""
    if "{question}" not in source.template:
        raise InputError(f"prompts.template={source.template!r} does not contain {{question}}")
    table = _Table(source, files, label)
    prompts: list[Prompt] = []
    faults: list[RowFault] = []
    for found in table.rows():
        if isinstance(found, Prompt):
            prompts.append(found)
        elif on_fault is not None:
            on_fault(found)
        else:
            faults.append(found if not faults else found._replace(text=""))
    if faults and (source.faulty == "refuse" or not prompts):
        raise InputError(_describe_faults(faults, label, prompts=len(prompts)))
    table.leave_out(faults)
    prompts = table.with_unique_ids(prompts)
    return Reading(
        with_splits(prompts, source.held_out_share), table.notes(len(prompts)), files.files
    )


def _describe_faults(faults: list[RowFault], label: str, *, prompts: int) -> str:
    """The error for faulty rows. prompts: rows without a fault."""
    count, first = len(faults), faults[0].text
    if not prompts:
        rows = f"all {count:,} rows of {label} are faulty" if count > 1 else (
            f"the only row of {label} is faulty"
        )  # fmt: skip
        return f"{rows}, so prompts.faulty='drop' would leave none; {first}"
    return (
        f"{count:,} of {count + prompts:,} rows of {label} are faulty; first {first}; correct "
        "them, or leave such rows out by prompts.faulty='drop'"
    )


class _Table:
    """Reads the rows of one source."""

    def __init__(
        self, source: PromptSource, files: TableFiles, label: str, *, keeps_columns: bool = False
    ) -> None:
        self._source = source
        self._files = files
        self._label = label
        self._conditions = parse_conditions(source.where)
        self._is_lines = files.files[0].suffix in LINES
        self.columns = self._find_columns()
        self._keeps_columns = keeps_columns
        self.kept: list[dict[str, Any]] = []
        """With keeps_columns: all columns of each prompt's row."""
        self._seen: set[bytes] = set()
        self._names: list[str] = []
        """Id of each prompt by its file and row."""
        self._left_out: Counter[str] = Counter()
        """Number of rows by reason."""
        self._first: dict[str, str] = {}
        """Reason -> place of the first such row."""

    def rows(self) -> Iterator[Prompt | RowFault]:
        """Each row that meets prompts.where, as a prompt or a fault."""
        needed = {name.split(".")[0] for name in self.columns.names}
        needed |= {condition.column.split(".")[0] for condition in self._conditions}
        for file in self._files.files:
            for row in read_rows(file, None if self._keeps_columns else needed):
                place = place_of(file, row.number)
                if row.fault:
                    yield RowFault(place, "no_json", f"{place}: {row.fault}")
                    continue
                if not self._is_wanted(row.fields, place):
                    self._left_out["where"] += 1
                    continue
                name = self._name_of(file, row.number)
                found = self._convert(row, place, name)
                if isinstance(found, Prompt):
                    if self._is_repeated(found):
                        self._left_out["repeated"] += 1
                        continue
                    self._names.append(name)
                    if self._keeps_columns:
                        self.kept.append(row.fields)
                yield found

    def leave_out(self, faults: list[RowFault]) -> None:
        """Count faulty rows for `notes`."""
        for fault in faults:
            self._left_out[fault.reason] += 1
            self._first.setdefault(fault.reason, fault.place)

    def with_unique_ids(self, prompts: list[Prompt]) -> list[Prompt]:
        """The prompts, with ids by file and row if a column that was found repeats an id."""
        if self._is_lines or self._source.columns.id or not self.columns.id:
            return prompts
        if len({prompt.id for prompt in prompts}) == len(prompts):
            return prompts
        self.columns = self.columns._replace(id="")
        return [
            msgspec.structs.replace(prompt, id=name)
            for prompt, name in zip(prompts, self._names, strict=True)
        ]

    def notes(self, kept: int) -> list[str]:
        """Notes for the user; [] if all lines are in our own form and kept."""
        source, own = self._source, PromptSource()
        is_plain = self._is_lines and not self.columns.question and self.columns.part == "all"
        if is_plain and not self._left_out and source.columns == own.columns:
            return []
        where = f" ({self._files.chosen})" if self._files.chosen else ""
        said = f"{self._label}{where}: {kept} prompts; columns: {self.columns.describe()}"
        if self._left_out:
            said += "; rows left out: " + ", ".join(
                f"{count} {reason}"
                + (f" (first {self._first[reason]})" if reason in self._first else "")
                for reason, count in self._left_out.most_common()
            )
        return [said]

    def _find_columns(self) -> ColumnMap:
        file = self._files.files[0]
        # Few rows at once: some columns may be long.
        rows = read_rows(file, None, batch_rows=SAMPLE_ROWS)
        sample = list(islice((row.fields for row in rows if not row.fault), SAMPLE_ROWS))
        names = list(dict.fromkeys(read_columns(file)))
        if self._is_lines:
            names = list(dict.fromkeys([*names, *(key for row in sample for key in row)]))
        if not self._is_lines or sample:
            check_columns(self._conditions, names, str(file))
        return find_columns(self._source, names, sample, place=str(file), is_lines=self._is_lines)

    def _name_of(self, file: Path, number: int) -> str:
        """The id of a row without one."""
        if len(self._files.files) == 1:
            return f"{file.stem}:{number}"
        inside = file.relative_to(self._files.root).with_suffix("").as_posix()
        return f"{inside}:{number}"

    def _is_wanted(self, fields: dict[str, Any], place: str) -> bool:
        def is_true(condition: Condition) -> bool:
            try:
                return holds(condition, value_of(fields, condition.column))
            except InputError as error:
                raise InputError(f"{place}: {error}") from error

        return all(map(is_true, self._conditions))

    def _is_repeated(self, prompt: Prompt) -> bool:
        if self._source.repeated == "keep":
            return False
        digest = xxhash.xxh3_128_digest(prompt.normalized_question.encode("utf-8", "surrogatepass"))
        if digest in self._seen:
            return True
        self._seen.add(digest)
        return False

    def _convert(self, row: TableRow, place: str, name: str) -> Prompt | RowFault:
        columns, source = self.columns, self._source
        try:
            if not columns.question:
                check_keys(row.fields, place)
            fields = self._our_fields(row.fields)
            task = "code" if fields.get("entry") and self._has_tests() else source.task
            prompt = make_prompt(fields, place, name=name, task=task)
        except BadTests as error:
            return RowFault(place, "bad_tests", f"{place}: {error}")
        except NoAnswer as error:
            return RowFault(place, "no_answer", f"{place}: {error}")
        except InputError as error:
            reason = _reason(str(error))
            example = example_fault(row.fields) if reason == "no_answer" else ""
            return RowFault(place, reason, f"{place}: {example}" if example else str(error))
        return _with_question(prompt, self._shorten)

    def _has_tests(self) -> bool:
        """Whether rows with tests have the task "code": the configuration names no other task."""
        column = self.columns.tests
        return bool(column) and column != "entry" and self._source.task == PromptSource().task

    def _our_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The row with our keys. Raises NoAnswer."""
        columns = self.columns
        if not columns.question:
            found = {key: fields[key] for key in QUESTIONS if key in fields}
        else:
            found = _question(value_of(fields, columns.question))
        answer = value_of(fields, columns.answer) if columns.answer else None
        if answer is not None:
            found["answer"] = take_part(answer, columns.part)
        tests = value_of(fields, columns.tests) if columns.tests else None
        if tests is not None:
            is_ours = isinstance(tests, str) and columns.tests == "entry"
            found["entry"] = tests if is_ours else entry_of(tests)
            found.setdefault("answer", "")
        for key in ("id", "task", "language", "split", "pass_rate"):
            column = getattr(columns, key)
            value = value_of(fields, column) if column else None
            if value is not None:
                found[key] = value
        return found

    def _shorten(self, text: str) -> str:
        """The question in prompts.template, without the data set's instructions."""
        columns, template = self.columns, self._source.template
        if columns.prefix or columns.suffix:
            text = text.strip().removeprefix(columns.prefix).removesuffix(columns.suffix).strip()
        return text if template == "{question}" else template.replace("{question}", text)


def _question(value: Any) -> dict[str, Any]:
    """The question with our key; messages keep only role and content."""
    if value is None:
        return {}
    if isinstance(value, list) and all(isinstance(turn, dict) for turn in value):
        keys = ("role", "content")
        return {"messages": [{k: turn[k] for k in keys if k in turn} for turn in value]}
    return {"prompt": value}


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


def _reason(text: str) -> str:
    """The reason, in one word, for an error of `make_prompt`."""
    if "missing required field `answer`" in text or "at `$.answer`" in text:
        return "no_answer"
    if "there is no question" in text:
        return "no_question"
    if ENDS_IN_ANSWER in text:
        return "not_a_question"
    return "malformed"
