r"""Sums, products, powers, transposes and determinants of matrices and vectors, worked out.

Pure string code on normalised texts; runs in grading processes. `\frac15(3,4,0)` and
`(1,2)+t(3,4)` are vectors, a matrix times a column is one. Two adjacent vectors are not a product:
which product is ambiguous.
"""

import re
from fractions import Fraction
from typing import NamedTuple

from verification.math.expression import parse_expression
from verification.math.numbers import parse_number
from verification.math.split import enclosed, group_end, split_at

MAX_ENTRIES = 36
MAX_ENTRY_CHARS = 200
MAX_POWER = 5
MAX_NESTING = 4
_ENVIRONMENT = re.compile(
    r"\\begin\{(?P<kind>[pbB]?matrix|array)\}(?:\{[lcr| ]*\})?(?P<body>(?:(?!\\begin).)*?)"
    r"\\end\{(?P=kind)\}",
    re.DOTALL,
)
_DETERMINANT = re.compile(
    r"(?:\\(?:det(?![a-z])|text\{det\}) ?(?P<call>\( ?)?|(?P<bar>\| ?))?"
    r"\\begin\{(?P<kind>[pbv]?matrix|array)\}(?:\{[lcr ]*\})?(?P<body>(?:(?!\\begin).)*?)"
    r"\\end\{(?P=kind)\}(?(call) ?\)|(?(bar) ?\|))",
    re.DOTALL,
)
MAX_DETERMINANT_ROWS = 4
_TRANSPOSED = re.compile(r"\^ ?(?:\{ ?(?:T|\\top ?|\\text\{T\}|\\intercal) ?\}|T|\\top(?![a-z])) ?")
_RAISED = re.compile(r"\^(?:\{([1-9])\}|([1-9]))")
_VECTOR = re.compile(r"[(\[](?:[^()\[\],]{1,60},){1,5}[^()\[\],]{1,60}[)\]]")
_CLOSING = {"(": ")", "[": "]", "\\langle": "\\rangle"}
_BRACKET = re.compile(r"\\[lr]angle(?![a-z])|\\.|[(\[{}\])]", re.DOTALL)
# Before a bracket these are functions or points.
_NAME_BEFORE = re.compile(r"(?:[A-Zfgh]|(?<![a-z])[a-z]{2,})$")
_LETTER_BEFORE = re.compile(r"[A-Za-z]$")


class Linear(NamedTuple):
    """A matrix; a vector that was written as a tuple is a column."""

    rows: tuple[tuple[str, ...], ...]
    is_tuple: bool


class _NotLinear(ValueError):
    """The text is not a sum or product of matrices or vectors."""


def read_linear(text: str) -> Linear | None:
    """The value of a normalised text that holds an operation on matrices or vectors, else None."""
    if "\\begin{" not in text and ("," not in text or enclosed(text) is not None):
        return None
    try:
        value, has_operation = _sum(text, 0)
    except _NotLinear:
        return None
    return value if has_operation and isinstance(value, Linear) else None


def determinant_cells(text: str) -> tuple[tuple[Fraction, ...], ...]:
    """Exact numbers of a normalised text that is one determinant of 2 to 4 rows; else none."""
    match = _DETERMINANT.fullmatch(text) if "\\begin{" in text else None
    if match is None:
        return ()
    is_plain = match["kind"] in ("matrix", "array")
    if match["bar"]:
        # Bars around (1) or [1] may be a norm.
        is_determinant = is_plain
    elif match.start("kind") > len("\\begin{"):
        is_determinant = match["kind"] != "vmatrix" and (not is_plain or bool(match["call"]))
    else:
        is_determinant = match["kind"] == "vmatrix"
    body = match["body"].strip().removesuffix("\\\\")
    rows = [[parse_number(cell.strip()) for cell in row.split("&")] for row in body.split("\\\\")]
    numbers = tuple(tuple(cell for cell in row if cell is not None) for row in rows)
    is_square = all(
        len(row) == len(rows) == len(cells) for row, cells in zip(numbers, rows, strict=True)
    )
    is_small = 2 <= len(rows) <= MAX_DETERMINANT_ROWS
    return numbers if is_determinant and is_square and is_small else ()


def with_determinant(text: str) -> str:
    """The value of a text that is one determinant of numbers; any other text as it is."""
    # Imported here: the verifier's own process reads determinants, and computes none.
    from flint import fmpq, fmpq_mat

    cells = determinant_cells(text)
    if not cells:
        return text
    rows = [[fmpq(cell.numerator, cell.denominator) for cell in row] for row in cells]
    value = fmpq_mat(rows).det()
    return _spelled(Fraction(int(value.p), int(value.q)))


