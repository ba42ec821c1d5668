"""What of a column is the reference answer, and how data sets write the tests of programs.

Pure. Worked solutions end with the answer: GSM8K writes it after "####", MATH in \\boxed{}.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

_HASHES = "####"
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)|\\boxed\s+([^\s{}$\\]+)")
_BRACE = re.compile(r"\\.|[{}]", re.S)


class NoAnswer(ValueError):
    """A value without the part that is wanted; the text says what was missing."""


class BadTests(NoAnswer):
    """Tests of a program that can grade nothing."""


def choose_part(values: Sequence[Any], *, is_solution: bool) -> str:
    """ "all", "after_hashes" or "last_boxed", by values of the first rows.

    is_solution: the column is one of worked solutions; boxes in some of its rows are enough.
    """
    texts = [value for value in values if isinstance(value, str) and value.strip()]
    if texts and all(_HASHES in text for text in texts):
        return "after_hashes"
    boxed = sum(_last_box(text) is not None for text in texts)
    if texts and (boxed == len(texts) or (is_solution and boxed)):
        return "last_boxed"
    return "all"


def take_part(value: Any, part: str) -> Any:
    """The answer that a value holds. Raises NoAnswer."""
    if part == "all" or not isinstance(value, str):
        return value
    if part == "after_hashes":
        _, mark, answer = value.rpartition(_HASHES)
        # GSM8K groups digits: 1,000 is no list of two numbers.
        answer = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", answer.strip())
        if not mark or not answer:
            raise NoAnswer(f'there is no answer after "{_HASHES}"')
        return answer
    answer = _last_box(value)
    if not answer:
        raise NoAnswer("there is no \\boxed{} with an answer")
    return answer


def _last_box(text: str) -> str | None:
    """What the last box holds; None where there is none, or its braces do not close."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    last = boxes[-1]
    if last[1] is not None:
        return last[1]
    depth = 0
    # An escaped brace is a sign of the answer, as in \boxed{\{1, 2\}}.
    for brace in _BRACE.finditer(text, last.end()):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[last.end() + 1 : brace.start()].strip()
    return None


def entry_of(tests: Any) -> str:
    """Our `entry` for tests as data sets write them; "" for none. Raises BadTests.

    Known: the JSON of an entry; {"inputs", "outputs"} with an optional "fn_name" (APPS, TACO); a
    list of {"input", "output"} (LiveCodeBench, DeepCoder), those of standard input alone.
    """
    if isinstance(tests, str):
        if not tests.strip():
            return ""
        try:
            tests = json.loads(tests)
        except ValueError as error:
            raise BadTests(f"the tests are no JSON: {error}") from error
    if isinstance(tests, dict) and {"cases", "unit_tests"} & tests.keys():
        return json.dumps(tests)
    if isinstance(tests, dict) and {"inputs", "outputs"} <= tests.keys():
        return _of_columns(tests)
    if isinstance(tests, list) and tests and all(isinstance(one, dict) for one in tests):
        if any(one.get("testtype", "stdin") != "stdin" or "fn_name" in one for one in tests):
            raise BadTests("tests that call a function need an entry with its entry_point")
        if all({"input", "output"} <= one.keys() for one in tests):
            cases = [{"stdin": one["input"], "stdout": one["output"]} for one in tests]
            return json.dumps({"cases": cases})
    raise BadTests(
        "the tests have no form that is known: an entry with cases or unit_tests, {inputs, "
        "outputs}, or a list of {input, output}"
    )


def _of_columns(tests: dict[str, Any]) -> str:
    inputs, outputs = tests["inputs"], tests["outputs"]
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise BadTests("inputs and outputs of the tests are no lists")
    if len(inputs) != len(outputs):
        raise BadTests(f"the tests have {len(inputs)} inputs but {len(outputs)} outputs")
    name = tests.get("fn_name")
    if not name:
        cases = [
            {"stdin": _lines(one), "stdout": _lines(other)}
            for one, other in zip(inputs, outputs, strict=True)
        ]
        return json.dumps({"cases": cases})
    cases = [
        {"stdin": "\n".join(map(json.dumps, one)), "stdout": json.dumps(_result(other))}
        for one, other in zip(inputs, outputs, strict=True)
    ]
    return json.dumps({"cases": cases, "entry_point": name, "language": "python"})


def _lines(value: Any) -> str:
    """Standard input or output: a text, or the list of its lines."""
    return value if isinstance(value, str) else "\n".join(map(str, value))


def _result(value: Any) -> Any:
    """APPS puts what a call returns into a list of one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value
