"""Finds the columns of a data set: by the configuration, or by their names and the first rows.

Pure. `data_sets.py` has the table of known names.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_rl.config.errors import InputError
from megatron_rl.config.lookup import nearest
from megatron_rl.config.prompts import PromptColumns, PromptSource
from megatron_rl.data.jsonl_source import QUESTIONS
from megatron_rl.data.messages import plain_turns
from megatron_rl.data.tables.data_sets import (
    DATA_SETS,
    DIFFICULTY,
    OWN,
    PARTS,
    REQUEST,
    VERL_ANSWER,
    DataSet,
    choose_part,
    known_names,
    named_form,
)
from megatron_rl.data.tables.values import OPTIONAL, are_lists
from megatron_rl.data.tables.where import decoded, value_of
from megatron_rl.protocol.prompt import NotText

NOTHING = "-"
"""Value of prompts.columns.*: read no such column."""
_GYM = "metadata"
_GYM_MARKS = (f"{_GYM}.source_dataset", f"{_GYM}.source_index")
"""Columns that reasoning_gym writes beside question and answer."""
_SOLUTION = "solution"
_MAX_NAMED_CHARS = 100_000
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
    kind: str = ""
    """Says whether a row is mathematics or code."""
    has_lists: bool = False
    """Texts of the answer's column that are lists hold several accepted answers."""
    gym: str = ""
    """Metadata of reasoning_gym, whose scorers grade the rows."""
    form: str = ""
    """Name of the data set that has these columns; empty: none that is known."""
    unread_rates: str = ""
    """Column of pass rates that is not read, because a value is no rate."""

    @property
    def names(self) -> list[str]:
        tests = self.tests.split(", ")
        every = (self.question, self.answer, *self[3:6], *tests, *self[7:9], self.kind, self.gym)
        return [name for name in every if name]

    @property
    def is_own(self) -> bool:
        """Whether the columns are those of lines in our own form."""
        own = (self.question, self.answer, self.part, self.tests, self.pass_rate)
        is_all = not self.gym and not self.unread_rates
        return own == ("", "answer", "all", "entry", "pass_rate") and is_all

    def describe(self, present: Collection[str]) -> str:
        """The columns, for people. present: names of the file's columns."""
        where = f" {PARTS[self.part].where}" if self.part in PARTS else ""
        said = [f"question = {self.question or 'by its name in each line'}"]
        is_code = self.answer == "answer" and self.answer not in present and self.question
        said.append(f"answer = {'none' if is_code else self.answer or 'none'}{where}")
        for name in OPTIONAL | {"tests": None}:
            column: str = getattr(self, name)
            # Our own lines may have all our keys, which needs no note.
            if column.split(", ")[0] in present and (self.question or name != column):
                said.append(f"{name} = {column}")
        if self.unread_rates:
            said.append(f"pass_rate = none, because a value of {self.unread_rates} is no rate")
        if self.gym:
            said.append("graded by the scorers of reasoning_gym")
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
    form = named_form(source.kind)
    finder = _Finder(source.columns, list(names), sample, place)
    finder.check_given(is_lines=is_lines)
    if form is not None:
        finder.choose(form, source.kind)
    question = finder.question(is_lines=is_lines)
    answer = finder.first("answer")
    tests = finder.first("tests")
    if not answer and not tests and source.columns.answer != NOTHING and not is_lines:
        raise InputError(
            f"{place} has no column of answers: expected {', '.join(known_names('answer'))}; it "
            f"has {', '.join(names)}: name it by prompts.columns.answer, or give '-' for a task "
            "of your own whose reward needs none"
        )
    answers, part = finder.values(answer) if answer else [], source.answer_part
    if part == "auto":
        part = form.part if form is not None else choose_part(answers, answer)
    if tests and part == "all" and not source.columns.answer and answer.lower() == _SOLUTION:
        # With tests, solutions are programs, as in KodCode.
        answer = ""
    prefix, suffix = source.strip_prefix, source.strip_suffix
    if not prefix and not suffix:
        prefix, suffix = _instructions(finder.questions(question))
    found = ColumnMap(
        question=question,
        # Later lines in our own form may have these keys.
        answer=answer or ("answer" if is_lines else ""),
        part=part,
        tests=tests or ("entry" if is_lines else ""),
        prefix=prefix,
        suffix=suffix,
        kind=finder.kind(answer),
        has_lists=answer == VERL_ANSWER or are_lists(answers),
        gym=_GYM if all(map(finder.named, _GYM_MARKS)) and answer and not tests else "",
        **{name: finder.optional(name, is_lines=is_lines) for name in OPTIONAL},
    )
    name = form.name if form is not None else finder.recognise(found)
    return found._replace(form=name, unread_rates=finder.unread_rates)


