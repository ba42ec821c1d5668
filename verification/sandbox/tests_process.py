"""The tests' process: runs the unit tests of a prompt and reports what ran.

Runs inside the sandbox, in a child of `server.py`. The tests do not know the report's file
(JSON lines). The exit code says nothing, because tests may exit with any code.
"""

import ast
import builtins
import functools
import json
import os
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from verification.sandbox import package_values
from verification.sandbox.call_proxy import SolutionGone, new_module
from verification.sandbox.link import Link, SolutionModule
from verification.sandbox.not_a_number import SizeComparisons, names_infinity, names_nan
from verification.sandbox.remote_objects import UNIT_TESTS_FILE
from verification.sandbox.solution_process import ENTRY, MODULE
from verification.sandbox.stand_ins import (
    Capture,
    Skipped,
    argument_names,
    autouse_names,
    find_fixtures,
    is_skipped,
    make_pytest,
    runs_of,
    used_fixtures,
    with_inner,
)

_end_process = os._exit
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def run_tests(job_json: bytes, connection: int, report: int) -> None:
    """Run the tests of a job, write the report, end the process."""
    job = json.loads(job_json)

    def write(facts: dict[str, Any]) -> None:
        os.write(report, json.dumps(facts).encode() + b"\n")

    link = Link(connection, lambda: write({"is_asked": True}))
    run = TestRun(job, link)
    ended_by, message = "", ""
    try:
        run.run_all()
    except SolutionGone as error:
        ended_by, message = "gone", str(error)
    except AssertionError as error:
        ended_by, message = "assertion", _text_of(error)
    except BaseException as error:  # noqa: BLE001 the report names it
        ended_by, message = "error", f"{type(error).__name__}: {_text_of(error)}"
    write(
        {
            "is_asked": link.questions > 0,
            "is_complete": True,
            "tests_run": run.tests_run,
            "calls": link.calls,
            "is_gone": link.is_gone,
            "has_failed_inside": link.has_failed_inside,
            "ended_by": ended_by,
            # A lone surrogate of the solution's text is no JSON for the reader of the report.
            "message": message[:500].encode("utf-8", "replace").decode(),
        }
    )
    _end_process(0)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:  # noqa: BLE001 the solution may define the text
        return f"no text: {type(second).__name__}"


class EarlyEnd(Exception):
    """The tests ended before all checks ran, or with a failing exit code."""


