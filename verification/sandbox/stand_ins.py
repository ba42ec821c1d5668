"""Replacement for `pytest`, which the sandbox does not have.

Runs inside the sandbox, in the tests' process. It has the names in NAMES; tests that use others are
refused when their prompts are loaded.
"""

import contextlib
import io
import itertools
import math
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

NAMES = frozenset("approx fail fixture main mark param raises skip".split())
OBEYED_MARKS = frozenset("parametrize skip usefixtures".split())
MARKS = OBEYED_MARKS | frozenset("asyncio timeout slow".split())


class Skipped(Exception):
    """A test skipped itself."""


class Approximately:
    """Equal to numbers, and lists and dicts of them, within a tolerance."""

    __array_ufunc__ = None
    __hash__ = None

    def __init__(
        self,
        expected: Any,
        rel: float | None = None,
        abs: float | None = None,
        nan_ok: bool = False,
    ) -> None:
        self._expected = expected
        self._relative = 1e-6 if rel is None and abs is None else rel or 0.0
        self._absolute = 1e-12 if abs is None else abs
        self._accepts_nan = nan_ok

    def __eq__(self, given: object) -> bool:
        return self._is_near(given, self._expected)

    def _is_near(self, given: Any, expected: Any) -> bool:
        if isinstance(expected, dict):
            return isinstance(given, dict) and given.keys() == expected.keys() and all(
                self._is_near(given[key], expected[key]) for key in expected
            )  # fmt: skip
        if isinstance(expected, list | tuple):
            return isinstance(given, list | tuple) and len(given) == len(expected) and all(
                map(self._is_near, given, expected)
            )  # fmt: skip
        if self._accepts_nan and isinstance(expected, float) and math.isnan(expected):
            return isinstance(given, float) and math.isnan(given)
        try:
            if math.isinf(expected) or given == expected:
                return bool(given == expected)
            return bool(
                abs(given - expected) <= max(self._relative * abs(expected), self._absolute)
            )
        except TypeError:
            return bool(given == expected)

    def __repr__(self) -> str:
        return f"approx({self._expected!r})"


class Raises:
    """Context that requires an exception."""

    def __init__(self, expected: Any, *call: Any, match: str | None = None, **more: Any) -> None:
        self._expected = expected
        self._match = match
        self.value: Any = None
        self.type: Any = None
        if call:
            with self:
                call[0](*call[1:], **more)

    def __enter__(self) -> "Raises":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if kind is None:
            raise AssertionError(f"did not raise {self._expected}")
        # Exceptions that would silently end the tests arrive as RuntimeError.
        names = getattr(error, "silent_names", ())
        wanted = self._expected if isinstance(self._expected, tuple) else (self._expected,)
        if not issubclass(kind, self._expected) and not any(w.__name__ in names for w in wanted):
            return False
        if self._match is not None and not re.search(self._match, str(error)):
            raise AssertionError(f"the text does not match {self._match!r}: {str(error)!r}")
        self.value, self.type = error, kind
        return True


class Parameters:
    """`pytest.param`."""

    def __init__(self, *values: Any, marks: Any = (), **more: Any) -> None:
        self.values = values
        marks = marks if isinstance(marks, list | tuple | set) else [marks]
        self.is_skipped = any(isinstance(mark, SkipMark) for mark in marks)


