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

from megatron_rl.config.errors import InputError
from megatron_rl.config.prompts import PromptColumns, PromptSource
from megatron_rl.data.jsonl_source import with_splits
from megatron_rl.data.repeats import OTHER_ANSWER, REPEATED, Repeats
from megatron_rl.data.tables.columns import (
    NOTHING,
    SAMPLE_ROWS,
    ColumnMap,
    every_name,
    find_columns,
    no_such_column,
)
from megatron_rl.data.tables.files import (
    LINES,
    format_of,
    place_of,
    read_columns,
    read_rows,
    stem_of,
)
from megatron_rl.data.tables.folders import TableFiles, find_files
from megatron_rl.data.tables.rows import RowFault, RowReader
from megatron_rl.data.tables.where import (
    Condition,
    check_columns,
    describe_kinds,
    holds,
    parse_condition,
    value_of,
)
from megatron_rl.protocol.types import Prompt


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


def read_kept(source: PromptSource, on_fault: Callable[[RowFault], None]) -> Kept:
    """Rows of prompts.path with all their columns. Raises InputError.

    on_fault: called with each faulty row, which is left out.
    """
    table = _Table(source, _files_of(source), str(source.path), keeps_columns=True)
    prompts: list[Prompt] = []
    for found in table.rows():
        if isinstance(found, RowFault):
            on_fault(found)
        else:
            prompts.append(found)
    prompts = table.with_unique_ids(prompts)
    return Kept(list(zip(table.kept, prompts, strict=True)), table.columns)


def is_in_our_form(source: PromptSource) -> bool:
    """Whether prompts.path is one JSONL file in our own form. Raises InputError."""
    files = _files_of(source)
    columns = _Table(source, files, str(source.path)).columns
    is_lines = len(files.files) == 1 and format_of(files.files[0]) in LINES
    return is_lines and columns.is_own


def _files_of(source: PromptSource) -> TableFiles:
    if source.path is None:
        raise InputError(f'a prompt source of kind "{source.kind}" needs a path (prompts.path)')
    return find_files(source.path, subset=source.subset, split=source.dataset_split)


def _has_rows(file: Path) -> bool:
    return any(True for _ in read_rows(file, None, batch_rows=SAMPLE_ROWS))


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
        elif found.reason in (REPEATED, OTHER_ANSWER):
            # These rows never stop a run: the first row with the question stays.
            table.leave_out([found])
        else:
            faults.append(found if not faults else found._replace(text=""))
    if not table.has_rows:
        unmet = table.first_unmet_text()
        raise InputError(
            f"{label} has no rows{' that meet prompts.where' if unmet else ''}: "
            f"{unmet or 'expected a question and its answer in each'}"
        )
    table.check_given()
    if faults and (source.faulty == "refuse" or not prompts):
        text = _describe_faults(faults, label, prompts=len(prompts))
        raise InputError(text if prompts else f"{table.unmet_text()}{text}")
    table.leave_out(faults)
    prompts = table.with_unique_ids(table.repeats.with_rates(prompts))
    if source.faulty == "drop":
        prompts = table.without_repeated_ids(prompts)
    return Reading(with_splits(prompts, source.held_out_share), table.notes(prompts), files.files)


def _describe_faults(faults: list[RowFault], label: str, *, prompts: int) -> str:
    """The error for faulty rows. prompts: rows without a fault."""
    count, first = len(faults), faults[0].text
    reasons = Counter(fault.reason for fault in faults).most_common()
    named = ", ".join(f"{number:,} {reason}" for reason, number in reasons)
    if not prompts:
        rows = f"all {count:,} rows of {label} are faulty" if count > 1 else (
            f"the only row of {label} is faulty"
        )  # fmt: skip
        return f"{rows}, so prompts.faulty='drop' would leave none; {first}"
    return (
        f"{count:,} of {count + prompts:,} rows of {label} are faulty ({named}); first {first}; "
        "correct them, or leave such rows out by faulty = 'drop' of this source, as in "
        "prompts.0.faulty=drop"
    )


