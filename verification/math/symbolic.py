"""Operations of calculus on trees, evaluated exactly by SymPy.

Runs in grading processes only. Nothing is parsed by SymPy: trees are built into its objects and
back, and unevaluated results have no tree.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import sympy
from sympy.core.function import PoleError
from sympy.polys.polyerrors import BasePolynomialError

from verification.math.points import is_whole_name
from verification.math.trees import MINUS_ONE, ONE, Tree, num, replaced, subtrees

MAX_TERMS = 500
MAX_NODES = 5000
_NAMES = {
    name: name
    for name in "sin cos tan cot sec csc sinh cosh tanh coth exp floor sign factorial".split()
} | {
    "arcsin": "asin", "arccos": "acos", "arctan": "atan", "arccot": "acot", "ln": "log",
    "abs": "Abs", "ceil": "ceiling", "binom": "binomial", "max": "Max", "min": "Min", "mod": "Mod",
}  # fmt: skip
_CALLS = {sympy_name: name for name, sympy_name in _NAMES.items()}


class Unevaluated(ValueError):
    """SymPy found no value, or none that a tree can hold."""


def integral(body: Tree, name: str, low: Tree, high: Tree) -> Tree:
    """The definite integral of a tree over the symbol `name`."""

    def compute() -> Any:
        return sympy.Integral(_object(body), (_symbol(name), _object(low), _object(high))).doit()

    return _evaluated(compute)


def derivative(body: Tree, name: str, order: int) -> Tree:
    """The derivative of a tree by the symbol `name`."""
    return _evaluated(lambda: sympy.diff(_object(body), _symbol(name), order))


def limit(body: Tree, name: str, place: Tree, side: str) -> Tree:
    """The limit of a tree where the symbol `name` goes to a place, from `side` "+", "-" or both."""

    def compute() -> Any:
        target = _object(place)
        sides = side or ("+" if target.is_infinite else "+-")
        return sympy.limit(_object(body), _symbol(name), target, sides)

    return _evaluated(compute)


def repeated(kind: str, body: Tree, name: str, low: Tree, high: Tree) -> Tree:
    """The sum or product, by `kind`, of a tree over whole values of the symbol `name`."""
    if name == "i":
        body = replaced(body, {("const", "i"): ("sym", "i")})
    ends = [end[1] for end in (low, high) if end[0] == "num" and end[1].denominator == 1]
    if len(ends) == 2:
        count = int(ends[1] - ends[0]) + 1
        if 1 <= count <= MAX_TERMS and count * len([*subtrees(body)]) <= MAX_NODES:
            places = range(int(ends[0]), int(ends[1]) + 1)
            return (kind, *(replaced(body, {("sym", name): num(place)}) for place in places))
    operation = sympy.Sum if kind == "sum" else sympy.Product

    def compute() -> Any:
        index = sympy.Symbol(name, integer=True)
        term = _object(body).subs(_symbol(name), index)
        return operation(term, (index, _object(low), _object(high))).doit()

    return _evaluated(compute)


def prepare() -> None:
    """Load SymPy and what it builds when it is first used."""
    integral(("pow", ("sym", "x"), num(2)), "x", ONE, ("sym", "a"))
    repeated("sum", ("sym", "k"), "k", ONE, ("sym", "n"))
    limit(("call", "sin", ("sym", "x")), "x", ONE, "")


def _evaluated(compute: Callable[[], Any]) -> Tree:
    """The tree of SymPy's result. Raises Unevaluated."""
    try:
        return _tree(compute())
    except (
        # Exceptions of SymPy 1.14 for input that it does not handle.
        *(ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError),
        *(TypeError, ValueError, PoleError, BasePolynomialError),
    ) as error:
        raise Unevaluated(str(error)) from error


# --- trees to SymPy and back --------------------------------------------------------------------


def _symbol(name: str) -> Any:
    return (
        sympy.Symbol(name, integer=True) if is_whole_name(name) else sympy.Symbol(name, real=True)
    )


def _object(tree: Tree) -> Any:
    """SymPy's object for a tree."""
    kind = tree[0]
    if kind == "num":
        return sympy.Rational(tree[1].numerator, tree[1].denominator)
    if kind == "sym":
        return _symbol(tree[1])
    if kind == "const":
        return {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "infty": sympy.oo}[tree[1]]
    parts = [_object(part) for part in tree[1:] if isinstance(part, tuple)]
    if kind == "sum":
        return sympy.Add(*parts)
    if kind == "prod":
        return sympy.Mul(*parts)
    if kind == "pow":
        return sympy.Pow(*parts)
    if tree[1] == "root":
        return sympy.root(*parts)
    if tree[1] == "log":
        return sympy.log(*parts)
    if tree[1] not in _NAMES:
        raise Unevaluated(tree[1])
    return getattr(sympy, _NAMES[tree[1]])(*parts)


def _tree(value: Any) -> Tree:
    """The tree of SymPy's object. Raises Unevaluated for what a tree cannot hold."""
    if value.is_Rational:
        return ("num", Fraction(int(value.p), int(value.q)))
    if value.is_Symbol:
        return ("sym", value.name)
    constants = {sympy.pi: "pi", sympy.E: "e", sympy.I: "i", sympy.oo: "infty"}
    if value in constants:
        return ("const", constants[value])
    if value == -sympy.oo:
        return ("prod", MINUS_ONE, ("const", "infty"))
    kinds = {sympy.Add: "sum", sympy.Mul: "prod", sympy.Pow: "pow"}
    if isinstance(value, sympy.Piecewise):
        return _tree(_convergent(value))
    parts = [_tree(part) for part in value.args]
    if value.func in kinds:
        return (kinds[value.func], *parts)
    name = _CALLS.get(value.func.__name__)
    if name is None or not parts:
        raise Unevaluated(str(value.func))
    return ("call", name, *parts)


def _convergent(value: Any) -> Any:
    """The branch of a case distinction where an integral or sum has a value. Raises Unevaluated."""
    branches = [
        branch for branch, _ in value.args if not branch.has(sympy.Integral, sympy.Sum, sympy.nan)
    ]
    if len(branches) != 1:
        raise Unevaluated(str(value))
    return branches[0]