def _instructions(questions: Sequence[Any]) -> tuple[str, str]:
    """Prefix and suffix of a known data set that a question has; empty where none has."""
    texts = [text_of(question).strip() for question in questions]
    for one in DATA_SETS:
        if (one.prefix or one.suffix) and any(
            text.startswith(one.prefix) and text.endswith(one.suffix) for text in texts
        ):
            return one.prefix, one.suffix
    return "", ""


def text_of(messages: Any) -> str:
    """A question as one text: itself, or the last message of the user."""
    try:
        messages = plain_turns(messages, drops_calls=True)
    except NotText:
        return ""
    if isinstance(messages, str):
        return messages
    turns = [t for t in messages if isinstance(t, Mapping)] if isinstance(messages, list) else []
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
        self.unread_rates = ""
        """Column of pass rates with a value that is none."""

    def check_given(self, *, is_lines: bool) -> None:
        """Raise InputError for a configured column that no row can have."""
        for key, column in self._given.model_dump().items():
            if column in ("", NOTHING) or self.named(column) == column:
                continue
            # A key may appear in a later line, or in the JSON text of a later row, only.
            is_later = is_lines or ("." in column and self._holds_json(column.split(".")[0]))
            if not is_later or (key == "question" and is_lines):
                raise no_such_column(
                    key, column, self._place, every_name(self._names, self._sample)
                )

    def choose(self, form: DataSet, kind: str) -> None:
        """Take the columns of a data set. Raises InputError for a missing one."""
        missing = [name for name in form.marks if not self.named(name)]
        if missing:
            raise self._no_form(form, kind, missing[0])
        given = self._given.model_dump()
        for key in ("question", "answer", "tests", "id", "pass_rate"):
            name: str = getattr(form, key)
            if not name or given[key]:
                continue
            given[key] = self.named(name)
            is_code = key == "answer" and form.tests and self.named(form.tests)
            if not given[key] and name.split(", ")[0] in form.columns and not is_code:
                raise self._no_form(form, kind, name)
        self._given = PromptColumns(**given)

    def _no_form(self, form: DataSet, kind: str, name: str) -> InputError:
        """The error for a column of a data set that is not there."""
        known = every_name(self._names, self._sample)
        return InputError(
            f"prompts.kind = {kind!r} is {form.name}, with the columns "
            f"{', '.join(form.columns)}; {self._place} has no {name}; it has "
            f"{', '.join(self._names)}{nearest(name, known)}; "
            "prompts.kind = 'auto' finds the columns by their names"
        )

    def values(self, column: str) -> list[Any]:
        """Values of a column in the sample."""
        return [value_of(row, column) for row in self._sample]

    def questions(self, column: str) -> list[Any]:
        """Questions of the sample; empty column: that each line names."""
        if column:
            return self.values(column)
        return [row[key] for row in self._sample for key in QUESTIONS if key in row]

    def _holds_json(self, column: str) -> bool:
        return any(isinstance(decoded(value), Mapping) for value in self.values(column))

    def kind(self, answer: str) -> str:
        """The column that says what rows are, in data sets with this column of answers."""
        # Elsewhere a column of the same name may mean anything.
        known = [one.kind for one in DATA_SETS if one.kind and one.answer == answer.lower()]
        found = filter(None, map(self.named, known))
        return next((n for n in found if any(isinstance(v, str) for v in self.values(n))), "")

    def recognise(self, found: ColumnMap) -> str:
        """Name of the known data set with the most of these columns; empty for none."""
        key = found.question or next(
            (key for key in QUESTIONS if any(key in row for row in self._sample)), ""
        )
        best, most = "", -1
        for one in DATA_SETS:
            # Sets of code are known by question and tests alone.
            is_code = not one.answer
            if one.name == OWN and found.tests != one.tests:
                continue
            wanted = [] if is_code or one.name == OWN else [one.pass_rate, one.id, *one.marks]
            has = {found.pass_rate.lower(), found.id.lower(), *filter(self.named, one.marks)}
            is_it = (key.lower(), found.part) == (one.question, one.part)
            tests = found.tests.lower().split(", ")[0] == one.tests.split(", ")[0]
            has_answer = found.answer.lower() == one.answer
            # A file of such a set may have rows of code alone.
            has_answer |= bool(one.tests) and tests and not self.named(found.answer)
            is_it &= has_answer if one.answer else tests
            is_it &= has >= set(filter(None, wanted))
            is_it &= one.prefix in ("", found.prefix) and one.suffix in ("", found.suffix)
            count = len(list(filter(None, [*wanted, one.suffix]))) + is_code
            if is_it and (one.names or one.name == OWN) and count > most:
                best, most = one.name, count
        return best

    def question(self, *, is_lines: bool) -> str:
        """The column of questions; empty where each line names its own. Raises InputError."""
        if self._given.question:
            return self._given.question
        if request := self.named(REQUEST):
            return request
        for one in DATA_SETS:
            has_tests = one.tests and not one.answer and self._tests_named(one.tests)
            if has_tests and self._given.tests != NOTHING and (found := self.named(one.question)):
                return found
        known = [found for name in known_names("question") if (found := self.named(name))]
        # Lines without any of our columns have others in their place, which the user must name.
        has_ours = known or self.first("answer") or self.first("tests")
        if is_lines and (has_ours or not self._sample) and not _are_together(known, self._sample):
            return ""
        # With another column of questions, messages are a worked example with the answer.
        known = [name for name in known if name.lower() != "messages"] or known
        if len(known) == 1:
            return known[0]
        like = "" if known else nearest("question", self._names)
        raise InputError(
            f"{self._place} has {'the columns ' + ' and '.join(known) if known else 'no column'} "
            f"of questions; it has {', '.join(self._names)}{like}: name one by "
            "prompts.columns.question, or rename it"
        )

    def first(self, key: str) -> str:
        """The configured column, or the first that has a known name."""
        given: str = getattr(self._given, key)
        if given:
            return "" if given == NOTHING else given
        find = self._tests_named if key == "tests" else self.named
        return next((found for name in known_names(key) if (found := find(name))), "")

    def _tests_named(self, names: str) -> str:
        """The columns of tests; a column of a common name counts if it has assertions."""
        found = self.named(names)
        first = found.split(", ")[0]
        if first.lower() in ("test", "test_code"):
            return found if any("assert" in str(value) for value in self.values(first)) else ""
        return found

    def optional(self, key: str, *, is_lines: bool) -> str:
        """The configured column, or a column of a known name whose values are like ours."""
        given: str = getattr(self._given, key)
        if given:
            return "" if given == NOTHING else given
        if is_lines and (key not in ("id", "pass_rate") or key in self._names):
            return key
        for name in known_names(key) if key in ("id", "pass_rate") else [key]:
            found = self.named(name)
            values = self.values(found) if found else []
            known = [value for value in values if value is not None]
            fractions = [value for value in known if isinstance(value, str) and "/" in value]
            if name == DIFFICULTY and not fractions:
                continue
            is_whole = name != DIFFICULTY or len(fractions) == len(known)
            if found and is_whole and OPTIONAL[key](values):
                return found
            if key == "pass_rate" and known:
                self.unread_rates = found
        return key if is_lines and key != "id" else ""

    def named(self, name: str) -> str:
        """The column of this name, in any case, also within JSON text; empty without one.

        Of names with commas between them: the columns that there are, empty without the first.
        """
        first, *more = name.split(", ")
        if more:
            found = [self.named(first), *filter(None, map(self.named, more))]
            return ", ".join(found) if found[0] else ""
        if name in self._names:
            return name
        found = next((own for own in self._names if own.lower() == name), "")
        if not found and "." in name and any(value is not None for value in self.values(name)):
            return name
        return found


def every_name(names: Sequence[str], sample: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of columns, and of keys in JSON text of the sample."""
    found = dict.fromkeys(names)
    for name in names:
        for value in (value_of(row, name) for row in sample):
            # Tests of programs may take megabytes.
            if isinstance(value, str) and len(value) < _MAX_NAMED_CHARS:
                value = decoded(value)
            if isinstance(value, Mapping):
                found |= dict.fromkeys(f"{name}.{key}" for key in value)
    return list(found)


def no_such_column(key: str, column: str, place: str, names: Sequence[str]) -> InputError:
    """The error for a configured column that is missing."""
    return InputError(
        f"prompts.columns.{key} = {column!r}: {place} has no such column; it has "
        f"{', '.join(names)}{nearest(column, names)}"
    )


def _are_together(known: Sequence[str], sample: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a line has a question and `messages`, or a question under another name than ours."""
    ours = {"question", "problem", "prompt", "messages"}
    questions = set(known) - {"messages"}
    return not ours.issuperset(known) or any(
        "messages" in row and not questions.isdisjoint(row) for row in sample
    )
