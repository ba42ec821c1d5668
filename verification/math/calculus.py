"""Integrals, sums, products, limits and derivatives: read whole, evaluated by SymPy, and compared.

Runs in grading processes only: SymPy may take unbounded time and memory. The text around an
operation and the parts inside it are read by our own grammar, so a text is either read to its last
character or has no reading at all.
"""

import re
from typing import NamedTuple

from verification.math.expression import parse_expression
from verification.math.numbers import spell_repeating
from verification.math.symbolic import Unevaluated, derivative, integral, limit, repeated
from verification.math.trees import Tree, replaced
from verification.math.units import ANGLE, in_base_units, is_unit_mismatch, split_unit
from verification.math.values import same_value

MAX_OPERATIONS = 6
_OPERATION = re.compile(
    r"\\(?P<name>int|sum|prod|lim)(?![A-Za-z])"
    r"|\\frac\{(?:d|\\partial ?)(?:\^\{?(?P<order>[1-9])\}?)?\}"
    r"\{(?:d|\\partial) ?(?P<variable>[a-z])(?:\^\{?(?P<again>[1-9])\}?)?\}"
)
_NAME = r"(?:[A-Za-z]|\\(?:alpha|beta|theta|phi|lambda|mu|omega|tau|sigma)) ?"
_DIFFERENTIAL = re.compile(rf"d ?({_NAME})(?![A-Za-z])")
_LAST_DIFFERENTIAL = re.compile(rf"(.*?) ?(?<![\\A-Za-z])d ?({_NAME})", re.DOTALL)
_FROM = re.compile(rf"({_NAME})=(.+)", re.DOTALL)
_TOWARDS = re.compile(rf"({_NAME})\\to(?![A-Za-z]) ?(.+?)(\^\{{?[+-]\}}?)?", re.DOTALL)
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
Marks = tuple[str, ...]
_OPENING, _CLOSING = ("{", "(", "[", "\\{"), ("}", ")", "]", "\\}")
# n2^{n-1} is a product; x2 alone may be a name.
_POWER_BEHIND_NAME = re.compile(r"(?<![\\A-Za-z_^])([A-Za-z])(?=[0-9]+\^)")


class NotRead(ValueError):
    """The text holds something other than the operations of this module."""


class _Operation(NamedTuple):
    """An operation's value, and the end of its text."""

    value: Tree
    end: int


def has_operation(text: str) -> bool:
    """Whether a normalised text holds an operation of this module."""
    return _OPERATION.search(text) is not None


def same_calculus(first: str, second: str, *, accept_missing_unit: bool = True) -> bool | None:
    """Whether two normalised texts have one value; None when one is not read, or not evaluated."""
    (first, unit), (second, other_unit) = split_unit(first), split_unit(second)
    if is_unit_mismatch(unit, other_unit):
        return False
    known = unit or other_unit
    is_number = known is not None and known.dimension in ("", ANGLE)
    if unit != other_unit and None in (unit, other_unit) and not (accept_missing_unit or is_number):
        return None
    try:
        values = _read(first), _read(second)
    except (NotRead, Unevaluated, RecursionError):
        return None
    if unit == other_unit:
        return same_value(*values)
    if None in (unit, other_unit):
        is_same = same_value(*values) if accept_missing_unit else False
        if is_same or not is_number:
            return is_same
    return same_value(in_base_units(values[0], unit), in_base_units(values[1], other_unit))


def _read(text: str) -> Tree:
    """Tree of a text whose operations are evaluated, the last and innermost one first."""
    text = _POWER_BEHIND_NAME.sub(r"\1*", spell_repeating(text))
    values: dict[Tree, Tree] = {}
    for count in range(MAX_OPERATIONS):
        found = [*_OPERATION.finditer(text)]
        if not found:
            return _parse(text, values)
        match = found[-1]
        operation = _operation(text, match, values)
        name = f"Xi_{9000 + count}"
        values["sym", name] = operation.value
        text = f"{text[: match.start()]}{{\\Xi_{{{name[3:]}}}}}{text[operation.end :]}"
    raise NotRead(text)


def _parse(text: str, values: dict[Tree, Tree]) -> Tree:
    tree = parse_expression(text.strip())
    if tree is None:
        raise NotRead(text)
    return replaced(tree, values)


