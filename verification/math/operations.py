"""The operations that an expression holds, counted by kind.

Pure string code in time linear in the text; runs in the verifier and its grading processes. Texts
that our grammar reads are counted in the tree, other texts by their tokens; two texts are
comparable when both are counted the same way.
"""

import math
import re
from collections import Counter
from fractions import Fraction

from verification.math.expression import parse_expression
from verification.math.trees import MINUS_ONE, ONE, Tree, num, symbols_of

# Kinds that could be carried out as written, for any form of the reference.
SUM, PRODUCT, POWER = "sum of numbers", "product of numbers", "power of a number"
BRACKETS, REDUCIBLE, SIGN = "brackets", "reducible", "sign"
FRACTION, NESTED = "fraction of names", "power of a power"
TOP_SUM = "sum at the top"
OPEN_KINDS = frozenset({SUM, PRODUCT, POWER, BRACKETS, REDUCIBLE, SIGN, FRACTION, NESTED})
CALL = "call "

_MAX_SQUARE_ROOT = 200
_DOUBLE_SIGN = re.compile(r"[-+][({ ]*-")
_TOKEN = re.compile(
    r"\\[A-Za-z]+|\\[{}|]|[A-Za-z]+|[0-9]+(?:\.[0-9]+)?|\.[0-9]+|[^\s]"
)  # fmt: skip
_DIGIT_FRACTION = re.compile(r"\\frac\{([0-9]{1,18})\}\{([0-9]{1,18})\}")
_SLASH_FRACTION = re.compile(r"(?<![0-9.])([0-9]{1,18})/([0-9]{1,18})(?![0-9.])")
_DIGIT_ROOT = re.compile(r"\\sqrt\{([0-9]{1,18})\}")
_WORDS = re.compile(r"\\text\{[^{}]*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")
_LABELS = re.compile(r"\\(?:overline|bar|vec|hat) ?\{[^{}]*\}|_\{[^{}]*\}|_.")
_ADJACENT = re.compile(r"[0-9] (?=[0-9])(?![0-9]{3}(?![0-9])|[0-9]+/[0-9])")
_REMAINDER = re.compile(r"([0-9]{1,18}) ?(?:\\[bp]?mod|\\text\{ ?mod ?\}|mod) ?[({]?([0-9]{1,18})")
_CALLS = frozenset(
    "sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan arccot ln log exp gcd lcm "
    "sum prod int iint oint lim det binom choose cup cap setminus lfloor lceil min max arg "
    "begin to floor ceil round abs mod bmod Re Im ln lg asin acos atan nabla partial".split()
)
_TEXT_CALLS = re.compile(
    r"\\text\{ ?(gcd|lcm|max|min|det|floor|ceil|round|abs|arg|GCD|LCM|gcf|hcf|div|nCr|lg"
    r"|arcsin|arccos|arctan|Re|Im|tr|rank)\.? ?\}"
)
_DERIVATIVE = re.compile(r"\\frac\{(?:d|\\partial)[^{}]{0,9}\}\{(?:d|\\partial)|\)'|'\(")


def operations_of_both(first: str, second: str) -> tuple[Counter[str], Counter[str]]:
    """Operations of two normalised texts, counted the same way."""
    trees = parse_expression(first), parse_expression(second)
    if trees[0] is None or trees[1] is None:
        return _in_text(first), _in_text(second)
    counts = []
    for tree, text in zip(trees, (first, second), strict=True):
        assert tree is not None
        count = operations_of(tree)
        count[TOP_SUM] += tree[0] == "sum"
        count[SIGN] += len(_DOUBLE_SIGN.findall(text))
        # To the grammar of expressions d/dx is a fraction of names.
        count[CALL + "derivative"] += len(_DERIVATIVE.findall(text))
        counts.append(count)
    return counts[0], counts[1]


def operations_of(tree: Tree) -> Counter[str]:
    """Operations of a parsed expression and all its parts."""
    count: Counter[str] = Counter()
    _count(tree, count)
    return count


def literal(tree: Tree) -> Fraction | None:
    """The number or fraction of numbers that a tree writes down; None for any other."""
    if tree[0] == "num":
        return tree[1]
    if tree[0] == "pow" and tree[2] == MINUS_ONE and tree[1][0] == "num":
        return 1 / tree[1][1] if tree[1][1] else None
    if tree[0] != "prod":
        return None
    parts = [literal(child) for child in tree[1:]]
    known = [part for part in parts if part is not None]
    return math.prod(known, start=Fraction(1)) if len(known) == len(parts) else None