class TestRun:
    """One run of a prompt's tests."""

    def __init__(self, job: dict[str, Any], link: Link) -> None:
        self._job = job
        self._link = link
        link.reading_lines = frozenset(job["reading_lines"])
        self.tests_run = 0
        self._tree = _without_stubs(ast.parse(job["source"], UNIT_TESTS_FILE), job["replaced"])
        link.takes_nan = names_nan(job["source"], self._tree)
        path = job["entry_point"]
        name = (path.rpartition(".")[2] or path).removesuffix("()")
        link.knows_classes = name[:1].isupper()
        self._candidate = link.make_remote(
            ENTRY, "callable", name, ["__call__"], [["solution", name]], None
        )
        self._module = new_module("__main__")
        self._namespace = self._module.__dict__
        self._shared = Shared({}, [])
        link.namespace = self._namespace
        self._own = {name: self._candidate, "candidate": self._candidate}

    def run_all(self) -> None:
        """Run the module, its functions and classes; raises the exception that ends them."""
        self._prepare()
        code = compile(self._tree, UNIT_TESTS_FILE, "exec")
        self._count(lambda: exec(code, self._namespace), self._job["has_module_tests"])
        self._namespace.update({name: self._candidate for name in self._job["replaced"]})
        fixtures = find_fixtures(self._namespace.items())
        # unittest calls setUpModule itself, for its classes.
        self._call_hook("setUpModule" if self._job["functions"] else "", self._module)
        self._call_hook("setup_module", self._module)
        for name in self._job["functions"]:
            self._run_function(self._namespace[name], fixtures)
        for value in list(self._namespace.values()):
            is_class = issubclass(type(value), type) and value.__module__ == "__main__"
            if is_class and not is_skipped(value):
                self._run_class(value, fixtures)
        _end_all(self._shared.ends)
        self._call_hook("teardown_module", self._module)

    def _prepare(self) -> None:
        """Set up the modules and names that the tests expect."""
        for name in self._job["names"]:
            self._own[name] = self._link.look_up(name)
        builtin = dict(builtins.__dict__, eval=self._eval)
        if not self._link.takes_nan and not names_infinity(self._job["source"]):
            comparisons = SizeComparisons(lambda: self._link.questions > 0)
            comparisons.check(self._tree)
            builtin |= comparisons.names()
            if "numpy" in self._job["imports"]:
                comparisons.watch_numpy()
        self._namespace.update(self._own, __builtins__=builtin, __file__=UNIT_TESTS_FILE)
        for name in self._job["solution_modules"]:
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                path = ".".join(parts[:end])
                sys.modules[path] = SolutionModule(path, self._link, self._own)
                if end > 1:
                    parent = sys.modules[".".join(parts[: end - 1])]
                    parent.__dict__[parts[end - 1]] = sys.modules[path]
        sys.modules["pytest"] = make_pytest()
        sys.argv = [UNIT_TESTS_FILE]
        os._exit = sys.exit
        if "sympy" in self._job["imports"]:
            texts = (n.value for n in ast.walk(self._tree) if isinstance(n, ast.Constant))
            package_values.parse_only(frozenset(t for t in texts if isinstance(t, str)))
        if "unittest" in self._job["imports"]:
            import unittest

            # TestRun runs and counts all test cases; unittest.main would only end the process.
            done = types.SimpleNamespace(wasSuccessful=lambda: True, failures=[], errors=[])
            unittest.main = lambda *a, **k: types.SimpleNamespace(result=done)

    def _eval(self, text: Any, *scopes: Any) -> Any:
        """The tests' `eval`: the text may be the solution's, so the solution's process runs it."""
        variables: dict[str, Any] = {"candidate": self._candidate}
        for scope in scopes:
            # The tests' own names would show the solution the expected results.
            if scope and scope is not self._namespace and scope is not sys._getframe(1).f_locals:
                variables |= {name: scope[name] for name in scope if name != "__builtins__"}
        return self._link.ask("eval", MODULE, text, variables)

    def _count(self, action: Callable[[], Any], is_test: bool = True) -> None:
        """Run a part of the tests to its end."""
        try:
            action()
        except Skipped:
            return
        except SystemExit as end:
            lines = list(_lines_of(end.__traceback__))
            if end.code or checks_remain(self._tree, lines, self._job["callees"]):
                raise EarlyEnd(f"exit with {end.code!r} in line {lines[-1:]}") from end
        self.tests_run += is_test

    def _run_function(self, function: Any, fixtures: dict[str, Any]) -> None:
        if is_skipped(function):
            return
        for given, parameters in runs_of(function, fixtures):
            self._call_hook("setup_function", function)
            scene = Scene(self._candidate, fixtures, parameters, self._shared)
            self._count(functools.partial(scene.run, function, given))
            self._call_hook("teardown_function", function)

    def _call_hook(self, name: str, subject: Any) -> None:
        """Call a function that pytest calls by its name, with the module or test if it asks."""
        hook = self._namespace.get(name)
        if type(hook) is types.FunctionType:
            _call_with(hook, subject)

    def _run_class(self, kind: type, fixtures: dict[str, Any]) -> None:
        unittest = sys.modules.get("unittest")
        if unittest is not None and issubclass(kind, unittest.TestCase):
            self._run_test_case(unittest, kind)
        elif kind.__name__.startswith("Test") and kind.__init__ is object.__init__:
            tests = {name: getattr(kind, name) for name in dir(kind) if name.startswith("test")}
            names = [name for name, one in tests.items() if callable(one) and not is_skipped(one)]
            if names:
                _call_class_hook(kind, "setup_class")
            for name in names:
                self._run_method(kind, name, fixtures)
            if names:
                _call_class_hook(kind, "teardown_class")

    def _run_method(self, kind: type, name: str, fixtures: dict[str, Any]) -> None:
        own = find_fixtures((one, getattr(kind, one)) for one in dir(kind))
        for given, parameters in runs_of(getattr(kind(), name), fixtures | own):
            instance = kind()
            bound = {one: getattr(instance, one) for one in own}
            method = getattr(instance, name)
            for before in ("setup_method", "setup"):
                _call_with(getattr(instance, before, None), method)
            scene = Scene(self._candidate, fixtures | bound, parameters, self._shared)
            self._count(functools.partial(scene.run, method, given))
            _call_with(getattr(instance, "teardown_method", None), method)

    def _run_test_case(self, unittest: Any, kind: type) -> None:
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(kind).run(result)
        if self._link.is_gone:
            raise SolutionGone("the solution has ended")
        wrong = [*result.failures, *result.unexpectedSuccesses]
        if wrong:
            raise AssertionError(str(wrong[0])[-500:])
        if result.errors:
            raise EarlyEnd(str(result.errors[0][1])[-400:])
        self.tests_run += result.testsRun - len(result.skipped)


def _call_with(hook: Any, subject: Any) -> None:
    """Call a hook, if there is one, with its subject if it asks."""
    if hook is not None:
        hook(*[subject][: len(argument_names(hook))])


def _call_class_hook(kind: type, name: str) -> None:
    """Call `setup_class` or its like, which may lack the decorator, with the class."""
    hook = getattr(kind, name, None)
    if hook is not None:
        types.MethodType(getattr(hook, "__func__", hook), kind)()


