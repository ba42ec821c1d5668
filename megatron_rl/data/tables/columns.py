"""Finds the columns of a data set: by the configuration, or by their names and the first rows.

Pure. `data_sets.py` has the table of known names.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_rl.config.errors import InputError
from megatron_rl.config.prompts import PromptColumns, PromptSource
from megatron_rl.config.reward import RewardConfig
from megatron_rl.data.tables.data_sets import DATA_SETS, PARTS, choose_part, known_names
from megatron_rl.data.tables.where import value_of

NOTHING = "-"
"""Value of prompts.columns.*: read no such column."""
SAMPLE_ROWS = 64
"""Number of first rows that decide about columns."""


class ColumnMap(NamedTuple):
    """The column of each part of a prompt; empty: no column has it."""

    question: str
    """Empty for lines in our own form: each line names its question."""
    answer: str
    part: str
    """Part of the column that is the answer: "all" or a key of PARTS."""
    id: str
    task: str
    language: str
    tests: str
    split: str
    pass_rate: str
    prefix: str
    """Removed from the start of questions; the suffix from their end."""
    suffix: str

    @property
    def names(self) -> list[str]:
        """Columns to read."""
        return [name for name in (self.question, self.answer, *self[3:9]) if name]

    def describe(self) -> str:
        """The columns, for people."""
        where = f" {PARTS[self.part].where}" if self.part in PARTS else ""
        said = [f"question = {self.question or 'by its name in each line'}"]
        said.append(f"answer = {self.answer or 'none'}{where}")
        for name in _OPTIONAL | {"tests": None}:
            # Our own lines may have all our keys, which needs no note.
            if getattr(self, name) and (self.question or name != getattr(self, name)):
                said.append(f"{name} = {getattr(self, name)}")
        if self.prefix or self.suffix:
            said.append("without the instructions around each problem")
        return ", ".join(said)


def find_columns(
    source: PromptSource,
    names: Sequence[str],
    sample: Sequence[Mapping[str, Any]],
    *,
    place: str,
    is_lines: bool,
) -> ColumnMap:
    """The columns to read, by the configuration, the names and a sample of rows.

    is_lines: JSONL, where later lines may have further keys, so our optional keys always count.
    Raises InputError for a missing column, and where the user must choose.
    """
    given = source.columns
    _check_given(given, names, place, is_lines=is_lines)
    finder = _Finder(given, list(names), sample, place)
    question = finder.question(is_lines=is_lines)
    answer = finder.first("answer")
    tests = finder.first("tests")
    if not answer and not tests and given.answer != NOTHING and not is_lines:
        raise InputError(
            f"{place} has no column of answers: expected {', '.join(known_names('answer'))}; it "
            f"has {', '.join(names)}: name it by prompts.columns.answer"
        )
    part = source.answer_part
    if part == "auto":
        part = choose_part([value_of(row, answer) for row in sample] if answer else [], answer)
    prefix, suffix = source.strip_prefix, source.strip_suffix
    if not prefix and not suffix and question:
        prefix, suffix = _instructions([value_of(row, question) for row in sample])
    return ColumnMap(
        question=question,
        # Later lines in our own form may have these keys.
        answer=answer or ("answer" if is_lines else ""),
        part=part,
        tests=tests or ("entry" if is_lines else ""),
        prefix=prefix,
        suffix=suffix,
        **{name: finder.optional(name, is_lines=is_lines) for name in _OPTIONAL},
    )


def _instructions(questions: Sequence[Any]) -> tuple[str, str]:
    """Prefix and suffix of a known data set that all questions have; empty where none has."""
    texts = [text_of(question).strip() for question in questions]
    for one in DATA_SETS:
        around = (one.prefix, one.suffix)
        if any(around) and texts and all(t.startswith(around[0]) and t.endswith(around[1])
                                         for t in texts):  # fmt: skip
            return around
    return "", ""


def text_of(messages: Any) -> str:
    """A question as one text: itself, or the last message of the user."""
    if isinstance(messages, str):
        return messages
    turns = [turn for turn in messages or [] if isinstance(turn, Mapping)]
    return next((str(t.get("content")) for t in reversed(turns) if t.get("role") == "user"), "")


class _Finder:
    """Columns by the configuration, the known names and the sample."""

    def __init__(
        self,
        given: PromptColumns,
        names: list[str],
        sample: Sequence[Mapping[str, Any]],
        place: str,
    ) -> None:
        self._given = given
        self._names = names
        self._sample = sample
        self._place = place

    def question(self, *, is_lines: bool) -> str:
        if self._given.question:
            return self._given.question
        known = [found for name in known_names("question") if (found := self._named(name))]
        if is_lines and not _are_together(known, self._sample):
            return ""
        # With another column of questions, messages are a worked example with the answer.
        known = [name for name in known if name.lower() != "messages"] or known
        if len(known) == 1:
            return known[0]
        raise InputError(
            f"{self._place} has {'the columns ' + ' and '.join(known) if known else 'no column'} "
            f"of questions; it has {', '.join(self._names)}: name one by prompts.columns.question"
        )

    def first(self, key: str) -> str:
        """The configured column, or the first that has a known name."""
        given: str = getattr(self._given, key)
        if given:
            return "" if given == NOTHING else given
        return next((found for name in known_names(key) if (found := self._named(name))), "")

    def optional(self, key: str, *, is_lines: bool) -> str:
        """The configured column, or a column of a known name whose values are like ours."""
        given: str = getattr(self._given, key)
        if given:
            return "" if given == NOTHING else given
        if is_lines and (key != "id" or "id" in self._names):
            return key
        for name in known_names(key) if key in ("id", "pass_rate") else [key]:
            found = self._named(name)
            if found and _OPTIONAL[key]([value_of(row, found) for row in self._sample]):
                return found
        return ""

    def _named(self, name: str) -> str:
        """The column of this name, in any case."""
        if name in self._names:
            return name
        return next((own for own in self._names if own.lower() == name), "")


def _check_given(given: PromptColumns, names: Sequence[str], place: str, *, is_lines: bool) -> None:
    for key, column in given.model_dump().items():
        # A key may appear in a later line only.
        if column in ("", NOTHING) or column in names or (is_lines and key != "question"):
            continue
        raise InputError(
            f"prompts.columns.{key} = {column!r}: {place} has no such column; it has "
            f"{', '.join(names)}"
        )


def _are_together(known: Sequence[str], sample: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a line has a question and `messages`, or a question under another name than ours."""
    ours = {"question", "problem", "prompt", "messages"}
    questions = set(known) - {"messages"}
    return not ours.issuperset(known) or any(
        "messages" in row and not questions.isdisjoint(row) for row in sample
    )


def _are_ids(values: list[Any]) -> bool:
    kinds = all(isinstance(value, str | int) and value != "" for value in values)
    return kinds and len(set(values)) == len(values) > 0


def _are_tasks(values: list[Any]) -> bool:
    known = RewardConfig().all_tasks
    return bool(values) and all(value is None or value in known for value in values)


def _are_splits(values: list[Any]) -> bool:
    return bool(values) and all(value in (None, "", "train", "held_out") for value in values)


def _are_languages(values: list[Any]) -> bool:
    texts = [value for value in values if value]
    return bool(texts) and all(
        isinstance(value, str) and re.fullmatch("[a-z]{2}", value) for value in texts
    )


def _are_shares(values: list[Any]) -> bool:
    found = [value for value in values if value is not None]
    return bool(found) and all(isinstance(v, int | float) and 0 <= v <= 1 for v in found)


_OPTIONAL: dict[str, Callable[[list[Any]], bool]] = {
    "id": _are_ids,
    "task": _are_tasks,
    "language": _are_languages,
    "split": _are_splits,
    "pass_rate": _are_shares,
}
"""Optional columns -> whether values of a column have our form."""
