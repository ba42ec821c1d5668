"""Tests of programs in the forms of data sets: the table TEST_FORMS.

Pure. Reads a row's columns of tests into our `entry`, and says in the question what the tests need.
To add a form, add a function to TEST_FORMS; `unit_test_forms.py` has those of unit tests.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import msgspec

from megatron_rl.data.tables import unit_test_forms
from megatron_rl.data.tables.plain_values import (
    BadTests,
    LongInteger,
    as_json,
    read_json,
    read_literal,
    unpack,
)
from megatron_rl.data.tables.where import decoded

Entry = dict[str, Any]
Beside = Mapping[str, Any]
"""A row's further columns of tests, by name."""
_NOTHING: Beside = MappingProxyType({})
_MORE_CASES = ("private_tests", "generated_tests", "private_test_cases")
_FILES = ("input_file", "output_file")
_NUMBERS = {"comparison": "float", "tolerance": 1e-5}
"""numpy.allclose in the checkers of APPS, TACO, PRIME and DeepCoder."""
_DISTANCE = {"comparison": "distance", "tolerance": 1e-5}
"""The checker of CodeContests."""
_EXACT_NUMBERS = {"comparison": "number"}
"""The checker of LiveCodeBench, with Python's Decimal."""
_PYTHON_TESTS = re.compile(r"\A\s*assert |^def (?:test_|check\()", re.M)
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_SECONDS = {"ms": 1e-3, "milli": 1e-3, "min": 60.0}
_BYTES = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "b": 1}


class _Named(msgspec.Struct, frozen=True):
    """Fields of an entry that the question depends on."""

    entry_point: str = ""
    solution_names: list[str] = []
    unit_tests: str | list[str] = ""


def entry_of(tests: Any, beside: Beside = _NOTHING) -> str:
    """Our `entry` for tests in one of TEST_FORMS, also as JSON; "" for none. Raises BadTests."""
    try:
        tests = _all_tests(tests, beside)
        if tests in (None, "", [], {}):
            return ""
        _check_files(beside)
        for read in TEST_FORMS.values():
            entry = read(tests, beside)
            if entry is not None:
                return json.dumps(entry | _limits(beside))
    except RecursionError as error:
        raise BadTests("the tests nest too deeply") from error
    raise BadTests(f"the tests have no form that is known: {', '.join(TEST_FORMS)}")


def tests_in_answer(answer: Any) -> str | None:
    """The `entry` for tests in the place of an answer; None for the answer to a problem.

    Eurus-2-RL, Skywork-OR1 and blends of NeMo-Gym write the tests of a row of code as its answer.
    Raises BadTests for an object in no known form.
    """
    if isinstance(answer, str):
        if _PYTHON_TESTS.search(answer):
            return entry_of(answer)
        if answer.lstrip()[:1] not in ("{", "["):
            return None
        try:
            answer = read_json(answer)
        except BadTests:
            raise
        except (ValueError, RecursionError):
            return None
    is_list = isinstance(answer, list) and bool(answer)
    is_tests = isinstance(answer, dict) and bool(answer)
    is_tests |= is_list and all(isinstance(one, dict) for one in answer)
    is_tests |= is_list and all(isinstance(x, str) and x.startswith("assert ") for x in answer)
    try:
        return entry_of(answer) if is_tests else None
    except BadTests as error:
        keys = answer.keys() if isinstance(answer, dict) else answer[0]
        raise BadTests(
            f"the answer is an object ({', '.join(map(str, keys))}), which is neither a text nor "
            f"usable tests: name its part by prompts.columns.answer; {error}"
        ) from error


# --- the question ---------------------------------------------------------------------------------

_COMPLETE = (
    "Complete the Python function {name}. Write the whole program: its imports, and every function "
    "that it needs.\n\n```python\n{prompt}\n```"
)


def with_demands(question: str, entry: str, starter: Any = "") -> str:
    """The question, with what its tests need and it does not say: starter code, a name."""
    tests = msgspec.json.decode(entry, type=_Named)
    name = tests.entry_point.rpartition(".")[2]
    is_started = name and re.search(rf"^def {re.escape(name)}\(", question, re.M)
    if is_started and unit_test_forms.is_python(f"{question.rstrip()}\n    pass\n"):
        return _COMPLETE.format(name=name, prompt=question.rstrip())
    if isinstance(starter, str) and starter.strip() and starter.strip() not in question:
        question = (
            f"{question.rstrip()}\n\nStart from this code:\n\n```python\n{starter.strip()}\n```"
        )
    called = [one for one in (tests.entry_point, *tests.solution_names) if one]
    unsaid = [f"`{one}`" for one in called if not _says(question, one.rpartition(".")[2])]
    if unsaid:
        question = f"{question.rstrip()}\n\nThe tests call {' and '.join(unsaid)}"
        lines = [tests.unit_tests] if isinstance(tests.unit_tests, str) else tests.unit_tests
        example = next(
            (one for one in "\n".join(lines).split("\n") if one.startswith("assert")), ""
        )
        question += f", as in `{example}`." if 0 < len(example) < 200 else "."
    return question


