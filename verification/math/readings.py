"""Every reading of an answer with structure.

Runs in grading processes. A text outside the grammars has no reading; nothing is evaluated but
whether an equation between numbers is true.
"""

import functools
import itertools
import re
from dataclasses import dataclass, field, replace

from verification.math.applications import without_application_marks
from verification.math.expression import parse_expression
from verification.math.labels import (
    Assignment,
    contradicts_itself,
    coordinates_named,
    is_relation,
    read_assignment,
    settle_approximation,
)
from verification.math.linear import read_linear
from verification.math.notation import (
    Congruence,
    read_congruence,
    rows_of_cases,
    vector_components,
)
from verification.math.numbers import parse_number
from verification.math.plain import EMPTY_SET, Number, Words, read_plain, words_of
from verification.math.regions import Region, parse_region
from verification.math.split import enclosed, split_at, split_list, split_words
from verification.math.text import normalise
from verification.math.trees import Tree, difference, num, symbols_of
from verification.math.unit_table import Unit
from verification.math.units import split_unit
from verification.math.values import same_value

_MATRIX = re.compile(
    r"\\begin\{([pbvBV]?matrix|array)\}(?:\{[lcr| ]*\})?(.*)\\end\{\1\}", re.DOTALL
)
_MATRIX_BRACKETS = (("(", ")"), ("[", "]"), ("|", "|"))
_SIGN_CHOICE = re.compile(r"\\(pm|mp)(?![a-z]) ?")
# Words that may precede the condition of a piece.
_CONDITION = re.compile(r"^(?:\\text\{ ?,?(?:if|for|when|where|as) ?\}|,|if|for|when)+ ?")
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
_TIGHT_COMMA = re.compile(r",(?! )")
_MEMBERS = re.compile(r"([A-Za-z](?:_[0-9A-Za-z])?)\\in(?![a-z]) ?(\\\{.*)", re.DOTALL)
_BRACKETS = (
    ("set", "\\{", "\\}"),
    ("tuple", "(", ")"),
    ("tuple", "[", "]"),
    ("tuple", "\\langle", "\\rangle"),
)
_NAMED_POINT = re.compile(r"^[A-Z](?:'|_[0-9])?\\of(?=\()")
_DIFFERENCE = re.compile(r"[a-z]{1,2}(?:-[a-z]{1,2})+")
_INEQUALITY = re.compile(
    r"(?P<left>[^<>]{1,300}?)(?P<sign><=|>=|<|>|\\le(?![a-z])|\\ge(?![a-z]))(?P<right>[^<>]{1,300})"
)
_STATEMENT = re.compile(r"(?:(?:\\neg|\\lnot|-) ?)?[A-Za-z]")
_SUBSCRIPT = re.compile(r"_.*|'*$", re.DOTALL)


@dataclass(frozen=True)
class Expression:
    """A value with a unit."""

    tree: Tree
    unit: Unit | None


@dataclass(frozen=True)
class Collection:
    """Several answers.

    Kinds: "set", "list", "tuple", "named" (`x=1, y=2`), "row" (its values), "conditions"
    (`x>1, y>2`) and "alternatives" (`x>1 or y=2`).
    """

    kind: str
    items: tuple[str, ...]
    names: tuple[str, ...] = field(default=(), compare=False)
    """Of a row or tuple that was written as `x=1, y=2`, in the order of its items; or of a list."""


@dataclass(frozen=True)
class Equation:
    """An equation whose sides differ by this."""

    difference: Tree


@dataclass(frozen=True)
class Inequality:
    """An inequality in several variables: where this is positive, or not negative."""

    difference: Tree
    is_strict: bool


@dataclass(frozen=True)
class Matrix:
    """Rows of entries; `kind` parts determinants from matrices."""

    kind: str
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Ratio:
    """A ratio such as `3:4:5`."""

    parts: tuple[Tree, ...]


@dataclass(frozen=True)
class Piecewise:
    """One value per condition, in any order."""

    rows: tuple[tuple[str, str], ...]


