"""What a text can mean: every reading of an answer with structure.

Runs in grading processes. A text outside the grammars has no reading; nothing is evaluated but
whether an equation between numbers is true.
"""

import functools
import re
from dataclasses import dataclass
from fractions import Fraction

from verification.math.expression import Tree, parse_expression, symbols_of
from verification.math.numbers import parse_number
from verification.math.plain import EMPTY_SET, Number, Words, read_plain, words_of
from verification.math.regions import Region, parse_region
from verification.math.split import enclosed, split_at, split_words
from verification.math.text import normalise
from verification.math.unit_table import Unit
from verification.math.units import split_unit
from verification.math.values import same_value

_MATRIX = re.compile(
    r"\\begin\{([pbvBV]?matrix|array)\}(?:\{[lcr| ]*\})?(.*)\\end\{\1\}", re.DOTALL
)
# Variables, segments (AB) and angles.
_NAME = re.compile(
    r"[A-Za-z](?:_(?:[0-9A-Za-z]|\{[^{}]*\}))?'*|[A-Z]{2,3}|m?\\angle ?[A-Z]{1,3}"
    r"|\\[a-zA-Z]+ ?(?:_[0-9A-Za-z])?"
)
_FUNCTION = re.compile(r"[A-Za-z]'*(?:_[0-9A-Za-z])?(?:\^\{?-1\}?)?\([A-Za-z](?:,[A-Za-z])*\)")
_LABEL = re.compile(r"\\text\{[^{}]*\}|[A-Za-z ]{4,}|\\frac\{d[a-z]?\}\{d[a-z]\}[a-z]?")
_COORDINATES = re.compile(r"\([A-Za-z](?:,[A-Za-z]){1,3}\)")
_SIGN_CHOICE = re.compile(r"\\(pm|mp)(?![a-z]) ?")
_CONDITION = re.compile(
    r"(?:, ?|(?=\())\(?[a-z] ?\\in ?\\(?:integers|naturals|reals|rationals|complexes)"
    r" ?(?:\^\+)?\)?$"
)
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
_TIGHT_COMMA = re.compile(r",(?! )")
_MEMBERS = re.compile(r"[A-Za-z](?:_[0-9A-Za-z])?\\in(?![a-z]) ?(\\\{.*)", re.DOTALL)
_BRACKETS = (
    ("set", "\\{", "\\}"),
    ("tuple", "(", ")"),
    ("tuple", "[", "]"),
    ("tuple", "\\langle", "\\rangle"),
)
_SUBSCRIPT = re.compile(r"_.*|'*$", re.DOTALL)


@dataclass(frozen=True)
class Expression:
    """A value with a unit."""

    tree: Tree
    unit: Unit | None


@dataclass(frozen=True)
class Collection:
    """Several answers: kind "set", "list", "tuple", "named" (`x=1, y=2`) or "row" (its values)."""

    kind: str
    items: tuple[str, ...]


@dataclass(frozen=True)
class Assignment:
    """A name and its value; `f(x)=x^2` too. An empty name is a label in words."""

    name: str
    value: str


@dataclass(frozen=True)
class Equation:
    """An equation whose sides differ by this."""

    difference: Tree


@dataclass(frozen=True)
class Matrix:
    """Rows of entries; `kind` parts determinants from matrices."""

    kind: str
    rows: tuple[tuple[str, ...], ...]


Reading = Expression | Collection | Assignment | Equation | Matrix | Region | Words


def without_names(first: str, second: str) -> tuple[str, str]:
    """Both texts, a name that only one of them gives to its value taken away: `x=5` and `5`."""
    first, second = (_settle_approximation(text) for text in _drop_condition(first, second))
    if ("=" in first) == ("=" in second):
        return first, second
    named, bare = (first, second) if "=" in first else (second, first)
    # A pair of coordinates may be named one by one.
    assignment = read_assignment(named) if len(_list_items(named)) == 1 else None
    if assignment is None or _is_relation(bare):
        return first, second
    return (assignment.value, bare) if named == first else (bare, assignment.value)


@functools.lru_cache(maxsize=256)
def read(text: str) -> tuple[Reading, ...]:
    """All readings of a normalised text; none when it is beyond this module."""
    plain = read_plain(text)
    if isinstance(plain, Words) and plain.text != EMPTY_SET:
        return (plain,)
    if isinstance(plain, Number) and words_of(text):
        return (Expression(("num", plain.value), plain.unit),)
    matrix = _read_matrix(text)
    if matrix is not None:
        return (matrix, *_column_as_tuple(matrix))
    region = parse_region(text)
    readings: tuple[Reading, ...] = () if region is None else (region,)
    members = _MEMBERS.fullmatch(text)
    if members:
        return readings + tuple(r for r in read(members[1]) if isinstance(r, Collection))
    collections = _read_collections(text)
    if collections:
        return readings + collections
    if "=" in text:
        return readings + _read_equation(text)
    rest, unit = split_unit(text)
    value = parse_number(rest)
    tree = parse_expression(rest) if value is None else ("num", value)
    return readings if tree is None else (*readings, Expression(tree, unit))


def read_assignment(text: str) -> Assignment | None:
    """The name and value of `x=5`, `5=x`, `f(x)=x^2` or `\\text{Area}=5`; None without a name."""
    sides = [side.strip() for side in split_at(text, "=")]
    if len(sides) < 2 or _is_relation(text) or not all(sides):
        return None
    if len(sides) == 2 and _is_name(sides[1]) and not _is_name(sides[0]):
        sides.reverse()
    if _is_name(sides[0]):
        return Assignment(sides[0], sides[-1])
    is_label = _LABEL.fullmatch(sides[0]) or _COORDINATES.fullmatch(sides[0])
    return Assignment("", sides[-1]) if is_label else None