def _count(tree: Tree, count: Counter[str]) -> None:
    kind, children = tree[0], tree[1:]
    if kind in ("num", "sym", "const"):
        return
    if kind == "sum":
        count["sum"] += len(children) - 1
        count[SUM] += max(0, sum(literal(child) is not None for child in children) - 1)
    elif kind == "prod":
        _count_product(children, count)
        above, below = _above_and_below(children)
        children = (*above, *below)
        count[FRACTION] += any(map(symbols_of, below))
    elif kind == "pow":
        _count_power(tree, count)
        if literal(tree[2]) is not None:
            children = children[:1]
    elif kind == "call":
        children = _count_call(tree, count)
    for child in children:
        _count(child, count)


def _count_call(tree: Tree, count: Counter[str]) -> tuple[Tree, ...]:
    name, arguments = tree[1], tree[2:]
    if name == "root":
        count["root"] += 1
        degree = arguments[1]
        count[REDUCIBLE] += degree[0] == "num" and _has_power(arguments[0], degree[1])
        return arguments[:1]
    count["power" if name == "exp" else CALL + name] += 1
    return arguments


def _count_product(factors: tuple[Tree, ...], count: Counter[str]) -> None:
    above, below = _above_and_below(factors)
    ones = above.count(ONE)
    above = [factor for factor in above if factor != ONE]
    count["product"] += max(0, ones - len(below))
    tops = [f[1] for f in above if f[0] == "num"]
    bottoms = [f[1] for f in below if f[0] == "num"]
    # 0.5x and x/2 both hold one coefficient.
    has_coefficient = bool(tops) or bool(bottoms)
    names_above, names_below = len(above) - len(tops), len(below) - len(bottoms)
    count["product"] += max(0, has_coefficient + names_above - 1) + max(0, names_below - 1)
    count["product"] += max(0, len(tops) - 1) + max(0, len(bottoms) - 1)
    # Thus 3/4 of pi holds the same, however it is written.
    is_plain = len(below) == len(bottoms) and not any(f[0] == "sum" for f in above)
    count["quotient"] += bool(below) and not is_plain
    count[PRODUCT] += max(0, len(tops) - 1) + max(0, len(bottoms) - 1)
    count[BRACKETS] += sum(f[0] == "sum" for f in above) if len(above) > 1 else 0
    count["root below"] += any(_is_root(f) for tree in below for f in _factors(tree))
    top, bottom = math.prod(tops), math.prod(bottoms)
    if bottoms and bottom and (above or bottom == 1):
        is_reduced = bottom != 1 and math.gcd(top.numerator, bottom.numerator) == 1
        count[REDUCIBLE] += not is_reduced or {top.denominator, bottom.denominator} != {1}


def _above_and_below(factors: tuple[Tree, ...]) -> tuple[list[Tree], list[Tree]]:
    """Factors of a product and of its denominator, but for -1; inner products are opened."""
    above: list[Tree] = []
    below: list[Tree] = []
    for factor in factors:
        if factor[0] == "prod":
            inner = _above_and_below(factor[1:])
            above += inner[0]
            below += inner[1]
        elif factor[0] == "pow" and factor[2] == MINUS_ONE:
            below.append(factor[1])
        elif factor != MINUS_ONE:
            above.append(factor)
    return above, below


def _count_power(tree: Tree, count: Counter[str]) -> None:
    base, exponent = tree[1], tree[2]
    value = literal(exponent)
    count[FRACTION] += value is not None and value < 0 and bool(symbols_of(base))
    count["quotient"] += value is not None and value < 0 and literal(base) is None
    if value == -1:
        count["root below"] += any(_is_root(factor) for factor in _factors(base))
    elif value is not None and value.denominator > 1:
        count["root"] += 1
        count["root below"] += value < 0
        count[REDUCIBLE] += _has_power(base, value.denominator)
    else:
        count["power"] += 1
        count[POWER] += literal(base) is not None and value is not None
        count[BRACKETS] += base[0] == "sum" and value is not None
        count[NESTED] += base[0] == "pow" and value is not None


def _factors(tree: Tree) -> tuple[Tree, ...]:
    return tree[1:] if tree[0] == "prod" else (tree,)