def _operation(text: str, match: re.Match[str], values: dict[Tree, Tree]) -> _Operation:
    if match["variable"]:
        order = match["order"] or "1"
        if order != (match["again"] or "1"):
            raise NotRead(text)
        body, end = _term(text, match.end())
        if text.startswith(("+", "-"), end):
            # d/dx x^2 + 1 is ambiguous: the derivative of one term or of both.
            raise NotRead(text)
        return _Operation(derivative(_parse(body, values), match["variable"], int(order)), end)
    below, above, start = _scripts(text, match.end())
    if match["name"] == "int":
        body, name, end = _integrand(text, start)
        bounds = _parse(below, values), _parse(above, values)
        return _Operation(integral(_parse(body, values), name, *bounds), end)
    if match["name"] == "lim":
        towards = _TOWARDS.fullmatch(below)
        if towards is None or above:
            raise NotRead(text)
        body, end = _terms(text, start)
        side = (towards[3] or "").strip("^{}")
        place = _parse(towards[2], values)
        return _Operation(limit(_parse(body, values), towards[1].strip(" \\"), place, side), end)
    bound = _FROM.fullmatch(below)
    if bound is None:
        raise NotRead(text)
    body, end = _term(text, start)
    bounds = _parse(bound[2], values), _parse(above, values)
    kind = "sum" if match["name"] == "sum" else "prod"
    return _Operation(repeated(kind, _parse(body, values), bound[1].strip(" \\"), *bounds), end)


def _scripts(text: str, start: int) -> tuple[str, str, int]:
    """Text below and above an operator, and the start of its body."""
    scripts = {"_": "", "^": ""}
    while start < len(text) and text[start] in scripts and not scripts[text[start]]:
        mark = text[start]
        end = _group_end(text, start + 1)
        scripts[mark] = text[start + 1 : end].removeprefix("{").removesuffix("}").strip()
        start = end
    return scripts["_"], scripts["^"], start


def _group_end(text: str, start: int, *, brackets: tuple[Marks, Marks] = (("{",), ("}",))) -> int:
    """End of the token, or of the group in these brackets, that starts here."""
    depth = 0
    for token in _TOKEN.finditer(text, start):
        depth += (token[0] in brackets[0]) - (token[0] in brackets[1])
        if depth == 0 and token[0] != " ":
            return token.end()
    raise NotRead(text)


def _term(text: str, start: int) -> tuple[str, int]:
    """The product that starts here, and its end: a sign, a closing bracket or the text's end."""
    depth, is_sign = 0, True
    for token in _TOKEN.finditer(text, start):
        mark = token[0]
        depth += (mark in _OPENING) - (mark in _CLOSING)
        if depth < 0 or (depth == 0 and mark in ("+", "-") and not is_sign):
            return text[start : token.start()], token.start()
        is_sign = (is_sign and mark in (" ", "-", "+")) or mark in ("^", "*", "/")
    return text[start:], len(text)


def _terms(text: str, start: int) -> tuple[str, int]:
    """The sum that starts here: behind a limit, later terms are either meant too or constant."""
    body, end = _term(text, start)
    while text.startswith(("+", "-"), end):
        end = _term(text, end)[1]
    return text[start:end], end


def _integrand(text: str, start: int) -> tuple[str, str, int]:
    """The integrand that starts here, its variable, and the end of its differential."""
    position = start
    while position < len(text):
        differential = _DIFFERENTIAL.match(text, position)
        if differential:
            body = text[start:position].strip() or "1"
            return body, differential[1].strip(" \\"), differential.end()
        if text[position] == " ":
            position += 1
            continue
        end = _group_end(text, position)
        if text.startswith("\\frac{", position):
            middle = _group_end(text, position + 5)
            top, bottom = text[position + 6 : middle - 1], _group_end(text, middle)
            inner = _LAST_DIFFERENTIAL.fullmatch(top)
            if inner:
                rest = f"\\frac{{{inner[1].strip() or '1'}}}{text[middle:bottom]}"
                return text[start:position] + rest, inner[2].strip(" \\"), bottom
            end = bottom
        elif text[position] in ")]}":
            raise NotRead(text)
        elif text[position] in "([":
            end = _group_end(text, position, brackets=(_OPENING, _CLOSING))
        position = end
    raise NotRead(text)
