"""Encoding of numpy arrays and SymPy expressions, where the tests allow those packages.

Runs inside the sandbox, in both processes. No text is evaluated: the decoder rebuilds an expression
from class names and numbers.
"""

import sys
from collections.abc import Callable
from typing import Any

_ARRAY_KINDS = "biufcSUMm"
_CONSTANTS = frozenset(
    "Zero One NegativeOne Half Pi Exp1 ImaginaryUnit Infinity NegativeInfinity ComplexInfinity NaN "
    "GoldenRatio EulerGamma Catalan EmptySet Reals Integers Naturals Naturals0 Rationals Complexes "
    "UniversalSet BooleanTrue BooleanFalse".split()
)


def dump_array(value: Any) -> tuple[Any, ...] | None:
    """Node of a numpy array or number; None for an array of objects."""
    if value.dtype.kind not in _ARRAY_KINDS:
        return None
    is_scalar = not isinstance(value, sys.modules["numpy"].ndarray)
    return (), value.dtype.str, list(value.shape), value.tobytes().hex(), is_scalar


def make_array(parts: list[Any], kind: str, shape: Any, data: str, is_scalar: bool) -> Any:
    """numpy array or number of a node."""
    numpy = _loaded("numpy")
    dtype = numpy.dtype(str(kind))
    if dtype.kind not in _ARRAY_KINDS:
        raise TypeError("an array of no plain numbers")
    made = numpy.frombuffer(bytes.fromhex(data), dtype).reshape(shape).copy()
    return made[()] if is_scalar else made


def dump_expression(value: Any) -> tuple[Any, ...]:
    """Node of a SymPy expression."""
    name = type(value).__name__
    if name in _CONSTANTS:
        return (), name, []
    if getattr(value, "is_Rational", False):
        return (), "Rational", [hex(value.p), hex(value.q)]
    if getattr(value, "is_Float", False):
        return (), "Float", [str(value), value._prec]
    if getattr(value, "is_Symbol", False):
        return (), "Symbol", [value.name, dict(value._assumptions_orig)]
    return value.args, name, []


def dump_matrix(value: Any) -> tuple[Any, ...]:
    """Node of a SymPy matrix."""
    return value.flat(), "Matrix", list(value.shape)


def make_expression(parts: list[Any], name: str, more: Any) -> Any:
    """SymPy expression of a node."""
    sympy = _loaded("sympy")
    if not all(isinstance(part, sympy.Basic) for part in parts):
        # SymPy would evaluate text.
        raise TypeError("a part of an expression is none")
    if name == "Rational":
        return sympy.Rational(*(int(number, 16) for number in more))
    if name == "Float":
        return sympy.Float(str(more[0]), precision=int(more[1]))
    if name == "Symbol":
        return sympy.Symbol(str(more[0]), **{str(key): bool(more[1][key]) for key in more[1]})
    if name == "Matrix":
        return sympy.Matrix(*map(int, more), parts)
    if name in _CONSTANTS:
        found = getattr(sympy.S, name, None)
        return found if found is not None else {"BooleanTrue": sympy.true}.get(name, sympy.false)
    kind = getattr(sympy, name, None)
    if not isinstance(kind, type) or not issubclass(kind, sympy.Basic):
        raise TypeError(f"{name} is no kind of expression")
    return kind(*parts)


def _loaded(name: str) -> Any:
    """An imported package; the import fails unless the task allows it."""
    __import__(name)
    return sys.modules[name]


def parse_only(texts: frozenset[str]) -> None:
    """Make SymPy parse only these texts, because its parser evaluates Python."""
    from sympy.parsing import sympy_parser

    parse: Callable[..., Any] = sympy_parser.parse_expr

    def parse_known(text: Any, *arguments: Any, **keywords: Any) -> Any:
        # `simplify` of sines loads this module, which parses its own names of units.
        asking = sys._getframe(2).f_globals.get("__name__")
        is_own = asking == "sympy.physics.units.prefixes"
        if not isinstance(text, str) or not (is_own or text in texts):
            raise ValueError("a text of the solution is not parsed in the tests' process")
        return parse(text, *arguments, **keywords)

    sympy_parser.parse_expr = parse_known
