"""Names, left-hand sides, chains of equations and roundings around a value.

Runs in grading processes. `x=5`, `f(2)=5`, `\\cos A=5`, `a+b=5` and `n=3+2=5` all give the value 5.
An answer that states two different values states none.
"""

import functools
import re
from dataclasses import dataclass
from fractions import Fraction

from verification.math.applications import settled_pairs, without_application_marks
from verification.math.expression import parse_expression
from verification.math.numbers import parse_number
from verification.math.split import enclosed, split_at, split_words
from verification.math.trees import Tree, difference, num, symbols_of
from verification.math.units import in_base_units, split_unit
from verification.math.values import real_value, same_value

# Variables, segments (AB) and angles.
_NAME = re.compile(
    r"[A-Za-z](?:_(?:[0-9A-Za-z]|\{[^{}]*\}))?'*|[A-Z]{2,3}|m?\\angle ?[A-Z]{1,3}"
    r"|\\[a-zA-Z]+ ?(?:_[0-9A-Za-z])?"
)
_FUNCTION = re.compile(r"[A-Za-z]'*(?:_[0-9A-Za-z])?(?:\^\{?-1\}?)?\([A-Za-z](?:,[A-Za-z])*\)")
_LABEL = re.compile(r"\\text\{[^{}]*\}|[A-Za-z ]{4,}|\\frac\{d[a-z]?\}\{d[a-z]\}[a-z]?")
# A term of a sequence, as a_n.
_TERM = re.compile(r"([A-Za-z])\(([nkm])\)")
_COORDINATES = re.compile(r"\([A-Za-z](?:, ?[A-Za-z]){1,3}\)")
_RELATION = re.compile(r"<|>|(?<![0-9)])!=|\\(?:le|ge|ne|in|equiv|subset)(?![a-z])")
_ENVIRONMENT = re.compile(r"\\begin\{.*\\end\{[a-zA-Z]{1,12}\}", re.DOTALL)
_NO_LABEL = re.compile(
    r"(?<![A-Za-z])(?:or|and|not|if|either|maybe|than|wrong|no|but|instead|wait|rather|also|perhaps"
    r"|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve)(?![A-Za-z])"
    r"|\\text\{[^{}]*[0-9]",
    re.IGNORECASE,
)
# A label that states a value itself.
_VERB = re.compile(
    r"(?<![A-Za-z])(?:is|are|was|equals?|gives?|becomes?)(?![A-Za-z]) ?\}? ?[-+(]{0,2}"
    r"(?:[0-9.]|\\(?:frac|sqrt|pi)(?![a-z]))"
)
# A derivation states several things, and which of them is the answer is left open.
_ARROWS = (
    "\\Rightarrow",
    "\\implies",
    "\\iff",
    "\\Leftrightarrow",
    "\\rightarrow",
    "\\to",
    "\\therefore",
)
_WORDS = re.compile(r"\\text\{[^{}]*[A-Za-z]{2}")
_IDLE_WORDS = frozenset("the a an is of total answer value final".split())
_CONSTANTS = ("e", "i", "\\pi", "\\infty", "\\emptyset", "\\reals")
# An equation in these is a curve or a condition, not the value of its left side.
_CARTESIAN = frozenset("xyz")
_COORDINATE_NAMES = frozenset({"x", "y", "z", "r", "theta", "rho"})
_DECIMAL = re.compile(
    r"-?(?P<whole>[0-9,]*)(?:\.(?P<places>[0-9]+))?"
    r"(?: ?\* ?10\^(?:\{(?P<braced>-?[0-9]{1,3})\}|(?P<bare>[0-9])))?"
)
_SEGMENT = re.compile(r"(?:\\(?:overline|bar) ?\{?|\|)?([A-Z])([A-Z])(?:\}|\|)?")
_ANGLE = re.compile(r"m?\\angle ?([A-Z])([A-Z])([A-Z])")
_TRIGONOMETRY = frozenset("sin cos tan cot sec csc".split())
MAX_ROUNDING = Fraction(1, 20)


@dataclass(frozen=True)
class Assignment:
    """A name and its value; `f(x)=x^2` too. An empty name carries no information."""

    name: str
    value: str