Reading = (
    Expression | Collection | Assignment | Equation | Matrix | Region | Words | Congruence | Ratio
    | Piecewise | Inequality
)  # fmt: skip


def without_names(first: str, second: str) -> tuple[str, str]:
    """Both texts, without a name that only one text gives to its value: `x=5` and `5`."""
    first, second = settle_approximation(first), settle_approximation(second)
    if ("=" in first) == ("=" in second):
        return first, second
    named, bare = (first, second) if "=" in first else (second, first)
    # A pair of coordinates may be named one by one.
    assignment = read_assignment(named) if len(_list_items(named)) == 1 else None
    if assignment is None or is_relation(bare):
        return first, second
    return (assignment.value, bare) if named == first else (bare, assignment.value)


@functools.lru_cache(maxsize=256)
def read(text: str) -> tuple[Reading, ...]:
    """All readings of a normalised text; none when it is beyond this module."""
    plain = read_plain(text)
    if isinstance(plain, Words) and plain.text != EMPTY_SET:
        # ab-ac reads like words, too.
        tree = parse_expression(text) if _DIFFERENCE.fullmatch(text) else None
        return (plain,) if tree is None else (plain, Expression(tree, None))
    if isinstance(plain, Number) and words_of(text):
        return (Expression(num(plain.value), plain.unit),)
    congruence = read_congruence(text)
    if congruence is not None:
        return (congruence,)
    rows = rows_of_cases(text)
    if rows is not None and all(len(row) == 2 for row in rows):
        return (Piecewise(tuple((value, _CONDITION.sub("", when)) for value, when in rows)),)
    linear = read_linear(without_application_marks(text))
    if linear is not None:
        if linear.is_tuple:
            return (Collection("tuple", sum(linear.rows, ())),)
        return _of_matrix(Matrix("matrix", linear.rows))
    matrix = _read_matrix(text)
    if matrix is not None:
        return _of_matrix(matrix)
    region = parse_region(text)
    readings: tuple[Reading, ...] = () if region is None else (region,)
    members = _MEMBERS.fullmatch(text)
    if members:
        found = (reading for reading in read(members[2]) if isinstance(reading, Collection))
        return readings + tuple(replace(reading, names=(members[1],)) for reading in found)
    collections = _read_collections(text)
    if collections:
        return readings + collections
    readings += _read_inequality(text)
    if "=" in text:
        return readings + _read_equation(text)
    readings += _read_vector(text)
    ratio = _read_ratio(text)
    if ratio is not None:
        return (*readings, ratio)
    # The degrees of an angle within belong to no unit of the whole.
    rest, unit = (text, None) if "\\cis" in text else split_unit(text)
    value = parse_number(rest)
    tree = parse_expression(rest) if value is None else num(value)
    return readings if tree is None else (*readings, Expression(tree, unit))


def _of_matrix(matrix: Matrix) -> tuple[Reading, ...]:
    """A matrix, as the tuple that a column is and the number that a single entry is."""
    cells = sum(matrix.rows, ())
    is_number = len(cells) == 1 and matrix.kind == "matrix"
    return (matrix, *_column_as_tuple(matrix), *(read(normalise(cells[0])) if is_number else ()))


def _read_inequality(text: str) -> tuple[Inequality, ...]:
    """`x+y<1` in two variables or more; one variable has a region."""
    match = _INEQUALITY.fullmatch(text)
    if match is None:
        return ()
    sides = [parse_expression(match[side].strip()) for side in ("left", "right")]
    if sides[0] is None or sides[1] is None:
        return ()
    more, less = sides if match["sign"][:1] == ">" or match["sign"] == "\\ge" else sides[::-1]
    excess = difference(more, less)
    is_strict = match["sign"] in ("<", ">")
    return (Inequality(excess, is_strict),) if len(symbols_of(excess)) > 1 else ()