class SkipMark:
    """`pytest.mark.skip`, bare or with a reason: of a function, a class or a row of parameters."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if not (arguments and callable(arguments[0])):
            return self
        # unittest's own name, so that both kinds of tests honour both kinds of marks.
        arguments[0].__unittest_skip__ = True
        arguments[0].__unittest_skip_why__ = ""
        return arguments[0]


def _kept(rows: Iterable[Any]) -> list[Any]:
    """The rows without a mark that skips them."""
    return [row for row in rows if not (isinstance(row, Parameters) and row.is_skipped)]


def _mark_of(test: Any, name: str, default: Any) -> Any:
    """What a decorator of the tests left on a function or class of the tests."""
    kinds = (types.FunctionType, types.MethodType)
    # Anything else may be the solution's, which would answer as it likes.
    is_own = type(test) in kinds or issubclass(type(test), type)
    return getattr(test, name, default) if is_own else default


def _marks_of(test: Any, name: str) -> list[Any]:
    """What decorators left on a test and on its class."""
    owner = type(getattr(test, "__self__", None)) if type(test) is types.MethodType else None
    return [*_mark_of(owner, name, []), *_mark_of(test, name, [])]


def is_skipped(test: Any) -> bool:
    """Whether a mark skips a function or class."""
    return bool(_mark_of(test, "__unittest_skip__", False))


def used_fixtures(test: Any) -> list[str]:
    """Names of fixtures that `usefixtures` demands for a test or for its class."""
    return _marks_of(test, "used_fixtures")


def _cells(row: Any, count: int) -> tuple[Any, ...]:
    """Values of a row for `count` names."""
    if isinstance(row, Parameters):
        return row.values
    return tuple(row) if count > 1 else (row,)


def _parametrize(names: Any, values: Any, **more: Any) -> Callable[[Any], Any]:
    split = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)

    def decorate(function: Any) -> Any:
        cells = [_cells(row, len(split)) for row in _kept(values)]
        rows = [dict(zip(split, row, strict=True)) for row in cells]
        function.parameter_rows = [*getattr(function, "parameter_rows", []), rows]
        return function

    return decorate


def _mark(*arguments: Any, **keywords: Any) -> Any:
    is_bare = len(arguments) == 1 and callable(arguments[0]) and not keywords
    return arguments[0] if is_bare else lambda function: function


def _use_fixtures(*names: str) -> Callable[[Any], Any]:
    def decorate(test: Any) -> Any:
        test.used_fixtures = [*getattr(test, "used_fixtures", []), *names]
        return test

    return decorate


def _fixture(*arguments: Any, **keywords: Any) -> Any:
    def decorate(function: Any) -> Any:
        rows = keywords.get("params")
        function.is_fixture = True
        function.is_autouse = bool(keywords.get("autouse"))
        function.fixture_rows = None if rows is None else [_cells(row, 1)[0] for row in _kept(rows)]
        function.scope = keywords.get("scope", "function")
        return function

    return decorate(arguments[0]) if arguments and callable(arguments[0]) else decorate


def _fail(reason: str = "", **more: Any) -> None:
    raise AssertionError(reason)


def _skip(reason: str = "", **more: Any) -> None:
    raise Skipped(reason)


def make_pytest() -> types.ModuleType:
    """The module `pytest`."""
    module = types.ModuleType("pytest")
    mark = types.SimpleNamespace(**dict.fromkeys(MARKS, _mark))
    mark.parametrize, mark.usefixtures, mark.skip = _parametrize, _use_fixtures, SkipMark()
    module.__dict__.update(
        approx=Approximately, fail=_fail, fixture=_fixture, main=lambda *a, **k: 0, mark=mark,
        param=Parameters, raises=Raises, skip=_skip,
    )  # fmt: skip
    return module


class Output(NamedTuple):
    """Captured text."""

    out: str
    err: str


class Capture:
    """The fixtures `capsys` and `capfd`, for output of a test and its solution."""

    def __init__(self) -> None:
        self._before = (sys.stdout, sys.stderr)
        self._start()

    def readouterr(self) -> Output:
        """Text printed since the last call."""
        found = Output(self._texts[0].getvalue(), self._texts[1].getvalue())
        self._start()
        return found

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Suspend capturing."""
        sys.stdout, sys.stderr = self._before
        yield
        sys.stdout, sys.stderr = self._texts

    def end(self) -> None:
        """Restore the previous streams."""
        sys.stdout, sys.stderr = self._before

    def _start(self) -> None:
        self._texts = sys.stdout, sys.stderr = io.StringIO(), io.StringIO()


def argument_names(function: Any) -> list[str]:
    """Required arguments of a function."""
    code = getattr(function, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code else ()
    is_bound = getattr(function, "__self__", None) is not None
    return list(names[is_bound : len(names) - len(function.__defaults__ or ())])


def find_fixtures(names_and_values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Fixtures of a module or an instance, by name."""
    kinds = (types.FunctionType, types.MethodType)
    return {
        name: value
        for name, value in names_and_values
        if type(value) in kinds and hasattr(value, "is_fixture")
    }


def autouse_names(fixtures: dict[str, Any]) -> list[str]:
    """Names of fixtures that every test uses."""
    return [name for name, fixture in fixtures.items() if fixture.is_autouse]


def with_inner(names: Iterable[str], fixtures: dict[str, Any]) -> list[str]:
    """Names of fixtures and of the fixtures that these use in turn."""
    needed = list(dict.fromkeys(names))
    for name in needed:
        # The list grows during the loop: fixtures use other fixtures.
        found = argument_names(fixtures[name]) if name in fixtures else []
        needed += [inner for inner in found if inner not in needed]
    return needed


def runs_of(test: Any, fixtures: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(arguments of `parametrize`, parameters by fixture) of each run of a test."""
    own = [*autouse_names(fixtures), *used_fixtures(test), *argument_names(test)]
    needed = with_inner(own, fixtures)
    varied = [n for n in needed if n in fixtures and fixtures[n].fixture_rows is not None]
    tables = _marks_of(test, "parameter_rows")
    for parameters in itertools.product(*(fixtures[name].fixture_rows for name in varied)):
        for rows in itertools.product(*tables):
            given = {name: value for row in rows for name, value in row.items()}
            yield given, dict(zip(varied, parameters, strict=True))
