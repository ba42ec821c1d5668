"""Unit tests of programs in the forms of data sets: modules of pytest, lists of assertions.

Pure. Python is parsed and never run. Used by `test_forms.py`.
"""

import ast
import builtins
import re
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.data.tables.plain_values import BadTests, read_json, read_literal
from verification.code.problem import PACKAGES

_SOLUTION = "solution"
"""Module of the program in tests of KodCode."""
_IMPORT = re.compile(r"^[ \t]*(?:import|from)[ \t]+(\w+)", re.M)


def test_module(tests: Any, beside: Mapping[str, Any]) -> dict[str, Any] | None:
    """KodCode: functions of pytest. HumanEval: check(candidate), with a prompt it may need."""
    if not isinstance(tests, str):
        return None
    names = _given_names(beside) or _imported_names(tests) or _called_names(tests)
    if not names:
        raise BadTests("the tests name no function that they call")
    prompt = beside.get("prompt")
    if isinstance(prompt, str) and f"def {names[0]}(" in prompt and "def check(" in tests:
        # Some tests call a function that the prompt defines.
        return _unit_tests(f"{prompt}    pass\n{tests}", names, has_numpy=False)
    return _unit_tests(tests, names)


def module_with_name(tests: Any, beside: Mapping[str, Any]) -> dict[str, Any] | None:
    """LeetCode's problems in Skywork-OR1: {entry_point, test_code}."""
    if not isinstance(tests, dict) or not {"entry_point", "test_code"} <= tests.keys():
        return None
    return _unit_tests(str(tests["test_code"]), [str(tests["entry_point"])])


def assert_lines(tests: Any, beside: Mapping[str, Any]) -> dict[str, Any] | None:
    """AceCode and MBPP: a list of lines with an assertion each, and lines before them."""
    if not isinstance(tests, list) or not all(isinstance(line, str) for line in tests):
        return None
    if not any(line.lstrip().startswith("assert") for line in tests):
        return None
    imports = beside.get("test_imports")
    setup = [str(beside.get("test_setup_code") or "")]
    setup += map(str, imports) if isinstance(imports, list) else []
    parts = [*filter(None, setup), *tests]
    source = "\n".join(parts)
    if not is_python(source):
        # Some sets indent an assertion; lines of one module must keep their indents.
        source = "\n".join(textwrap.dedent(part).strip() for part in parts)
    names = _given_names(beside) or _imported_names(source) or _called_names(source)
    if not names:
        raise BadTests("the assertions call no function in common")
    return _unit_tests(source, names)


def _unit_tests(source: str, names: list[str], *, has_numpy: bool = True) -> dict[str, Any]:
    entry: dict[str, Any] = {"unit_tests": source, "entry_point": names[0]}
    imported = set(_IMPORT.findall(source)) | ({"numpy"} if has_numpy else set())
    packages = sorted(imported & PACKAGES.keys())
    entry |= {"packages": packages} if packages else {}
    return entry | ({"solution_names": names[1:]} if names[1:] else {})


def _given_names(beside: Mapping[str, Any]) -> list[str]:
    """Functions that further columns name, the first one first."""
    for key in ("entry_point", "test_entry_point"):
        if beside.get(key):
            return [str(beside[key])]
    told = beside.get("test_info")
    if isinstance(told, str) and told.strip():
        try:
            told = read_json(told)
        except ValueError as error:
            told = read_literal(told, f"test_info is no JSON: {error}")
    told = [told] if isinstance(told, dict) else told
    rows = [row for row in told if isinstance(row, dict)] if isinstance(told, list) else []
    return [str(row["function_name"]) for row in rows if row.get("function_name")]


def _imported_names(source: str) -> list[str]:
    """Names that the tests import from the solution."""
    nodes = (node for node in ast.walk(_parse(source)) if isinstance(node, ast.ImportFrom))
    found = (alias.name for node in nodes if node.module == _SOLUTION for alias in node.names)
    return [name for name in dict.fromkeys(found) if name != "*"]


def _called_names(source: str) -> list[str]:
    """What the tests call and do not define: what most assertions call, then the rest.

    Some tests of MBPP and AceCode need a class of the program, such as Node. [] for none.
    """
    tree = _parse(source)
    known = set(dir(builtins)) | set(_defined_names(tree))

    def called_in(part: ast.AST) -> dict[str, None]:
        # The outermost call comes first.
        calls = (node.func for node in ast.walk(part) if isinstance(node, ast.Call))
        names = (func.id for func in calls if isinstance(func, ast.Name))
        return dict.fromkeys(name for name in names if name not in known)

    counts: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            counts.update(list(called_in(node.test)))
    first = [name for name, _ in counts.most_common(1)]
    return [*first, *(name for name in called_in(tree) if first and name != first[0])]


def _defined_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def is_python(text: str) -> bool:
    """Whether a text is a Python module."""
    try:
        _parse(text)
    except BadTests:
        return False
    return True


def _parse(source: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadTests(f"the tests are neither JSON nor Python: {error}") from error
