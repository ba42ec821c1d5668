"""Upper bounds of the sizes of a text's values, without computing the values.

Pure string code in time linear in the text; runs in the verifier and its grading processes. One
pass keeps, for every value, an upper bound of its size in bits: of numerator and denominator
together. So `(x^2+1)^2` and `7^{12345}` are harmless and `9^{9^9}` is not.
"""

import functools
import math
import re
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_VALUE_BITS = 1 << 16
"""A text that needs a longer number is explosive."""
_HUGE = 1e30
_TOKEN = re.compile(
    r"(?P<number>(?:[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|\.[0-9]+)(?:[eE](?P<e>[+-]?[0-9]+))?)"
    r"|(?P<command>\\[A-Za-z]+|\\.)|(?P<sign>[-+*/^_!,;=<>|()\[\]{}])|(?P<letter>[A-Za-z])",
    re.DOTALL,
)
# Without these a text of bounded length asks for no long number.
_GROWTH = re.compile(r"[\^!]|[0-9][eE]|\\binom")
# Their values are small for all arguments.
_TAMING = frozenset(
    "\\ln \\log \\lg \\sin \\cos \\tan \\cot \\sec \\csc \\arcsin \\arccos \\arctan".split()
)
_CONSTANTS = {"e": 1.45, "i": 0.0, "\\pi": 1.66}
_ENDS_OF_TERMS = frozenset("+ - , ; = < > |".split()) | {"\\le", "\\ge", "\\ne", "\\approx"}


class _Size(NamedTuple):
    bits: float
    """Upper bound of the bits of numerator and denominator."""
    magnitude: float
    """Upper bound of log2 of the absolute value."""
    is_symbolic: bool


_ONE = _Size(0.0, 0.0, False)
# Variables are evaluated at small numbers, and stay variables as exponents.
_SYMBOL = _Size(3.0, 3.0, True)


@dataclass
class _Group:
    """Text between two brackets, as far as it has been read."""

    total: _Size | None = None
    product: _Size | None = None
    tower: list[_Size] = field(default_factory=list)
    """A base and the exponents behind it, until the factor ends."""
    role: str = "factor"
    """Role of the next operand: factor, exponent, divisor, skipped, or an argument's command."""
    function: str = ""
    """A function whose exponent or base comes before its argument, as in `\\log_2 x`."""
    top: _Size | None = None
    """First argument of `\\frac` or `\\binom`, until the second is read."""


@functools.lru_cache(maxsize=1024)
def is_explosive(text: str) -> bool:
    """Whether writing out the value of a normalised text could take unbounded time and memory."""
    if not _GROWTH.search(text):
        return False
    stack = [_Group()]
    largest = 0.0
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token in ("(", "[", "{", "\\{"):
            stack.append(_Group())
        elif token in (")", "]", "}", "\\}"):
            inner = _finish(stack.pop()) if len(stack) > 1 else _ONE
            largest = max(largest, _take(stack[-1], inner))
        elif match["sign"] or token in _ENDS_OF_TERMS:
            largest = max(largest, _apply_sign(stack[-1], token))
        elif token in _TAMING or token in ("\\frac", "\\binom"):
            stack[-1].role = token if stack[-1].role == "factor" else stack[-1].role
        elif token != "\\sqrt":
            largest = max(largest, _take(stack[-1], _operand(match)))
        if largest > MAX_VALUE_BITS:
            return True
    while len(stack) > 1:
        inner = _finish(stack.pop())
        largest = max(largest, _take(stack[-1], inner))
    return max(largest, _finish(stack[0]).bits) > MAX_VALUE_BITS


def _operand(match: re.Match[str]) -> _Size:
    token = match.group()
    if not match["number"]:
        power = _CONSTANTS.get(token)
        return _SYMBOL if power is None else _Size(power, power, False)
    digits, _, exponent = token.lower().partition("e")
    whole, _, decimals = digits.replace(",", "").partition(".")
    scale = min(float(exponent or 0), _HUGE) if len(exponent) < 30 else _HUGE
    value = int(whole[:12] + decimals[:3] or 0)
    # One is written as 0 bits, so that its powers have none.
    bits = math.log2(max(value, 1)) + 3.33 * (max(len(whole) - 12, 0) + max(len(decimals) - 3, 0))
    magnitude = bits - 3.32 * min(len(decimals), 3) if len(whole) <= 12 else bits
    return _Size(bits + 3.33 * abs(scale), magnitude + 3.33 * scale, False)