def is_relation(text: str) -> bool:
    """Whether an inequality or membership sign is outside all brackets."""
    if not _RELATION.search(text):
        return False
    text = _ENVIRONMENT.sub("", text)
    # A mark in the place of each relation, so that \\infty is not taken for one.
    return len(split_at(_RELATION.sub("<", text), "<")) > 1


@functools.lru_cache(maxsize=256)
def read_assignment(text: str) -> Assignment | None:
    """The name and value of `x=5`, `5=x`, `f(x)=x^2`, `a+b=5`, `\\text{Area}=5`; or None."""
    text = settle_approximation(text)
    sides = [side.strip() for side in split_at(text, "=")]
    if len(sides) < 2 or is_relation(text) or not all(sides) or contradicts_itself(text):
        return None
    names = [side for side in sides if is_name(side)]
    values = [side for side in sides if not is_name(side)]
    if names and len(sides) > 2 and is_name(sides[0].removeprefix("-")) and sides[0][0] == "-":
        return None
    if names:
        # x=y names y with another letter; AB=BC=5 names one value twice.
        return Assignment("=".join(names if values else names[:1]), (values or sides)[-1])
    first, last = sides[0], sides[-1]
    if _is_label(first, last):
        return Assignment(_label_name(first), last)
    if len(sides) == 2 and _is_label(last, first):
        return Assignment(_label_name(last), first)
    return None


def is_name(text: str) -> bool:
    """Whether a text names a value: a variable, a segment, an angle, `f(x)`."""
    text = without_application_marks(text)
    if text in _CONSTANTS:
        return False
    return bool(_NAME.fullmatch(text) or _FUNCTION.fullmatch(text))


def same_name(first: str, second: str) -> bool:
    """Whether two names can be one: AB and BA, `\\text{Area}` and A, AB=BC and BC."""
    if "=" in first or "=" in second:
        one, other = ({_canonical(name) for name in text.split("=")} for text in (first, second))
        return one == other or (min(len(one), len(other)) == 1 and bool(one & other))
    one, other = _canonical(first), _canonical(second)
    if one == other:
        return True
    short, long = sorted((one, other), key=len)
    is_word = long.startswith("\\text ") and len(short) == 1
    return is_word and short.lower() == long.removeprefix("\\text ")[:1]


def same_head(first: str, second: str) -> tuple[str, str] | None:
    """Arguments of two names that are one function of different letters: `f(x)` and `f(t)`."""
    pair = [without_application_marks(name) for name in (first, second)]
    if not all(map(_FUNCTION.fullmatch, pair)):
        return None
    (head, _, inside), (other_head, _, other_inside) = (name.partition("(") for name in pair)
    arguments = inside.removesuffix(")"), other_inside.removesuffix(")")
    is_single = all(len(argument) == 1 for argument in arguments)
    return arguments if head == other_head and is_single else None


def contradicts_itself(text: str) -> bool:
    """Whether a chain states two values: `x=6=5`, `2+5=8`, `5\\approx6`."""
    if "=" not in text and "\\approx" not in text:
        return False
    if not _is_single(text) or is_relation(text):
        return False
    if len(split_at(text, *_ARROWS)) > 1:
        return True
    sides = [side.strip() for side in split_at(text, "=")]
    if any(_is_wrong_rounding(side) for side in sides):
        return True
    exact = [split_at(side, "\\approx")[0].strip() for side in sides]
    values = [side for side in exact if side and not is_name(side)]
    if _LABEL.fullmatch(exact[0]) and not _NO_LABEL.search(exact[0]) and len(exact) > 2:
        values = values[1:]
    if len(exact) < 2 or len(values) < 2:
        return False
    last = values[-1]
    return any(_differ(side, last, is_chain=len(exact) > 2) for side in values[:-1])


def settle_approximation(text: str) -> str:
    """`\\sqrt{2} \\approx 1.41` means its exact side, `x \\approx 1.41` the number given."""
    if "\\approx" not in text or not _is_single(text):
        return text
    settled = []
    for side in split_at(text, "="):
        parts = [part.strip() for part in split_at(side, "\\approx")]
        if not parts[0]:
            # Nothing exact is said.
            return text
        parts = [part for part in parts if part]
        is_label = len(parts) > 1 and _label_name(parts[0]) and _is_label(parts[0], parts[1])
        is_named = is_label or is_name(parts[0])
        settled += parts[:2] if is_named else parts[:1]
    return "=".join(settled)