def _drop_condition(first: str, second: str) -> tuple[str, str]:
    """Both texts; a condition such as `, k \\in \\mathbb{Z}` goes unless the other has another."""
    bare, other = _CONDITION.sub("", first), _CONDITION.sub("", second)
    conditions = {first[len(bare) :].strip(", ()"), second[len(other) :].strip(", ()")} - {""}
    return (bare, other) if len(conditions) == 1 and bare and other else (first, second)


def _is_name(text: str) -> bool:
    if text in ("e", "i", "\\pi", "\\infty", "\\emptyset", "\\reals"):
        return False
    return bool(_NAME.fullmatch(text) or _FUNCTION.fullmatch(text))


def _is_relation(text: str) -> bool:
    return any(mark in text for mark in ("<", ">", "!=", "\\le", "\\ge", "\\ne", "\\in"))


def _settle_approximation(text: str) -> str:
    """`\\sqrt{2} \\approx 1.41` means its exact side, `x \\approx 1.41` the number given."""
    sides = [side.strip() for side in split_at(text, "\\approx")]
    if len(sides) != 2 or not all(sides):
        return text
    return "=".join(sides) if _is_name(sides[0]) else sides[0]


def _read_matrix(text: str) -> Matrix | None:
    match = _MATRIX.fullmatch(text)
    if not match:
        return None
    kind = "determinant" if match[1].lower() == "vmatrix" else "matrix"
    rows = match[2].strip().removesuffix("\\\\").split("\\\\")
    return Matrix(kind, tuple(tuple(cell.strip() for cell in row.split("&")) for row in rows))


def _column_as_tuple(matrix: Matrix) -> tuple[Collection, ...]:
    """A vector is written as a column or as a tuple."""
    is_single = all(len(row) == 1 for row in matrix.rows)
    is_column = is_single and matrix.kind == "matrix" and len(matrix.rows) > 1
    return (Collection("tuple", sum(matrix.rows, ())),) if is_column else ()


def _read_collections(text: str) -> tuple[Reading, ...]:
    """Readings as several answers; none for a single one."""
    for kind, opening, closing in _BRACKETS:
        inner = enclosed(text, opening, closing)
        if inner is None:
            continue
        items = tuple(item.strip() for item in split_at(inner, ",", ";"))
        if kind == "set" and not any(mark in inner for mark in "|:"):
            is_plain = len(items) == 1 and not _is_set(items[0])
            return (Collection("set", items), *(read(normalise(inner)) if is_plain else ()))
        is_interval = opening == "[" and len(items) == 2
        return (Collection("tuple", items),) if len(items) > 1 and not is_interval else ()
    items = _list_items(text)
    return _read_list(items) if len(items) > 1 else ()


def _list_items(text: str) -> list[str]:
    """Items of a list without brackets; `\\pm` makes two of one."""
    grouped = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    text = text if _TIGHT_COMMA.search(grouped) else grouped
    items = [
        part.strip()
        for piece in split_at(text, ",", ";")
        for half in split_words(piece, "or", "\\text{or}")
        for part in split_words(half, "and", "\\text{and}")
    ]
    items = [item for item in items if item]
    if len(items) == 1 and _SIGN_CHOICE.search(text):
        return [_with_sign(text, "+"), _with_sign(text, "-")]
    return [choice for item in items for choice in _list_items(item)] if len(items) > 1 else items


def _with_sign(text: str, sign: str) -> str:
    other = "-" if sign == "+" else "+"
    signed = _SIGN_CHOICE.sub(lambda match: sign if match[1] == "pm" else other, text)
    return re.sub(r"(?<![0-9A-Za-z)}\]])\+", "", signed)


def _read_list(items: list[str]) -> tuple[Reading, ...]:
    """A list; values under different names are no list, but a row or tuple in the names' order."""
    assignments = [read_assignment(item) for item in items]
    named = [assignment for assignment in assignments if assignment is not None]
    if len(named) < len(items):
        return (Collection("list", tuple(items)),)
    names = [assignment.name for assignment in named]
    values = tuple(assignment.value for assignment in named)
    if len({_SUBSCRIPT.sub("", name) for name in names}) == 1:
        return (Collection("list", values),)
    by_name = tuple(value for _, value in sorted(zip(names, values, strict=True)))
    kinds = (("named", tuple(items)), ("row", by_name), ("tuple", by_name))
    return tuple(Collection(kind, parts) for kind, parts in kinds)


def _is_set(text: str) -> bool:
    return text.startswith(("\\{", "\\emptyset")) or not text


def _read_equation(text: str) -> tuple[Reading, ...]:
    """An equation, as the assignment it may be and as one between its sides."""
    sides = [side.strip() for side in split_at(text, "=")]
    if _is_relation(text) or not all(sides):
        return ()
    assignment = read_assignment(text)
    if assignment is not None and not assignment.name:
        return read(normalise(assignment.value))
    readings: tuple[Reading, ...] = () if assignment is None else (assignment,)
    trees = [parse_expression(side) for side in sides]
    known = [tree for tree in trees if tree is not None]
    if len(known) < len(sides):
        return readings
    if not any(map(symbols_of, known)):
        # 2+3=5 means 5 if it is true.
        is_true = all(same_value(known[0], tree) for tree in known[1:])
        return (Expression(known[-1], None),) if is_true else readings
    if len(sides) == 2:
        negative = ("prod", ("num", Fraction(-1)), known[1])
        readings += (Equation(("sum", known[0], negative)),)
    return readings