def operands_of(text: str) -> list[str]:
    """Matrices and vectors of a sum, product, power or transpose, as written; else none."""
    if read_linear(text) is None:
        return []
    matrices = [match[0] for match in _ENVIRONMENT.finditer(text)]
    rest = _ENVIRONMENT.sub(" ", text)
    vectors = [match[0] for match in _VECTOR.finditer(rest)]
    is_operation = len(matrices) + len(vectors) > 1 or _TRANSPOSED.search(rest) or "^" in rest
    return matrices + vectors if is_operation else []


def _sum(text: str, level: int) -> tuple[Linear | str, bool]:
    """Value of a sum, and whether there was anything to work out."""
    if level > MAX_NESTING:
        raise _NotLinear(text)
    terms = _terms(text)
    found = [_product(term, level, is_alone=len(terms) == 1) for _, term in terms]
    total: Linear | str | None = None
    for (sign, _), (value, _) in zip(terms, found, strict=True):
        signed = _scaled("-1", value) if sign == "-" else value
        total = signed if total is None else _added(total, signed)
    assert total is not None
    return total, len(terms) > 1 or terms[0][0] == "-" or found[0][1]


def _terms(text: str) -> list[tuple[str, str]]:
    """Signs and terms between the outermost signs."""
    terms, depth, start, sign = [], 0, 0, "+"
    place = 0
    while place < len(text):
        environment = _ENVIRONMENT.match(text, place)
        if environment:
            place = environment.end()
            continue
        match = _BRACKET.match(text, place)
        mark = match[0] if match else text[place]
        depth += (mark in ("(", "[", "{", "\\{", "\\langle")) - (
            mark in (")", "]", "}", "\\}", "\\rangle")
        )
        if depth == 0 and mark in "+-" and not text[:place].rstrip().endswith(("*", "/", "^")):
            if text[start:place].strip():
                terms.append((sign, text[start:place].strip()))
            elif terms or sign == "-":
                raise _NotLinear(text)
            start, sign = place + 1, mark
        place += len(mark)
    terms.append((sign, text[start:].strip()))
    return terms


def _product(text: str, level: int, *, is_alone: bool) -> tuple[Linear | str, bool]:
    factors: list[Linear | str] = []
    scalar, place, has_operation = "", 0, False
    while place < len(text):
        atom = _atom(text, place, level)
        if atom is None:
            step = _scalar_end(text, place)
            scalar += text[place:step]
            place = step
            continue
        value, end, is_worked = atom
        _check_before(scalar, value, is_alone=is_alone)
        factors += [*_scalar_factor(scalar), value]
        scalar, place, has_operation = "", end, has_operation or is_worked
    factors += _scalar_factor(scalar)
    if not factors:
        raise _NotLinear(text)
    result = factors[0]
    for factor in factors[1:]:
        result = _multiplied(result, factor)
    return result, has_operation or len(factors) > 1


def _check_before(scalar: str, value: Linear, *, is_alone: bool) -> None:
    """Raises for what may be a function or a point: `f(1,2)`, and `t(1,2)` by itself."""
    before = scalar.rstrip(" *")
    if not value.is_tuple or before != scalar.rstrip():
        return
    if _NAME_BEFORE.search(before) or (is_alone and _LETTER_BEFORE.search(before)):
        raise _NotLinear(scalar)


def _scalar_factor(text: str) -> list[str]:
    text = text.strip()
    text = f"1{text}" if text.startswith("/") else text.strip("* ")
    if not text:
        return []
    if parse_number(text) is None and parse_expression(text) is None:
        raise _NotLinear(text)
    return [text]


def _scalar_end(text: str, place: int) -> int:
    """End of the next token; a group in brackets is one token."""
    match = _BRACKET.match(text, place)
    if match is None or match[0] not in ("(", "[", "{"):
        command = re.compile(r"\\[A-Za-z]+").match(text, place)
        return command.end() if command else place + 1
    return _group_end(text, place)


def _group_end(text: str, place: int) -> int:
    end = group_end(text, place)
    if end is None:
        raise _NotLinear(text)
    return end