def coordinates_named(text: str) -> str | None:
    """`(x,y)=(1,2)` as `x=1,y=2`; None for anything else."""
    sides = [side.strip() for side in split_at(text, "=")]
    if len(sides) != 2:
        return None
    names, values = sides if _COORDINATES.fullmatch(sides[0]) else sides[::-1]
    inside = enclosed(values)
    if not _COORDINATES.fullmatch(names) or inside is None:
        return None
    pair = names[1:-1].split(","), split_at(inside, ",")
    if len(pair[0]) != len(pair[1]):
        return None
    return ",".join(f"{name.strip()}={value.strip()}" for name, value in zip(*pair, strict=True))


def _is_single(text: str) -> bool:
    """Whether a text states one thing, not several after commas or words."""
    if len(split_at(text, ";", ", ", "),")) > 1:
        return False
    return all(len(split_words(text, word)) == 1 for word in ("or", "and"))


def _is_label(left: str, value: str) -> bool:
    """Whether an equation only names the value of its right side."""
    if _VERB.search(left):
        return False
    if _LABEL.fullmatch(left):
        return not _NO_LABEL.search(left)
    if _COORDINATES.fullmatch(left):
        return True
    tree, value_tree = _left_tree(left), _tree(split_unit(value)[0])
    if value_tree == ("num", 0) and _is_condition(left, tree):
        return False
    if tree is None:
        is_list = len(split_at(left, ",", ";")) > 1
        parts = split_at(left, ":")
        is_list = is_list or (len(parts) > 1 and not all(is_name(part.strip()) for part in parts))
        return not (is_list or left[0].isdecimal() or _NO_LABEL.search(left)) and (
            re.search("[A-Za-z]", left) is not None
        )
    names = _free_names(tree)
    if not symbols_of(tree):
        # 2+5=7: that it is true has been seen.
        return value_tree is not None and not symbols_of(value_tree)
    if value_tree is not None and symbols_of(value_tree):
        return tree[0] == "apply" and all(
            argument[0] == "sym" or not symbols_of(argument) for argument in tree[2:]
        )
    # 210-29b=7 is to be solved, 10m+n=7 is a value that was asked for.
    if tree[0] == "prod" and len(names) == 1 and not all(map(symbols_of, tree[1:])):
        # So is -n=5.
        return any(child[0] != "sym" and symbols_of(child) for child in tree[1:])
    has_number = tree[0] == "sum" and not all(symbols_of(child) for child in tree[1:])
    # p+q+r=12 is asked for; r=2\\cos\\theta is a curve.
    is_curve = bool(names & _CARTESIAN) or (bool(names) and names <= _COORDINATE_NAMES)
    return not is_curve and not has_number


def _is_condition(left: str, tree: Tree | None) -> bool:
    """Whether `left = 0` is an equation in its letters rather than a value that was asked for."""
    if _SEGMENT.fullmatch(left):
        return False
    if tree is None:
        return len(split_at(left.lstrip("-"), "+", "-", "*")) > 1
    # \sin x=0 is to be solved, \cos A=0 tells of an angle.
    return bool(_free_names(tree) or (tree[0] != "apply" and symbols_of(tree) & _CARTESIAN))


def _left_tree(left: str) -> Tree | None:
    """Tree of a left-hand side, where `P(2)` is a value of P."""
    return parse_expression(settled_pairs(left, "")[-1][0])


def _free_names(tree: Tree) -> frozenset[str]:
    """Symbols outside functions."""
    # |z| is asked for where a complex number is.
    is_modulus = tree == ("call", "abs", ("sym", "z"))
    if is_modulus or tree[0] == "apply" or (tree[0] == "call" and tree[1] in _TRIGONOMETRY):
        return frozenset()
    if tree[0] == "sym":
        return frozenset({tree[1]})
    parts = [_free_names(child) for child in tree[1:] if isinstance(child, tuple)]
    return frozenset().union(*parts)


def _label_name(left: str) -> str:
    tree = _left_tree(left)
    is_value = tree is not None and not symbols_of(tree)
    return "" if is_value or _COORDINATES.fullmatch(left) else left


