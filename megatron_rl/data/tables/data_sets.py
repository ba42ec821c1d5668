"""Known public data sets: their columns, and how to read their answers and tests.

Pure. To add a data set, add an entry to DATA_SETS. A new form of answers is a function in PARTS; a
new form of tests of programs is a function in TEST_FORMS.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

REQUEST = "responses_create_params.input"
"""The messages of a request in the form of OpenAI's Responses."""
VERL_ANSWER = "reward_model.ground_truth"
TASK_TYPE = "task_type"
"""Says which of its verifiers SYNTHETIC-1 uses for a row, as "verifiable_math"."""
DIFFICULTY = "difficulty"
"""A pass rate in Polaris, as text of the form "5/8"; another measure in other data sets."""


class DataSet(NamedTuple):
    """The columns of one data set, or of several with the same columns. A dot enters a structure.

    The entry also serves other data sets with these columns. Earlier entries win.
    """

    name: str
    question: str = ""
    answer: str = ""
    part: str = "all"
    """Part of the column that is the answer: "all", or a key of PARTS."""
    is_partly_answered: bool = False
    """Some rows, such as proofs, lack the part; these rows are faulty."""
    tests: str = ""
    """Column of a program's tests; the task is "code" then."""
    id: str = ""
    pass_rate: str = ""
    prefix: str = ""
    """Instructions before each question (suffix: after it). They are removed, because our format
    checks need another form."""
    suffix: str = ""
    kind: str = ""
    """Column that says what a row is, such as "math" or "code"."""
    marks: tuple[str, ...] = ()
    """Further columns by which the data set is known."""

    @property
    def names(self) -> list[str]:
        """The data sets with these columns; [] for an entry without a name."""
        return [] if self.name in UNNAMED else self.name.split(", ")

    @property
    def columns(self) -> list[str]:
        """Columns that a file of the data set has."""
        tests = "" if self.answer else self.tests
        return [name for name in (self.question, self.answer, tests, self.pass_rate) if name]


OWN = "lines in our own form"
UNNAMED = (OWN, "others", "conversations")
DATA_SETS = (
    DataSet(OWN, "question", "answer", tests="entry", id="id",
            pass_rate="pass_rate"),
    DataSet("GSM8K", "question", "answer", part="after_hashes"),
    DataSet("DeepScaleR, AIME", "problem", "answer"),
    DataSet("MATH-500", "problem", "answer", id="unique_id"),
    DataSet("OpenR1-Math", "problem", "answer", id="uuid"),
    DataSet("Big-Math", "problem", "answer", pass_rate="llama8b_solve_rate"),
    DataSet("Polaris", "problem", "answer", pass_rate=DIFFICULTY),
    DataSet("reasoning_gym", "question", "answer",
            marks=("metadata.source_dataset", "metadata.source_index")),
    DataSet("DeepMath-103K", "question", "final_answer"),
    DataSet("others", "problem", "final_answer"),
    DataSet("OpenMathReasoning", "problem", "expected_answer", pass_rate="pass_rate_72b_tir"),
    DataSet("others", "problem", "expected_answer"),
    DataSet("NeMo-Gym", REQUEST, "expected_answer", tests="verifier_metadata.unit_tests"),
    DataSet(
        "DAPO-Math-17k", "prompt", VERL_ANSWER,
        prefix="Solve the following math problem step by step. The last line of your response "
        "should be of the form Answer: $Answer (without quotes) where $Answer is the answer to "
        "the problem.",
        suffix='Remember to put your answer on its own line after "Answer:".',
    ),
    DataSet("Skywork-OR1, Eurus-2-RL, verl", "prompt", VERL_ANSWER, kind="ability"),
    DataSet("GSM8K of verl", "prompt", VERL_ANSWER, kind="ability",
            suffix="Let's think step by step and output the final answer after \"####\"."),
    DataSet("SYNTHETIC-1", "prompt", "verification_info.ground_truth", id="problem_id",
            kind=TASK_TYPE),
    DataSet("others", "query", "ground_truth"),
    DataSet("MATH, NuminaMath", "problem", "solution", part="last_boxed", is_partly_answered=True),
    DataSet("LiveCodeBench, DeepCoder", "problem", tests="tests", id="question_id"),
    DataSet("others", "question", tests="test_cases"),
    DataSet("APPS, TACO", "question", tests="input_output", id="problem_id"),
    DataSet("conversations", "messages"),
)  # fmt: skip


def known_names(key: str) -> list[str]:
    """Column names for a field of DataSet, such as "answer", in the order of the table."""
    return list(dict.fromkeys(filter(None, (getattr(one, key) for one in DATA_SETS))))


# --- answers --------------------------------------------------------------------------------------

_HASHES = "####"
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)|\\boxed\s+([^\s{}$\\]+)")
_BRACE = re.compile(r"\\.|[{}]", re.S)


class NoAnswer(ValueError):
    """The value lacks the wanted part; the text names it."""