def _take(group: _Group, operand: _Size) -> float:
    """Use an operand as the group expects it; return the bits of the result."""
    role, group.role = group.role, "factor"
    if role == "skipped":
        group.role, group.function = group.function or "factor", ""
        return operand.bits
    if role == "exponent":
        group.tower.append(operand)
        return operand.bits
    if role in ("\\frac", "\\binom") and group.top is None:
        group.top, group.role = operand, role
        return operand.bits
    if role in ("\\frac", "\\binom"):
        top, group.top = group.top or _ONE, None
        operand = _product(top, operand, sign=-1) if role == "\\frac" else _binomial(top, operand)
    elif role == "divisor":
        operand = _Size(operand.bits, -operand.magnitude, operand.is_symbolic)
    elif role in _TAMING:
        tamed = math.log2(operand.bits + 1) + 1
        operand = _Size(tamed, tamed, operand.is_symbolic)
    _end_factor(group)
    group.tower = [operand]
    return operand.bits


def _apply_sign(group: _Group, sign: str) -> float:
    if sign in ("^", "_") and group.role in _TAMING:
        group.role, group.function = "skipped", group.role
    elif sign == "^":
        group.role = "exponent"
        group.tower = group.tower or [_SYMBOL]
    elif sign == "_":
        group.role = "skipped"
    elif sign == "!":
        if group.tower:
            group.tower[-1] = _factorial(group.tower[-1])
            return group.tower[-1].bits
    elif sign in ("-", "+") and group.role != "factor":
        return 0.0
    else:
        _end_factor(group)
        if sign == "/":
            group.role = "divisor"
        elif sign != "*":
            group.total = _sum(group.total, group.product)
            group.product, group.role = None, "factor"
    return max((size.bits for size in (group.product, group.total) if size), default=0.0)


def _end_factor(group: _Group) -> None:
    while len(group.tower) > 1:
        exponent = group.tower.pop()
        group.tower[-1] = _power(group.tower[-1], exponent)
    if group.tower:
        group.product = _product(group.product or _ONE, group.tower.pop())


def _finish(group: _Group) -> _Size:
    _end_factor(group)
    return _sum(group.total, group.product) or _ONE


def _sum(first: _Size | None, second: _Size | None) -> _Size | None:
    if first is None or second is None:
        return first or second
    is_symbolic = first.is_symbolic or second.is_symbolic
    bits = min(max(first.bits, second.bits) + 1, _HUGE)
    return _Size(bits, min(max(first.magnitude, second.magnitude) + 1, _HUGE), is_symbolic)


def _product(first: _Size, second: _Size, *, sign: int = 1) -> _Size:
    bits = min(first.bits + second.bits, _HUGE)
    magnitude = max(min(first.magnitude + sign * second.magnitude, _HUGE), -_HUGE)
    return _Size(bits, magnitude, first.is_symbolic or second.is_symbolic)


def _power(base: _Size, exponent: _Size) -> _Size:
    if exponent.is_symbolic:
        return _SYMBOL
    times = 2.0 ** min(max(exponent.magnitude, -60), 100)
    bits = min(base.bits * max(times, 1), _HUGE)
    return _Size(bits, min(max(abs(base.magnitude), base.bits) * times, _HUGE), base.is_symbolic)


def _factorial(size: _Size) -> _Size:
    if size.is_symbolic:
        return _SYMBOL
    value = 2.0 ** min(max(size.magnitude, 0), 100)
    bits = min(value * math.log2(value), _HUGE)
    return _Size(bits, bits, False)


def _binomial(top: _Size, bottom: _Size) -> _Size:
    if top.is_symbolic or bottom.is_symbolic:
        return _SYMBOL
    value = 2.0 ** min(max(top.magnitude, 0), 100)
    chosen = 2.0 ** min(max(bottom.magnitude, 0), 100)
    bits = min(value, chosen * max(top.magnitude, 0), _HUGE)
    return _Size(bits, bits, False)