def _read_vector(text: str) -> tuple[Collection, ...]:
    """`2\\hat{i}-3\\hat{j}` as a pair, or as a triple that ends with 0."""
    components = vector_components(text)
    if components is None:
        return ()
    pair = (Collection("tuple", components),)
    return pair if len(components) > 2 else (*pair, Collection("tuple", (*components, "0")))


def _read_ratio(text: str) -> Ratio | None:
    parts = split_at(text, ":")
    trees = [parse_expression(part.strip()) for part in parts]
    known = tuple(tree for tree in trees if tree is not None)
    return Ratio(known) if len(known) == len(parts) > 1 else None


def _read_matrix(text: str) -> Matrix | None:
    """A matrix in its own brackets or in written ones, multiplied by the factor before it."""
    place = text.find("\\begin{")
    if place < 0:
        return None
    factor, body = text[:place].rstrip(), text[place:]
    bracket = (factor[-1:], body[-1:])
    if bracket in _MATRIX_BRACKETS:
        factor, body = factor[:-1], body[:-1].rstrip()
    match = _MATRIX.fullmatch(body)
    if not match or (bracket in _MATRIX_BRACKETS and match[1] not in ("array", "matrix")):
        return None
    is_determinant = match[1].lower() == "vmatrix" or bracket == ("|", "|")
    rows = match[2].strip().removesuffix("\\\\").split("\\\\")
    cells = tuple(tuple(cell.strip() for cell in row.split("&")) for row in rows)
    factor = factor.strip().removesuffix("*").strip()
    if not factor:
        return Matrix("determinant" if is_determinant else "matrix", cells)
    factor = "-1" if factor == "-" else factor
    known = [parse_expression(part) for part in (factor, *sum(cells, ()))]
    if is_determinant or None in known:
        return None
    return Matrix("matrix", tuple(tuple(f"({factor})*({c})" for c in row) for row in cells))


def _column_as_tuple(matrix: Matrix) -> tuple[Collection, ...]:
    """A vector is written as a column or as a tuple."""
    is_single = all(len(row) == 1 for row in matrix.rows)
    is_column = is_single and matrix.kind == "matrix" and len(matrix.rows) > 1
    return (Collection("tuple", sum(matrix.rows, ())),) if is_column else ()


def _read_collections(text: str) -> tuple[Reading, ...]:
    """Readings as several answers; none for a single one."""
    # A(1,2) is the point (1,2) with its name.
    text = _NAMED_POINT.sub("", text)
    for kind, opening, closing in _BRACKETS:
        inner = enclosed(text, opening, closing)
        if inner is None:
            continue
        items = tuple(item.strip() for item in split_at(inner, ",", ";"))
        if kind == "set" and not any(mark in inner for mark in "|:"):
            is_plain = len(items) == 1 and not _is_set(items[0])
            if not is_plain and "\\pm" in inner:
                items = tuple(choice for item in items for choice in _list_items(item))
            return (Collection("set", items), *(read(normalise(inner)) if is_plain else ()))
        is_interval = opening == "[" and parse_region(text) is not None
        return (Collection("tuple", items),) if len(items) > 1 and not is_interval else ()
    items = _list_items(text)
    if len(items) < 2:
        return ()
    points = _read_points(text)
    if points is not None:
        return (points,)
    has_or, has_and = (len(split_words(text, word)) > 1 for word in ("or", "and"))
    return _read_list(items, is_choice=has_or, has_and=has_and)


def _read_points(text: str) -> Collection | None:
    """`x=1,y=2 or x=3,y=4` as pairs, in the order of the names."""
    groups = [
        _list_items(part)
        for half in split_words(text, "or")
        for piece in split_at(half, ";")
        for part in (split_words(piece, "and") if "," in piece else [piece])
    ]
    if len(groups) < 2 or any(len(group) < 2 for group in groups):
        return None
    points = [{a.name: a.value for a in map(read_assignment, group) if a} for group in groups]
    names = sorted(points[0])
    is_complete = all(len(point) == len(group) for point, group in zip(points, groups, strict=True))
    if not is_complete or any(sorted(point) != names for point in points):
        return None
    return Collection("list", tuple(f"({','.join(map(point.get, names))})" for point in points))