class BadTests(NoAnswer):
    """Tests of a program that can grade nothing."""


class Part(NamedTuple):
    """A form in which a text contains the answer."""

    find: Callable[[str], str | None]
    """The answer in a text; None or empty where it has none."""
    where: str
    """For people, as in `answer after "####"`."""


def _after_hashes(text: str) -> str | None:
    _, mark, answer = text.rpartition(_HASHES)
    # GSM8K groups digits: 1,000 is not a list of two numbers.
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", answer.strip()) if mark else None


def _last_boxed(text: str) -> str | None:
    """The content of the last box; None without a box, or where its braces do not close."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    last = boxes[-1]
    if last[1] is not None:
        return last[1]
    depth = 0
    # An escaped brace belongs to the answer, as in \boxed{\{1, 2\}}.
    for brace in _BRACE.finditer(text, last.end()):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[last.end() + 1 : brace.start()].strip()
    return None


PARTS = {
    "after_hashes": Part(_after_hashes, f'after "{_HASHES}"'),
    "last_boxed": Part(_last_boxed, "in the last \\boxed{}"),
}


def choose_part(values: Sequence[Any], column: str) -> str:
    """ "all" or a key of PARTS, by a column's values in the first rows.

    All rows must have the part, except in a column that `is_partly_answered`.
    """
    texts = [value for value in values if isinstance(value, str) and value.strip()]
    for one in DATA_SETS:
        if one.part == "all" or not texts:
            continue
        found = sum(PARTS[one.part].find(text) is not None for text in texts)
        is_partly = one.is_partly_answered and column.lower().endswith(one.answer)
        if found == len(texts) or (found and is_partly):
            return one.part
    return "all"


def take_part(value: Any, part: str) -> Any:
    """The answer that a value holds. Raises NoAnswer."""
    if part == "all" or not isinstance(value, str):
        return value
    answer = PARTS[part].find(value)
    if not answer:
        raise NoAnswer(f"there is no answer {PARTS[part].where}")
    return answer


# --- tests of programs ----------------------------------------------------------------------------


def entry_of(tests: Any) -> str:
    """Our `entry` for tests in one of TEST_FORMS, also as JSON; "" for none. Raises BadTests."""
    if isinstance(tests, str):
        if not tests.strip():
            return ""
        try:
            tests = json.loads(tests)
        except ValueError as error:
            raise BadTests(f"the tests are no JSON: {error}") from error
    for read in TEST_FORMS.values():
        entry = read(tests)
        if entry is not None:
            return json.dumps(entry)
    raise BadTests(f"the tests have no form that is known: {', '.join(TEST_FORMS)}")


def _own_entry(tests: Any) -> dict[str, Any] | None:
    return tests if isinstance(tests, dict) and {"cases", "unit_tests"} & tests.keys() else None


def _columns_of_cases(tests: Any) -> dict[str, Any] | None:
    """APPS and TACO: programs, or with "fn_name" a function."""
    if not isinstance(tests, dict) or not {"inputs", "outputs"} <= tests.keys():
        return None
    inputs, outputs = tests["inputs"], tests["outputs"]
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise BadTests("inputs and outputs of the tests are no lists")
    if len(inputs) != len(outputs):
        raise BadTests(f"the tests have {len(inputs)} inputs but {len(outputs)} outputs")
    pairs = list(zip(inputs, outputs, strict=True))
    name = tests.get("fn_name")
    if not name:
        return _cases((_lines(given), _lines(wanted)) for given, wanted in pairs)
    # APPS puts what a call returns into a list of one.
    cases = _cases(
        ("\n".join(map(json.dumps, given)),
         json.dumps(wanted[0] if isinstance(wanted, list) and len(wanted) == 1 else wanted))
        for given, wanted in pairs
    )  # fmt: skip
    return {**cases, "entry_point": name, "language": "python"}


def _list_of_cases(tests: Any) -> dict[str, Any] | None:
    """LiveCodeBench and DeepCoder: programs that read standard input."""
    if not (isinstance(tests, list) and tests and all(isinstance(one, dict) for one in tests)):
        return None
    if any(one.get("testtype", "stdin") != "stdin" or "fn_name" in one for one in tests):
        raise BadTests("tests that call a function need an entry with its entry_point")
    if not all({"input", "output"} <= one.keys() for one in tests):
        return None
    return _cases((one["input"], one["output"]) for one in tests)


def _cases(pairs: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    return {"cases": [{"stdin": given, "stdout": wanted} for given, wanted in pairs]}


def _lines(value: Any) -> str:
    """Standard input or output: a text, or the list of its lines."""
    return value if isinstance(value, str) else "\n".join(map(str, value))


TEST_FORMS: dict[str, Callable[[Any], dict[str, Any] | None]] = {
    "an entry with cases or unit_tests": _own_entry,
    "{inputs, outputs}": _columns_of_cases,
    "or a list of {input, output}": _list_of_cases,
}
"""Each gives the entry, or None for tests in another form."""