def _canonical(name: str) -> str:
    name = without_application_marks(name).strip()
    segment, angle = _SEGMENT.fullmatch(name), _ANGLE.fullmatch(name)
    if segment:
        return "".join(sorted(segment.groups()))
    if angle:
        ends = sorted((angle[1], angle[3]))
        return f"\\angle {ends[0]}{angle[2]}{ends[1]}"
    term = _TERM.fullmatch(name)
    if term:
        return f"{term[1]}_{term[2]}"
    if _LABEL.fullmatch(name) and not name.startswith("\\frac"):
        words = name.removeprefix("\\text{").removesuffix("}").lower().replace("-", " ").split()
        return "\\text " + " ".join(word for word in words if word not in _IDLE_WORDS)
    return name.removeprefix("m").replace(" ", "") if "\\angle" in name else name.replace(" ", "")


def _differ(side: str, last: str, *, is_chain: bool) -> bool:
    """Whether two sides of a chain are known to be different values."""
    (text, unit), (other_text, other_unit) = split_unit(side), split_unit(last)
    tree, other = _tree(text), _tree(other_text)
    if is_chain and _WORDS.search(text):
        return True
    if tree is None or other is None:
        brackets = ("(", "[", "\\{")
        is_pair = side.startswith(brackets) and last.startswith(brackets)
        return is_pair and is_chain and side.replace(" ", "") != last.replace(" ", "")
    names, other_names = symbols_of(tree), symbols_of(other)
    if names or other_names:
        # A = \frac12 bh = 6 puts numbers into a formula, and y = 2x is an equation.
        return is_chain and names == other_names and same_value(tree, other) is False
    if unit is not None and other_unit is not None:
        if unit.dimension != other_unit.dimension:
            return False
        tree, other = in_base_units(tree, unit), in_base_units(other, other_unit)
    elif unit is not None or other_unit is not None:
        known = unit or other_unit
        if known is not None and known.dimension in ("", "deg^1"):
            scaled = in_base_units(tree, unit), in_base_units(other, other_unit)
            return same_value(*scaled) is not True and same_value(tree, other) is not True
    return same_value(tree, other) is not True


def _tree(text: str) -> Tree | None:
    value = parse_number(text)
    return parse_expression(text) if value is None else num(value)


def _is_wrong_rounding(side: str) -> bool:
    """Whether a side states that a number is about another to which it does not round."""
    parts = [part.strip() for part in split_at(side, "\\approx")]
    parts = [part for part in parts if part]
    if len(parts) < 2:
        return False
    if is_name(parts[0]):
        parts = parts[1:]
    digits, unit = split_unit(parts[0])
    tree = _tree(digits)
    if tree is None or real_value(tree) is None:
        return False
    return not all(_is_rounded(tree, part, has_unit=unit is not None) for part in parts[1:])


def _is_rounded(exact: Tree, text: str, *, has_unit: bool) -> bool:
    digits, unit = split_unit(text)
    value = parse_number(digits)
    if value is None:
        tree = parse_expression(digits)
        return tree is not None and _is_near(exact, tree, Fraction(1, 100))
    factor = unit.factor if unit is not None and unit.dimension == "" and not has_unit else 1
    value = Fraction(value * factor)
    match = _DECIMAL.fullmatch(digits)
    if match is None:
        return _is_near(exact, num(value), Fraction(1, 100))
    places = len(match["places"] or "")
    power = int(match["braced"] or match["bare"] or 0)
    step = abs(Fraction(10) ** (power - places) * factor)
    if not places and not power and _is_near(exact, num(value), MAX_ROUNDING):
        zeros = len(match["whole"]) - len(match["whole"].rstrip("0,"))
        step = Fraction(10) ** min(zeros, 9) * factor
    # Rounded, or cut off after some decimals.
    cut = (value, value + step) if value > 0 else (value - step, value)
    is_cut = bool(places) and _is_within(exact, *cut)
    return is_cut or _is_within(exact, value - step / 2, value + step / 2)


def _is_within(exact: Tree, low: Fraction, high: Fraction) -> bool:
    number = real_value(exact)
    ends = [real_value(num(end)) for end in (low, high)]
    if number is None or ends[0] is None or ends[1] is None:
        return False
    return not (number < ends[0] or ends[1] < number)


def _is_near(exact: Tree, other: Tree, share: Fraction) -> bool:
    """Whether two numbers differ by no more than a share of the first."""
    error = real_value(("call", "abs", difference(exact, other)))
    most = real_value(("prod", num(share), ("call", "abs", exact)))
    return error is not None and most is not None and not most < error
