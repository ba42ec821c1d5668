"""Known public data sets: their columns, and how to read their answers.

Pure. To add a data set, add an entry to DATA_SETS. A new form of answers is a function in PARTS.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

REQUEST = "responses_create_params.input"
"""The messages of a request in the form of OpenAI's Responses."""
VERL_ANSWER = "reward_model.ground_truth"
TASK_TYPE = "task_type"
"""Says which of its verifiers SYNTHETIC-1 uses for a row, as "verifiable_math"."""
DIFFICULTY = "difficulty"
"""A pass rate in Polaris, as text of the form "5/8"; another measure in other data sets."""

VERIFICATION = "verification_info, metadata"
MODULE = "test, test_info, test_entry_point, entry_point, prompt"
ASSERTIONS = "test_list, test_setup_code, test_imports"
"""Columns of tests that several data sets have."""


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
    """Column of a program's tests, and after commas columns that belong to it (`test_forms.py`).
    The task is "code" then."""
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
        tests = "" if self.answer else self.tests.split(", ")[0]
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
            kind=TASK_TYPE, tests=VERIFICATION),
    DataSet("others", "query", "ground_truth"),
    DataSet("others", "question", "answers"),
    DataSet("MATH, NuminaMath", "problem", "solution", part="last_boxed", is_partly_answered=True),
    DataSet("APPS, TACO", "question", id="problem_id",
            tests="input_output, starter_code, time_limit, memory_limit"),
    DataSet("DeepCoder", "problem", tests="tests, metadata, starter_code", id="question_id"),
    DataSet("LiveCodeBench", "question_content", id="question_id",
            tests="public_test_cases, private_test_cases, metadata, starter_code"),
    DataSet("CodeContests", "description",
            tests="public_tests, private_tests, generated_tests, time_limit, memory_limit_bytes, "
            "input_file, output_file"),
    DataSet("open-r1 verifiable coding", "problem_statement", tests=VERIFICATION, id="problem_id"),
    DataSet("MBPP", "text", tests=ASSERTIONS, id="task_id"),
    DataSet("MBPP-sanitized", "prompt", tests=ASSERTIONS, id="task_id"),
    DataSet("KodCode", "question", tests=MODULE, id="question_id",
            pass_rate="gpt_pass_percentage"),
    DataSet("KodCode-SFT", "question", tests="test_code, test_entry_point, test_info",
            id="conversation_id", pass_rate="gpt_pass_percentage"),
    DataSet("HumanEval", "prompt", tests=MODULE, id="task_id"),
    DataSet("AceCode", "question", tests="test_cases"),
    DataSet("conversations", "messages"),
)  # fmt: skip


def known_names(key: str) -> list[str]:
    """Column names for a field of DataSet, such as "answer", in the order of the table."""
    # Questions of code have names, such as "text", that mean something else in other data sets.
    rows = [one for one in DATA_SETS if key != "question" or one.answer or not one.tests]
    return list(dict.fromkeys(filter(None, (getattr(one, key) for one in rows))))


def named_form(kind: str) -> DataSet | None:
    """The data set of the table that a prompts.kind names, in any case; None for another kind."""
    wanted = _letters(kind)
    return next((one for one in DATA_SETS if wanted in map(_letters, one.names)), None)


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.casefold()))


# --- answers --------------------------------------------------------------------------------------

_HASHES = "####"
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)|\\boxed\s+([^\s{}$\\]+)")
_BRACE = re.compile(r"\\.|[{}]", re.S)


class NoAnswer(ValueError):
    """The value lacks the wanted part; the text names it."""


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

    All rows must have the part, except in a column that `is_partly_answered`; the mark of GSM8K
    stands in no other answers, so that most rows are enough.
    """
    texts = [value for value in values if isinstance(value, str) and value.strip()]
    for one in DATA_SETS:
        if one.part == "all" or not texts:
            continue
        found = sum(PARTS[one.part].find(text) is not None for text in texts)
        is_partly = one.is_partly_answered and column.lower().endswith(one.answer)
        is_most = 2 * found > len(texts) and one.part == "after_hashes"
        if found == len(texts) or is_most or (found and is_partly):
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