class _Table:
    """Reads the rows of one source."""

    def __init__(
        self, source: PromptSource, files: TableFiles, label: str, *, keeps_columns: bool = False
    ) -> None:
        self._source = source
        self._files = files
        self._label = label
        self._conditions = [parse_condition(text) for text in source.where]
        self._is_lines = format_of(files.files[0]) in LINES
        self._names_of_columns: list[str] = []
        self.columns = self._find_columns()
        self._reader = RowReader(source, self.columns)
        self._keeps_columns = keeps_columns
        self.kept: list[dict[str, Any]] = []
        """With keeps_columns: all columns of each prompt's row."""
        self.repeats = Repeats()
        self._names: list[str] = []
        """Id of each prompt by its file and row."""
        self._left_out: Counter[str] = Counter()
        """Number of rows by reason."""
        self._unmet: tuple[Condition, Any] | None = None
        """The condition that the first row left out does not meet, and its value there."""
        self.has_rows = False
        """Whether any row was read that meets prompts.where."""
        self._first: dict[str, str] = {}
        """Reason -> place of the first such row."""

    def rows(self) -> Iterator[Prompt | RowFault]:
        """Each row that meets prompts.where, as a prompt or a fault."""
        named = [*self.columns.names, *(condition.column for condition in self._conditions)]
        # A name with a dot may be that of a column, too.
        needed = {*named, *(name.split(".")[0] for name in named)}
        needed |= {name for name in self._names_of_columns if "placeholder" in name.casefold()}
        # The entry of a row without an answer has its other columns.
        needs_all = self._keeps_columns or self._source.columns.answer == NOTHING
        for file in self._files.files:
            for row in read_rows(file, None if needs_all else needed):
                place = place_of(file, row.number)
                if row.fault:
                    self.has_rows = True
                    yield RowFault(place, "no_json", f"{place}: {row.fault}")
                    continue
                if not self._is_wanted(row.fields, place):
                    self._left_out["where"] += 1
                    continue
                self.has_rows = True
                name = self._name_of(file, row.number)
                found = self._reader.read(row.fields, place, name)
                found = self._repetition(found, place) or found
                if isinstance(found, Prompt):
                    self._names.append(name)
                    if self._keeps_columns:
                        self.kept.append(row.fields)
                yield found

    def _repetition(self, found: Prompt | RowFault, place: str) -> RowFault | None:
        """The fault of a row that repeats an earlier question; None for another row."""
        if self._source.repeated == "keep" or not isinstance(found, Prompt):
            return None
        reason = self.repeats.find(found)
        text = f"{place}: an earlier row has the question"
        if reason == OTHER_ANSWER:
            text += f", with another answer than {found.answer[:100]!r}"
        return RowFault(place, reason, text) if reason else None

    def unmet_text(self) -> str:
        """What to say of rows that prompts.where left out, if no prompt is left; else ""."""
        if not (count := self._left_out["where"]):
            return ""
        return (
            f"{count:,} rows of {self._label} do not meet prompts.where={list(self._source.where)} "
            "(values of CSV files are texts: compare them with quoted ones). Of the other rows: "
        )

    def first_unmet_text(self) -> str:
        """Why the first row does not meet prompts.where; "" if no row was left out."""
        if self._unmet is None:
            return ""
        condition, value = self._unmet
        plain = f"the first row has {condition.column} = {repr(value)[:100]}"
        return f"{condition.text!r}: {describe_kinds(condition, value) or plain}"

    def check_given(self) -> None:
        """Raise InputError for a configured column that no row has."""
        for key, column in self._reader.never_seen.items():
            if column not in self._names_of_columns:
                raise no_such_column(key, column, self._label, self._names_of_columns)

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

    def without_repeated_ids(self, prompts: list[Prompt]) -> list[Prompt]:
        """The prompts; those with the id of an earlier one are counted and left out."""
        first: dict[str, Prompt] = {}
        for prompt in prompts:
            if first.setdefault(prompt.id, prompt) is not prompt:
                self.leave_out([RowFault(prompt.place, "repeated_id", "")])
        return list(first.values())

    def notes(self, prompts: list[Prompt]) -> list[str]:
        """Notes for the user: what was taken and left out; [] for all lines of our own form."""
        counts = {
            "with several accepted answers": sum(bool(p.other_answers) for p in prompts),
            "whose own system message was removed": self._reader.systems_replaced,
        }
        unknown = sum(prompt.pass_rate is None for prompt in prompts)
        if self.columns.pass_rate and unknown < len(prompts):
            counts["without a known pass rate"] = unknown
        plain = self._is_lines and self.columns.is_own and self._source.columns == PromptColumns()
        if plain and not self._left_out and not any(counts.values()):
            return []
        where = f" ({self._files.chosen})" if self._files.chosen else ""
        form = f", read as {self.columns.form}" if self.columns.form else ""
        taken = f"{len(prompts)} prompts{form}; columns: "
        taken += self.columns.describe(self._names_of_columns)
        said = f"{self._label}{where}: {taken}"
        if self._left_out:
            said += "; rows left out: " + ", ".join(
                f"{count} {reason}"
                + (f" (first {self._first[reason]})" if reason in self._first else "")
                for reason, count in self._left_out.most_common()
            )
        said += "".join(f"; {count} {what}" for what, count in counts.items() if count)
        return [said]

    def _find_columns(self) -> ColumnMap:
        for file in self._files.files:
            # Few rows at once: some columns may be long.
            rows = read_rows(file, None, batch_rows=SAMPLE_ROWS)
            sample = list(islice((row.fields for row in rows if not row.fault), SAMPLE_ROWS))
            # The first row of text may lack a column.
            found = [*read_columns(file), *(key for row in sample for key in row)]
            names = list(dict.fromkeys(found))
            if sample:
                break
        # Lines may all be faulty, which is said of the first of them.
        if not sample and not names and not any(map(_has_rows, self._files.files)):
            raise InputError(f"{file} has no rows: expected a question and its answer in each")
        self._names_of_columns = every_name(names, sample)
        if not self._is_lines or sample:
            check_columns(self._conditions, names, str(file))
        return find_columns(self._source, names, sample, place=str(file), is_lines=self._is_lines)

    def _name_of(self, file: Path, number: int) -> str:
        """The id of a row without one."""
        if len(self._files.files) == 1:
            return f"{stem_of(file)}:{number}"
        inside = file.relative_to(self._files.root)
        return f"{inside.with_name(stem_of(inside)).as_posix()}:{number}"

    def _is_wanted(self, fields: dict[str, Any], place: str) -> bool:
        for condition in self._conditions:
            value = value_of(fields, condition.column)
            try:
                is_met = holds(condition, value)
            except InputError as error:
                raise InputError(f"{place}: {error}") from error
            if not is_met:
                self._unmet = self._unmet or (condition, value)
                return False
        return True