def _list_items(text: str) -> list[str]:
    """Items of a list without brackets; `\\pm` makes two of one."""
    grouped = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    text = text if _TIGHT_COMMA.search(grouped) else grouped
    items = split_list(text)
    if len(items) == 1 and _SIGN_CHOICE.search(text):
        return [_with_sign(text, "+"), _with_sign(text, "-")]
    return [choice for item in items for choice in _list_items(item)] if len(items) > 1 else items


def _with_sign(text: str, sign: str) -> str:
    other = "-" if sign == "+" else "+"
    signed = _SIGN_CHOICE.sub(lambda match: sign if match[1] == "pm" else other, text)
    return re.sub(r"(?<![0-9A-Za-z)}\]])\+", "", signed)


def _read_list(items: list[str], *, is_choice: bool, has_and: bool) -> tuple[Reading, ...]:
    """A list; values under different names are no list, but a row or tuple in the names' order,
    or as written where the names have none.

    `x=1 or y=2` says neither, and conditions are not the same with "or" and with "and".
    """
    if any(map(is_relation, items)):
        return (Collection("alternatives" if is_choice else "conditions", tuple(items)),)
    assignments = [read_assignment(item) for item in items]
    named = [assignment for assignment in assignments if assignment is not None]
    if len(named) < len(items):
        is_logic = all(_STATEMENT.fullmatch(item) for item in items)
        # p and q is not p or q; as values of x they are only listed.
        connective = ("or",) if is_choice else ("and",) if has_and else ()
        return (Collection("list", tuple(items), connective if is_logic else ()),)
    names = [assignment.name for assignment in named]
    values = tuple(assignment.value for assignment in named)
    bases = {_SUBSCRIPT.sub("", name) for name in names}
    if len(bases) == 1:
        is_numbered = any("_" in name for name in names)
        return (Collection("list", values, tuple(sorted(names if is_numbered else bases))),)
    if is_choice:
        return (Collection("alternatives", tuple(items)),)
    in_order = [*zip(names, values, strict=True)]
    if _is_family(names):
        in_order.sort()
    order, row = tuple(name for name, _ in in_order), tuple(value for _, value in in_order)
    named_values = Collection("named", tuple(items), tuple(sorted(names)))
    return (named_values, Collection("row", row, order), Collection("tuple", row, order))


def _is_family(names: list[str]) -> bool:
    """Whether names have an order, as x, y, z and a, b, c have; x and p have none."""
    letters = sorted(name[:1] for name in names)
    if not letters[0]:
        return False
    if any(_SUBSCRIPT.sub("", name) != name[0] for name in names):
        # f(1) and f(2), AB and AC.
        return letters[0].isalpha() and letters[0] == letters[-1]
    return set(letters) <= set("xyz") or all(
        ord(one) + 1 >= ord(other) for one, other in itertools.pairwise(letters)
    )


def _is_set(text: str) -> bool:
    return text.startswith(("\\{", "\\emptyset")) or not text


def _read_equation(text: str) -> tuple[Reading, ...]:
    """Readings of an equation: as an assignment, if it may be one, and between its sides."""
    sides = [side.strip() for side in split_at(text, "=")]
    if is_relation(text) or not all(sides) or contradicts_itself(text):
        return ()
    named = coordinates_named(text)
    if named is not None:
        return read(normalise(named))
    assignment = read_assignment(text)
    if assignment is not None and not assignment.name:
        return read(normalise(assignment.value))
    readings: tuple[Reading, ...] = () if assignment is None else (assignment,)
    trees = [parse_expression(side) for side in sides]
    known = [tree for tree in trees if tree is not None]
    if len(known) < len(sides):
        return readings
    if len(sides) == 2:
        readings += (Equation(difference(*known)),)
        # (x+1)^2 = x^2+2x+1 is no condition on x, but one value in two forms.
        is_identity = assignment is None and same_value(*known)
        readings += (Expression(known[1], None),) if is_identity else ()
    return readings