def _is_root(tree: Tree) -> bool:
    degree = literal(tree[2]) if tree[0] == "pow" else None
    is_power = degree is not None and degree.denominator > 1
    return is_power or tree[:2] == ("call", "root")


def _has_power(tree: Tree, degree: int | Fraction) -> bool:
    """Whether a root's number holds a factor that can be taken out."""
    if tree[0] == "prod" and literal(tree) is None:
        return any(_has_power(factor, degree) for factor in _above_and_below(tree[1:])[0])
    if tree[0] != "num" or degree != int(degree) or not 2 <= degree <= 20:
        # A root of a product or power of numbers, or of a fraction, can be written shorter.
        return literal(tree) is not None or (tree[0] == "pow" and tree[2] == num(degree))
    value = abs(tree[1])
    if value in (0, 1) or value.denominator > 1:
        return True
    return _holds_power(value.numerator, int(degree))


def _holds_power(number: int, degree: int) -> bool:
    if number.bit_length() > 128:
        return False
    if degree == 2 and math.isqrt(number) ** 2 == number:
        return True
    limit = min(_MAX_SQUARE_ROOT, round(number ** (1 / degree)) + 1)
    return any(number % root**degree == 0 for root in range(2, limit + 1))


def _in_text(text: str) -> Counter[str]:
    """Operations by the tokens of a text that is no single expression."""
    count: Counter[str] = Counter()
    for match in _DIGIT_FRACTION.finditer(text):
        count[REDUCIBLE] += _is_reducible(match)
    for match in _SLASH_FRACTION.finditer(text):
        count[REDUCIBLE] += _is_reducible(match)
    count[REDUCIBLE] += sum(_holds_power(int(m[1]), 2) for m in _DIGIT_ROOT.finditer(text))
    count[SIGN] += len(_DOUBLE_SIGN.findall(text))
    # Libraries read 3 7 as a sum or as a product.
    count[SUM] += len(_ADJACENT.findall(text))
    count[CALL + "mod"] += sum(int(m[1]) >= int(m[2]) for m in _REMAINDER.finditer(text))
    count[CALL + "derivative"] += len(_DERIVATIVE.findall(text))
    for match in _TEXT_CALLS.finditer(text):
        count[CALL + match[1].lower()] += 1
    text = _LABELS.sub(" ", _WORDS.sub(",", _REMAINDER.sub("0", text)))
    text = _DIGIT_FRACTION.sub("0", _SLASH_FRACTION.sub("0", text))
    previous = ""
    for token in _TOKEN.findall(text):
        _count_token(token, previous, count)
        previous = token
    count[CALL + "abs"] += text.count("|") // 2
    # One matrix is a value.
    count[CALL + "begin"] = max(0, count[CALL + "begin"] - 1) + text.count("{vmatrix}") // 2
    return count


def _count_token(token: str, previous: str, count: Counter[str]) -> None:
    name = token.removeprefix("\\")
    is_ended = previous != "" and (previous[-1].isalnum() or previous[-1] in ")]}!%'|")
    is_command = previous.startswith("\\") and previous not in ("\\pi", "\\infty", "\\}")
    if token in ("+", "-", "\\pm"):
        count["sum"] += is_ended and not is_command
    elif token in ("*", "/"):
        count["product" if token == "*" else "quotient"] += 1
    elif token == "^":
        count["power"] += 1
        count[POWER] += previous[-1:].isdecimal()
    elif token == "\\frac":
        count["quotient"] += 1
    elif token == "\\sqrt":
        count["root"] += 1
    elif token == "!":
        count[CALL + "factorial"] += 1
    elif name == "exp":
        count["power"] += 1
    elif name in _CALLS and len(name) > 1:
        if name not in ("to", "begin") or token == "\\begin":
            count[CALL + name] += 1
            # A factor before a matrix.
            count["product"] += name == "begin" and is_ended and not is_command
    elif token == "(" and (previous[-1:].isdecimal() or previous == ")"):
        count["product"] += 1
        count[BRACKETS] += 1
    elif token.isalpha() and len(token) == 1 and previous[-1:].isdecimal():
        count["product"] += 1
    elif token[0].isalnum() and previous == ")":
        count["product"] += 1
        count[BRACKETS] += 1


def _is_reducible(match: re.Match[str]) -> bool:
    top, bottom = int(match[1]), int(match[2])
    return bottom == 0 or bottom == 1 or math.gcd(top, bottom) > 1