def _atom(text: str, place: int, level: int) -> tuple[Linear, int, bool] | None:
    """A matrix or vector with its powers, where it ends, and whether these were worked out."""
    environment = _ENVIRONMENT.match(text, place)
    if text.startswith("\\frac{", place):
        return _quotient(text, place, level)
    opening = next((mark for mark in _CLOSING if text.startswith(mark, place)), None)
    is_worked = False
    if environment:
        rows = environment["body"].strip().removesuffix("\\\\").split("\\\\")
        value = Linear(tuple(tuple(c.strip() for c in row.split("&")) for row in rows), False)
        end = environment.end()
    elif opening:
        end = _group_end(text, place)
        inner = text[place + len(opening) : end - len(_CLOSING[opening])]
        if not text[place:end].endswith(_CLOSING[opening]):
            raise _NotLinear(text)
        items = split_at(inner, ",")
        if len(items) > 1 and "\\begin" not in inner:
            value = Linear(tuple((item.strip(),) for item in items), True)
        elif "\\begin" in inner or "," in inner:
            found, is_worked = _sum(inner, level + 1)
            if isinstance(found, str):
                raise _NotLinear(text)
            value = found
        else:
            return None
    else:
        return None
    _check_entries(value)
    transposed, raised = _TRANSPOSED.match(text, end), _RAISED.match(text, end)
    if transposed:
        # A tuple is a row there, and its transpose a column.
        rows = value.rows if value.is_tuple else tuple(zip(*value.rows, strict=True))
        return Linear(rows, False), transposed.end(), True
    if raised:
        return _power(value, int(raised[1] or raised[2])), raised.end(), True
    if text[end : end + 1] in ("^", "_", "'", "!"):
        raise _NotLinear(text)
    return value, end, is_worked


def _quotient(text: str, place: int, level: int) -> tuple[Linear, int, bool] | None:
    """A fraction with a matrix or vector above."""
    middle = _group_end(text, place + 5)
    top = text[place + 6 : middle - 1]
    if not text.startswith("{", middle) or ("\\begin" not in top and "," not in top):
        return None
    value, _ = _sum(top, level + 1)
    end = _group_end(text, middle)
    result = _scaled(f"\\frac{{1}}{text[middle:end]}", value)
    if isinstance(result, str):
        raise _NotLinear(text)
    return result, end, True


def _check_entries(value: Linear) -> None:
    width = len(value.rows[0])
    cells = sum(value.rows, ())
    if any(len(row) != width for row in value.rows) or len(cells) > MAX_ENTRIES:
        raise _NotLinear("rows")
    if any(parse_number(cell) is None and parse_expression(cell) is None for cell in cells):
        raise _NotLinear("cells")


def _power(value: Linear, exponent: int) -> Linear:
    if value.is_tuple or exponent > MAX_POWER:
        raise _NotLinear("power")
    result: Linear | str = value
    for _ in range(exponent - 1):
        result = _multiplied(result, value)
    assert isinstance(result, Linear)
    return result


def _scaled(scalar: str, value: Linear | str) -> Linear | str:
    if isinstance(value, str):
        return _times(scalar, value)
    rows = tuple(tuple(_times(scalar, cell) for cell in row) for row in value.rows)
    return Linear(rows, value.is_tuple)


def _multiplied(first: Linear | str, second: Linear | str) -> Linear | str:
    if isinstance(first, str):
        return _scaled(first, second)
    if isinstance(second, str):
        return _scaled(second, first)
    if first.is_tuple or len(first.rows[0]) != len(second.rows):
        raise _NotLinear("the shapes of the matrices do not fit")
    columns = tuple(zip(*second.rows, strict=True))
    rows = tuple(tuple(_dot(row, column) for column in columns) for row in first.rows)
    return Linear(rows, False)


def _added(first: Linear | str, second: Linear | str) -> Linear | str:
    if isinstance(first, str) and isinstance(second, str):
        return _plus(first, second)
    if isinstance(first, str) or isinstance(second, str):
        raise _NotLinear("a number and a matrix")
    if [*map(len, first.rows)] != [*map(len, second.rows)]:
        raise _NotLinear("the matrices have different shapes")
    rows = tuple(
        tuple(map(_plus, row, other)) for row, other in zip(first.rows, second.rows, strict=True)
    )
    return Linear(rows, first.is_tuple and second.is_tuple)


def _dot(row: tuple[str, ...], column: tuple[str, ...]) -> str:
    total = "0"
    for one, other in zip(row, column, strict=True):
        total = _plus(total, _times(one, other))
    return total


def _times(one: str, other: str) -> str:
    values = parse_number(one), parse_number(other)
    if values[0] is not None and values[1] is not None:
        return _spelled(values[0] * values[1])
    return _bounded(f"({one})*({other})")


def _plus(one: str, other: str) -> str:
    values = parse_number(one), parse_number(other)
    if values[0] is not None and values[1] is not None:
        return _spelled(values[0] + values[1])
    return _bounded(other if one == "0" else f"({one})+({other})")


def _spelled(value: Fraction) -> str:
    sign = "-" if value < 0 else ""
    if value.denominator == 1:
        return str(value)
    return f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _bounded(text: str) -> str:
    if len(text) > MAX_ENTRY_CHARS:
        raise _NotLinear("length")
    return text