def _says(question: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", question) is not None


# --- values ---------------------------------------------------------------------------------------


def _decoded(tests: Any) -> Any:
    """The value of JSON or packed text; other text as it is. Raises BadTests for broken JSON."""
    if not isinstance(tests, str) or not tests.strip():
        return None if isinstance(tests, str) else tests
    try:
        found = read_json(tests)
        return _decoded(found) if isinstance(found, str) else found
    except BadTests:
        raise
    except ValueError as error:
        if tests.lstrip().startswith(("{", "[")):
            return read_literal(tests, f"the tests are no JSON: {error}")
    # Without spaces or line ends it is no Python.
    return _decoded(unpack(tests)) if len(tests.split(maxsplit=1)) == 1 else tests


def _all_tests(tests: Any, beside: Beside) -> Any:
    """The decoded tests; with lists of further tests, one list of all cases."""
    tests = _decoded(tests)
    if not any(name in beside for name in _MORE_CASES):
        is_pair = isinstance(tests, dict) and {"input", "output"} <= tests.keys()
        return _as_list(tests) if is_pair else tests
    parts = [tests, *(_decoded(beside.get(name)) for name in _MORE_CASES)]
    return [case for part in parts if part for case in _as_list(part)]


def _as_list(part: Any) -> list[Any]:
    """Cases as a list of {input, output}; Parquet also has {input: [...], output: [...]}."""
    if isinstance(part, list):
        return part
    if isinstance(part, dict) and {"input", "output"} <= part.keys():
        given, wanted = part["input"], part["output"]
        if isinstance(given, list) and isinstance(wanted, list) and len(given) == len(wanted):
            return [{"input": a, "output": b} for a, b in zip(given, wanted, strict=True)]
    raise BadTests("a column of tests is neither a list of {input, output} nor a pair of lists")


def _check_files(beside: Beside) -> None:
    for key in _FILES:
        if beside.get(key):
            raise BadTests(
                f"{key} = {beside[key]!r}: programs read standard input and write standard output, "
                "no files"
            )


def _limits(beside: Beside) -> Entry:
    """The problem's own limits; {} without any that can be read."""
    about = decoded(beside.get("metadata"))
    known = {**(about if isinstance(about, dict) else {}), **beside}
    found: Entry = {}
    seconds = _seconds(known.get("time_limit"))
    if seconds:
        found["time_s"] = seconds
    size = _amount(known.get("memory_limit_bytes") or known.get("memory_limit"), _BYTES)
    # A plain number of megabytes would be no room for any program in bytes.
    size = size * (1 << 20) if size < 1 << 14 else size
    if size:
        found["memory_bytes"] = int(size)
    return found


def _seconds(limit: Any) -> float:
    """Seconds of a number, text, {seconds, nanos} or duration; 0 for none."""
    if isinstance(limit, timedelta):
        return limit.total_seconds()
    if isinstance(limit, dict):
        parts = limit.get("seconds"), limit.get("nanos")
        return _amount(parts[0], {}) + _amount(parts[1], {}) / 1e9
    return _amount(limit, _SECONDS)


def _amount(value: Any, units: Mapping[str, float]) -> float:
    """A number, or the number at the start of a text times its unit; 0 for anything else."""
    found = _AMOUNT.match(str(value)[:40]) if isinstance(value, int | float | str) else None
    if found is None:
        return 0.0
    unit = found[2].lower()
    return float(found[1]) * next((f for start, f in units.items() if unit.startswith(start)), 1)


# --- cases ----------------------------------------------------------------------------------------


def _own_entry(tests: Any, beside: Beside) -> Entry | None:
    return tests if isinstance(tests, dict) and {"cases", "unit_tests"} & tests.keys() else None


def _columns_of_cases(tests: Any, beside: Beside) -> Entry | None:
    """APPS, TACO, PRIME: programs, or with "fn_name" a function."""
    if not isinstance(tests, dict) or not {"inputs", "outputs"} <= tests.keys():
        return None
    inputs, outputs = tests["inputs"], tests["outputs"]
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise BadTests("inputs and outputs of the tests are no lists")
    if len(inputs) != len(outputs):
        raise BadTests(f"the tests have {len(inputs)} inputs but {len(outputs)} outputs")
    pairs = list(zip(inputs, outputs, strict=True))
    name = tests.get("fn_name")
    return (_calls(name, pairs, are_lines=True) if name else _programs(pairs)) | _NUMBERS


def _verification_info(tests: Any, beside: Beside) -> Entry | None:
    """SYNTHETIC-1 and open-r1: {language, test_cases}, whose checker compares text."""
    if not isinstance(tests, dict) or "test_cases" not in tests:
        return None
    cases = _decoded(tests["test_cases"])
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
        raise BadTests("test_cases are no list of {input, output}")
    entry = {**_list_entry(cases, beside), "comparison": "whitespace", "may_be_wrapped": False}
    return entry | {"language": str(tests.get("language") or "")}


def _list_of_cases(tests: Any, beside: Beside) -> Entry | None:
    """LiveCodeBench, DeepCoder, CodeContests: a list of {input, output}."""
    if not (isinstance(tests, list) and tests and all(isinstance(one, dict) for one in tests)):
        return None
    if not all({"input", "output"} <= one.keys() for one in tests):
        return None
    return _list_entry(tests, beside)


def _list_entry(cases: list[dict[str, Any]], beside: Beside) -> Entry:
    names = {_name_of(case, beside) for case in cases}
    if len(names) > 1:
        raise BadTests(f"the tests mix programs and calls, or call {', '.join(sorted(names))}")
    pairs = [(case.get("input"), case.get("output")) for case in cases]
    is_live = all("testtype" in case for case in cases)
    comparison = _EXACT_NUMBERS if is_live else _NUMBERS
    if "generated_tests" in beside or "private_tests" in beside:
        comparison = _DISTANCE
    [name] = names or {""}
    return (_calls(name, pairs, are_lines=is_live) if name else _programs(pairs)) | comparison


def _name_of(case: dict[str, Any], beside: Beside) -> str:
    """The function that a case calls; "" for a program. Raises BadTests."""
    kind = case.get("testtype") or case.get("type") or ""
    if kind in ("stdin", "stdin_stdout"):
        return ""
    if kind not in ("", "functional", "function_call"):
        raise BadTests(f"a test has the type {kind!r}, expected programs or calls of a function")
    name = case.get("fn_name") or ""
    for about in (case.get("metadata"), beside.get("metadata")):
        about = decoded(about)
        name = name or (about.get("func_name") if isinstance(about, dict) else "") or ""
    if kind and not name:
        raise BadTests("the tests call a function, and neither fn_name nor metadata names it")
    return str(name)


def _programs(pairs: Iterable[tuple[Any, Any]]) -> Entry:
    cases = [{"stdin": _lines(given), "stdout": _lines(wanted)} for given, wanted in pairs]
    return {"cases": cases, "packages": ["numpy"]}


def _calls(name: Any, pairs: Iterable[tuple[Any, Any]], *, are_lines: bool) -> Entry:
    """Calls of a function, with lists or texts of arguments.

    are_lines: a text is JSON, a line for each argument; else the literal of a list, and the result
    is a literal or plain text.
    """
    cases, wrapped = [], []
    for given, wanted in pairs:
        is_text = isinstance(given, str)
        if is_text and not are_lines:
            given = _literal(given)
            wanted = _literal(wanted) if isinstance(wanted, str) else wanted
        if isinstance(given, list):
            stdin, stdout = "\n".join(map(as_json, given)), as_json(wanted)
        elif is_text and are_lines:
            stdin, stdout = given, wanted if isinstance(wanted, str) else as_json(wanted)
        else:
            raise BadTests(f"a call's arguments are {given!r:.80}, expected a list")
        cases.append({"stdin": stdin, "stdout": stdout})
        wrapped.append(not is_text and isinstance(wanted, list) and len(wanted) == 1)
    entry = {"cases": cases, "entry_point": str(name), "language": "python", "packages": ["numpy"]}
    # Their checkers accept a result with and without the brackets.
    return entry | {"may_be_wrapped": True} if all(wrapped) and cases else entry


def _literal(text: str) -> Any:
    """The value of a text in JSON or Python; the text itself if it is neither."""
    try:
        return read_json(text)
    except ValueError:
        pass
    try:
        return read_literal(text, "no literal")
    except BadTests:
        return text


def _lines(value: Any) -> str:
    """Standard input or output: a text, or the list of its lines."""
    if isinstance(value, list):
        return "\n".join(map(_lines, value))
    if isinstance(value, str | int | float | LongInteger):
        return str(value)
    raise BadTests(f"an input or output of the tests is {value!r:.80}, expected text")


TEST_FORMS: dict[str, Callable[[Any, Beside], Entry | None]] = {
    "an entry with cases or unit_tests": _own_entry,
    "{inputs, outputs}": _columns_of_cases,
    "{language, test_cases}": _verification_info,
    "{entry_point, test_code}": unit_test_forms.module_with_name,
    "a list of {input, output}": _list_of_cases,
    "a list of assertions": unit_test_forms.assert_lines,
    "a module of tests": unit_test_forms.test_module,
}
"""Each gives the entry, or None for tests in another form."""