class Shared(NamedTuple):
    """Fixtures that several tests share."""

    made: dict[Any, Any]
    ends: list[types.GeneratorType]


def _end_all(generators: list[types.GeneratorType]) -> None:
    """Run the rest of fixtures, the last one first."""
    for end in reversed(generators):
        for _ in end:
            pass


class Scene:
    """One run of a test; makes each fixture of its own once and ends it after the test."""

    def __init__(
        self, candidate: Any, fixtures: dict[str, Any], rows: dict[str, Any], shared: Shared
    ) -> None:
        self._candidate = candidate
        self._fixtures = fixtures
        self._rows = rows
        """Parameters by fixture."""
        self._own, self._shared = Shared({}, []), shared
        self._owner: type | None = None
        """The test's class."""
        self._capture: Capture | None = None

    def run(self, test: Any, given: dict[str, Any]) -> None:
        """Run a test. Raises AssertionError when the test fails."""
        self._owner = type(test.__self__) if type(test) is types.MethodType else None
        for name in (*autouse_names(self._fixtures), *used_fixtures(test)):
            self._value_of(name)
        value = self._call(test, given)
        _end_all(self._own.ends)
        if self._capture is not None:
            self._capture.end()
        if value is False:
            # A check may return its result instead of asserting it.
            raise AssertionError(f"{getattr(test, '__name__', 'a test')} returned False")

    def _value_of(self, name: str) -> Any:
        """Value of a fixture; else the candidate."""
        if name in ("capsys", "capfd") and name not in self._fixtures:
            self._capture = self._capture or Capture()
            return self._capture
        if name not in self._fixtures:
            return self._candidate
        key, kept = self._place_of(name)
        if key not in kept.made:
            request = types.SimpleNamespace(param=self._rows.get(name))
            value = self._call(self._fixtures[name], {"request": request})
            if isinstance(value, types.GeneratorType):
                kept.ends.append(value)
                value = next(value)
            kept.made[key] = value
        return kept.made[key]

    def _place_of(self, name: str) -> tuple[Any, Shared]:
        """Where the value of a fixture is kept, by its scope."""
        fixture = self._fixtures[name]
        owner = self._owner if fixture.scope == "class" else None
        if fixture.scope == "function" or (fixture.scope == "class" and owner is None):
            return name, self._own
        # It is made anew for other parameters of its own and of the fixtures that it uses.
        inner = with_inner([name], self._fixtures)
        rows = tuple(id(self._rows[one]) for one in inner if one in self._rows)
        return (getattr(fixture, "__func__", fixture), owner, rows), self._shared

    def _call(self, function: Any, given: dict[str, Any]) -> Any:
        """Call a function of the tests with fixtures, or else the candidate, as arguments."""
        names = argument_names(function)
        arguments = {name: given[name] if name in given else self._value_of(name) for name in names}
        if not hasattr(function, "is_fixture"):
            arguments |= given
        value = function(**arguments)
        if isinstance(value, types.CoroutineType):
            import asyncio

            value = asyncio.run(value)
        return value


def _without_stubs(tree: ast.Module, replaced: list[str]) -> ast.Module:
    """The tests without stubs of the solution, which prompts contain."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    tree.body = [s for s in tree.body if not isinstance(s, kinds) or s.name not in replaced]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            node.level, node.module = 0, node.module or "solution"
    return tree


def _lines_of(trace: types.TracebackType | None) -> Iterable[int]:
    """Lines of the tests in a traceback, outermost first."""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == UNIT_TESTS_FILE:
            yield trace.tb_lineno
        trace = trace.tb_next


def checks_remain(tree: ast.Module, lines: list[int], callees: list[str]) -> bool:
    """Whether checks remain after the lines that ran."""
    return any(_remain_behind(tree.body, line, callees) for line in lines)


def _remain_behind(body: list[ast.stmt], line: int, callees: list[str]) -> bool:
    for position, statement in enumerate(body):
        if not statement.lineno <= line <= (statement.end_lineno or line):
            continue
        # A definition around the line was called from another line.
        is_scope = isinstance(statement, (*_SCOPES, ast.ClassDef))
        if not is_scope and any(_holds_check(later, callees) for later in body[position + 1 :]):
            return True
        if isinstance(statement, ast.For | ast.While | ast.AsyncFor):
            if any(_holds_check(inner, callees) for inner in statement.body):
                return True
        inner = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
        inner += [handler.body for handler in getattr(statement, "handlers", [])]
        return any(_remain_behind(part, line, callees) for part in inner)
    return False


def _holds_check(statement: ast.stmt, callees: list[str]) -> bool:
    if isinstance(statement, (*_SCOPES, ast.ClassDef)):
        return False
    for node in ast.walk(statement):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", None) or getattr(node.func, "attr", "")
            if name in callees or name.startswith(("test", "check", "assert")):
                return True
    return False
