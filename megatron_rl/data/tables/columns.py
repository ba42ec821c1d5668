"""Which columns of a data set hold what: as configured, else found by their names and first rows.

Pure. Known are the names that GSM8K, MATH, DAPO-Math-17k, DeepScaleR, OpenR1-Math, NuminaMath,
Big-Math, Skywork-OR1 and data sets in the form of verl give their columns.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_rl.config.errors import InputError
from megatron_rl.config.prompts import PromptColumns, PromptSource
from megatron_rl.config.reward import RewardConfig
from megatron_rl.data.tables.data_sets import choose_part
from megatron_rl.data.tables.where import value_of

NOTHING = "-"
"""In prompts.columns: nothing is taken, whatever the names say."""
SAMPLE_ROWS = 64
"""Rows at the beginning by which columns are found."""
_QUESTIONS = ("question", "problem", "prompt", "query", "messages")
_ANSWERS = (
    "answer", "final_answer", "expected_answer", "reward_model.ground_truth", "ground_truth",
    "solution",
)  # fmt: skip
_TESTS = ("entry", "tests", "test_cases", "input_output")
_DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.",
    'Remember to put your answer on its own line after "Answer:".',
)
"""What DAPO-Math-17k puts around each problem; our format checks ask for another form."""


class Taking(NamedTuple):
    """Which column holds what; empty: none does."""

    question: str
    """Empty, of lines in our own form: whichever of our names a line has."""
    answer: str
    part: str
    """What of it is the answer: all, after_hashes, last_boxed."""
    id: str
    task: str
    language: str
    tests: str
    split: str
    pass_rate: str
    prefix: str
    """Removed from the start of questions that have it; so is the suffix from their end."""
    suffix: str

    @property
    def columns(self) -> list[str]:
        """Those that are read."""
        return [name for name in (self.question, self.answer, *self[3:9]) if name]

    def describe(self) -> str:
        """What is taken, for people."""
        part = {"after_hashes": ' after "####"', "last_boxed": " in the last \\boxed{}"}
        said = [f"question = {self.question or 'by its name in each line'}"]
        said.append(f"answer = {self.answer or 'none'}{part.get(self.part, '')}")
        for name in ("id", "task", "language", "tests", "split", "pass_rate"):
            # Lines in our own form take every key of ours: there is nothing to tell.
            if getattr(self, name) and (self.question or name != getattr(self, name)):
                said.append(f"{name} = {getattr(self, name)}")
        if self.prefix or self.suffix:
            said.append("without the instructions around each problem")
        return ", ".join(said)


def find_taking(
    source: PromptSource,
    names: Sequence[str],
    sample: Sequence[Mapping[str, Any]],
    *,
    place: str,
    is_lines: bool,
) -> Taking:
    """What of the columns `names` is taken, by the configuration and a sample of rows.

    is_lines: JSONL, whose keys may differ from line to line: optional keys of ours always count.
    Raises InputError where a column is missing, or a choice is to be made.
    """
    given = source.columns
    _check_given(given, names, place, is_lines=is_lines)
    found = _Finder(given, list(names), sample, place)
    question = found.question(is_lines=is_lines)
    answer = found.first("answer", _ANSWERS)
    tests = found.first("tests", _TESTS)
    if not answer and not tests and given.answer != NOTHING and not is_lines:
        raise InputError(
            f"{place} has no column of answers: expected {', '.join(_ANSWERS)}; it has "
            f"{', '.join(names)}: name it by prompts.columns.answer"
        )
    part = source.answer_part
    if part == "auto":
        values = [value_of(row, answer) for row in sample] if answer else []
        part = choose_part(values, is_solution=answer.lower().endswith("solution"))
    prefix, suffix = source.strip_prefix, source.strip_suffix
    if not prefix and not suffix and question and _is_dapo(sample, question):
        prefix, suffix = _DAPO
    optional = {
        name: found.optional(name, known, fits, is_lines=is_lines)
        for name, (known, fits) in _OPTIONAL.items()
    }
    # Lines in our own form say so themselves; those of a data set have none of ours.
    return Taking(question, answer or ("answer" if is_lines else ""), part, optional["id"],
                  optional["task"], optional["language"], tests or ("entry" if is_lines else ""),
                  optional["split"], optional["pass_rate"], prefix, suffix)  # fmt: skip


def text_of(messages: Any) -> str:
    """A question as one text: itself, or what the user says last in a list of messages."""
    if isinstance(messages, str):
        return messages
    turns = [turn for turn in messages or [] if isinstance(turn, Mapping)]
    return next((str(t.get("content")) for t in reversed(turns) if t.get("role") == "user"), "")


class _Finder:
    """Columns by what is configured, known names and the sample."""

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
        known = [found for name in _QUESTIONS if (found := self._named(name))]
        if is_lines and not _are_together(known, self._sample):
            return ""
        # Beside a problem, messages are a worked example: they hold the answer.
        known = [name for name in known if name.lower() != "messages"] or known
        if len(known) == 1:
            return known[0]
        raise InputError(
            f"{self._place} has {'the columns ' + ' and '.join(known) if known else 'no column'} "
            f"of questions; it has {', '.join(self._names)}: name one by prompts.columns.question"
        )

    def first(self, key: str, known: Sequence[str]) -> str:
        """The configured column, or the first that has one of the names."""
        given: str = getattr(self._given, key)
        if given:
            return "" if given == NOTHING else given
        return next((found for name in known if (found := self._named(name))), "")

    def optional(
        self, key: str, known: Sequence[str], fits: Callable[[list[Any]], bool], *, is_lines: bool
    ) -> str:
        """The same, but that a column which is not configured must hold values as ours are."""
        given: str = getattr(self._given, key)
        if given:
            return "" if given == NOTHING else given
        if is_lines and (key != "id" or "id" in self._names):
            return key
        for name in known:
            found = self._named(name)
            values = [value_of(row, found) for row in self._sample] if found else []
            if found and fits(values):
                return found
        return ""

    def _named(self, name: str) -> str:
        """The column of this name, in whatever case."""
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
    """Whether a line has `messages` beside its question, or a name of a question not ours."""
    ours = {"question", "problem", "prompt", "messages"}
    questions = set(known) - {"messages"}
    return not ours.issuperset(known) or any(
        "messages" in row and not questions.isdisjoint(row) for row in sample
    )


def _is_dapo(sample: Sequence[Mapping[str, Any]], question: str) -> bool:
    texts = [text_of(value_of(row, question)).strip() for row in sample]
    return bool(texts) and all(t.startswith(_DAPO[0]) and t.endswith(_DAPO[1]) for t in texts)


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


_OPTIONAL: dict[str, tuple[Sequence[str], Callable[[list[Any]], bool]]] = {
    "id": (("id", "unique_id", "uuid", "problem_id", "question_id"), _are_ids),
    "task": (("task",), _are_tasks),
    "language": (("language",), _are_languages),
    "split": (("split",), _are_splits),
    "pass_rate": (("pass_rate", "llama8b_solve_rate"), _are_shares),
}
"""Known names, and whether values of a column that nobody named are as ours are."""
