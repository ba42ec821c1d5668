"""Tests of programs in the forms of data sets: the table TEST_FORMS.

Pure. To add a form, add a function to TEST_FORMS.
"""

import json
from collections.abc import Callable, Iterable
from typing import Any

from megatron_rl.data.tables.data_sets import NoAnswer


class BadTests(NoAnswer):
    """Tests of a program that can grade nothing."""


def tests_in_answer(answer: Any) -> str | None:
    """The `entry` for an answer that holds a program's tests; None for any other answer.

    Eurus-2-RL and blends of NeMo-Gym have the tests of code rows where other rows have the answer.
    Raises BadTests for tests that can grade nothing.
    """
    if isinstance(answer, str):
        if not answer.lstrip().startswith(("{", "[")):
            return None
        try:
            answer = json.loads(answer)
        except ValueError:
            return None
    is_known = any(read(answer) is not None for read in TEST_FORMS.values())
    return entry_of(answer) if is_known else None


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
