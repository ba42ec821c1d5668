"""A NaN of a solution: an error where tests compare it by size, since each `not x > y` accepts it.

Runs inside the sandbox, in the tests' process. The tests' own handling counts where they name NaN.
"""

import ast
import re
from collections.abc import Callable, Iterable
from typing import Any

_NAN = re.compile(r"(?<![a-z])nan|is_?nan|is_?finite")
_INFINITY = re.compile(
    r"(?<![a-z])inf(?:inity)?(?![a-z])|is_?inf|float_?info|finfo|e\+?[3-9][0-9]{2}(?![0-9])"
)
_SIZES = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_ONE, _EACH = "__ordered__", "__all_ordered__"


class NotANumber(float):
    """A NaN of the solution: comparing its size raises, also within `max` and `sorted`."""

    def _refuse(self, *other: object) -> bool:
        raise ValueError("a result is not a number")

    def _same(self, *other: object) -> "NotANumber":
        return self

    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _same
    __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _same
    __abs__ = __neg__ = __pos__ = _same
    __hash__ = float.__hash__


def names_nan(source: str, tree: ast.Module) -> bool:
    """Whether tests deal with NaN by themselves, as by `isnan` or by `x != x`."""
    return _NAN.search(source.casefold()) is not None or any(
        isinstance(node, ast.Compare)
        and isinstance(node.ops[0], ast.NotEq | ast.Eq)
        and ast.dump(node.left) == ast.dump(node.comparators[0])
        for node in ast.walk(tree)
    )


def names_infinity(source: str) -> bool:
    """Whether tests deal with infinity, whose difference from itself is NaN."""
    return _INFINITY.search(source.casefold()) is not None


class SizeComparisons:
    """Checks what tests compare by size, in place of what the comparison itself would say.

    NotANumber is not enough: `math.fabs`, `abs` of a complex number and numpy make a plain NaN.
    """

    def __init__(self, is_asked: Callable[[], bool]) -> None:
        """is_asked: whether the solution was called; a NaN before is the tests' own."""
        self._is_asked = is_asked
        self._is_own = False
        """An operation of the tests made a NaN of numbers, such as 0/0 in a reference."""

    def names(self) -> dict[str, Any]:
        """Functions that `check` calls."""
        return {_ONE: self._ordered, _EACH: self._all_ordered}

    def check(self, tree: ast.Module) -> None:
        """Make the tests check the values that they compare by size."""
        own = {name for node in ast.walk(tree) for name in _defined(node)}
        greatest = set() if "*" in own else {"max", "min"} - own
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                for place, operator in enumerate(node.ops):
                    if isinstance(operator, _SIZES):
                        sides[place] = _checked(sides[place], _ONE)
                        sides[place + 1] = _checked(sides[place + 1], _ONE)
                node.left, *node.comparators = sides
            elif isinstance(node, ast.Call) and getattr(node.func, "id", None) in greatest:
                # `max` leaves out a NaN that is not the first.
                if len(node.args) == 1 and not isinstance(node.args[0], ast.Starred):
                    node.args[0] = _checked(node.args[0], _EACH)

    def watch_numpy(self) -> None:
        """Notice a NaN that numpy makes of numbers; one that comes from a NaN is none."""
        import numpy

        numpy.seterrcall(self._note_own)
        numpy.seterr(invalid="call")

    def _note_own(self, *fault: Any) -> None:
        self._is_own = True

    def _ordered(self, value: Any) -> Any:
        kind = type(value)
        # Tests may compare millions of numbers in a reference of their own.
        if kind is int or kind is str or (kind is float and value == value):
            return value
        if not self._is_own and _has_nan(kind, value) and self._is_asked():
            raise ValueError("a result is not a number")
        return value

    def _all_ordered(self, values: Iterable[Any]) -> Iterable[Any]:
        return map(self._ordered, values)


def _defined(node: ast.AST) -> list[Any]:
    """Names that a node defines, of any kind."""
    is_stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    found = [node.id] if is_stored else []  # type: ignore[attr-defined]
    return found + [getattr(node, key, None) for key in ("name", "asname", "arg")]


def _checked(side: ast.expr, function: str) -> ast.expr:
    """The expression, as the argument of a check; without one for what is never NaN."""
    called = getattr(getattr(side, "func", None), "id", None)
    if isinstance(side, ast.Constant) or called in ("len", _ONE, _EACH):
        return side
    name = ast.copy_location(ast.Name(function, ast.Load()), side)
    return ast.copy_location(ast.Call(name, [side], []), side)


def _has_nan(kind: type, value: Any) -> bool:
    """Whether a number, or an element of an array, is NaN. No method of the tests is asked."""
    if issubclass(kind, float):
        return value != value
    if kind.__module__.partition(".")[0] not in ("numpy", "mpmath"):
        return False
    differs = value != value
    return bool(differs.any() if hasattr(differs, "any") else differs)
