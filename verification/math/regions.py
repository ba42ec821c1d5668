"""Subsets of the real line: intervals, unions, inequalities and their notations.

Runs in grading processes. Two regions are compared by membership: their endpoints cut the line
into points and gaps, and both must contain the same ones. So unions, overlaps, complements and
set differences need no normal form.
"""

import math
import re
from dataclasses import dataclass, field, replace

from verification.math.expression import parse_expression
from verification.math.inequalities import solution
from verification.math.split import enclosed, split_at, split_words
from verification.math.trees import Tree, difference, symbols_of
from verification.math.values import Real, real_value

MAX_ENDPOINTS = 60
_RELATION = re.compile(r"\\le(?![a-z])|\\ge(?![a-z])|\\ne(?![a-z])|<=|>=|!=|<|>|=")
_SPELLINGS = {"\\le": "<=", "\\ge": ">=", "\\ne": "!="}
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!=", "=": "="}
_VARIABLE = re.compile(r"[A-Za-z](?:_[0-9A-Za-z])?|\\(?:theta|alpha|beta|lambda|phi|mu|delta) ?")
# In x > a the parameter is a.
_UNKNOWNS = frozenset("xyzt")
_DISTANCE = re.compile(r"\|(?P<name>[A-Za-z])(?P<shift>[+-][^|]{1,30}|)\|")
_MEMBERSHIP = re.compile(r"(?P<name>[^\\]{1,9}|\\[a-z]+ ?)\\in(?![a-z]) ?(?P<region>.+)", re.DOTALL)
_EXCLUDED_PAIR = re.compile(r"(\\ne) ?\\pm ?([^,;]{1,30})$")
_BUILDER = re.compile(r"([^|:]{1,30})[|:](.+)", re.DOTALL)


@dataclass(frozen=True)
class Endpoint:
    """End of an interval: its text, and its value if it has one."""

    text: str
    value: Real | float | None
    """A float is an infinity."""


@dataclass(frozen=True)
class Region:
    """A boolean combination of intervals: kind "interval", "or", "and", "minus"."""

    kind: str
    parts: tuple["Region", ...] = ()
    low: Endpoint | None = None
    high: Endpoint | None = None
    is_low_in: bool = False
    is_high_in: bool = False
    variable: str = field(default="", compare=False)

    def endpoints(self) -> list[Endpoint]:
        """All endpoints, in the order of the text."""
        if self.low is not None and self.high is not None:
            return [self.low, self.high]
        return [end for part in self.parts for end in part.endpoints()]

    def shape(self) -> tuple:
        """Everything but the endpoints."""
        return (self.kind, self.is_low_in, self.is_high_in, *(part.shape() for part in self.parts))


MINUS_INFINITY = Endpoint("-\\infty", -math.inf)
INFINITY = Endpoint("\\infty", math.inf)
REALS = Region("interval", low=MINUS_INFINITY, high=INFINITY)
NOTHING = Region("or")


def parse_region(text: str) -> Region | None:
    """The region that a normalised text describes; None when it describes none."""
    text = text.strip()
    if text == "\\reals":
        return REALS
    if text == "\\emptyset":
        return NOTHING
    match = _MEMBERSHIP.fullmatch(text)
    if match and not _MEMBERSHIP.search(match["region"]):
        region = parse_region(match["region"])
        name = match["name"].strip()
        return _named(region, name) if _VARIABLE.fullmatch(name) else None
    for word in ("or", "and"):
        pieces = split_words(text, word)
        if len(pieces) > 1:
            return _joined_by_word(word, pieces)
    for kind, mark in (("or", "\\cup"), ("and", "\\cap"), ("minus", "\\setminus")):
        pieces = split_at(text, mark)
        if len(pieces) > 1:
            return _combined(kind, pieces)
    pieces = split_at(_EXCLUDED_PAIR.sub(r"\1\2, -\2", text), ",", ";")
    if len(pieces) > 1:
        is_condition = _RELATION.search(pieces[0]) or _MEMBERSHIP.fullmatch(pieces[0])
        return _joined_by_comma(pieces) if is_condition else _joined_by_word("and", pieces)
    return (
        _interval(text) or _set_builder(text) or _points(text) or _inequality(text) or _solved(text)
    )


def same_region(first: Region, second: Region) -> bool | None:
    """Whether two regions are equal; None when symbolic endpoints leave it open."""
    if first.variable and second.variable and first.variable != second.variable:
        return False
    if _holds_infinity(first) != _holds_infinity(second):
        return False
    ends = first.endpoints() + second.endpoints()
    if len(ends) > MAX_ENDPOINTS:
        return None
    if any(end.value is None for end in ends):
        return None
    marks = _marks(ends)
    places = range(2 * len(marks) + 1)
    return all(_holds(first, place, marks) == _holds(second, place, marks) for place in places)


def _holds_infinity(region: Region) -> bool:
    """Whether a region is written with a bracket that includes an infinite end."""
    pairs = ((region.low, region.is_low_in), (region.high, region.is_high_in))
    is_own = any(is_in and end is not None and isinstance(end.value, float) for end, is_in in pairs)
    return is_own or any(map(_holds_infinity, region.parts))


def _marks(ends: list[Endpoint]) -> list[Real]:
    """Distinct finite endpoints in order; mark k lies at place 2k+1, gaps at even places."""
    marks: list[Real] = []
    for value in sorted(end.value for end in ends if isinstance(end.value, Real)):
        if not marks or marks[-1] != value:
            marks.append(value)
    return marks


def _place(end: Endpoint, marks: list[Real]) -> int:
    assert end.value is not None
    if isinstance(end.value, float):
        return -1 if end.value < 0 else 2 * len(marks) + 1
    return 1 + 2 * marks.index(end.value)


def _holds(region: Region, place: int, marks: list[Real]) -> bool:
    if region.kind == "interval":
        assert region.low is not None and region.high is not None
        low, high = _place(region.low, marks), _place(region.high, marks)
        is_at_end = (place == low and region.is_low_in) or (place == high and region.is_high_in)
        return low < place < high or is_at_end
    inside = [_holds(part, place, marks) for part in region.parts]
    if region.kind == "minus":
        return inside[0] and not any(inside[1:])
    return any(inside) if region.kind == "or" else all(inside)


def _combined(kind: str, pieces: list[str]) -> Region | None:
    parts = [parse_region(piece) for piece in pieces]
    known = [part for part in parts if part is not None]
    names = {part.variable for part in known if part.variable}
    if len(known) < len(parts) or len(names) > 1:
        return None
    return Region(kind, tuple(known), variable=names.pop() if names else "")


def _joined_by_word(word: str, pieces: list[str]) -> Region | None:
    """The meaning of `or` and `and` between regions; None if it is ambiguous.

    Between conditions on x, `or` is the union and `and` the intersection. Between intervals both
    only list them, and between points they are no region at all. A piece that adds nothing, as in
    `x>1 or x>3`, is a second answer and not a part of one.
    """
    region = _combined(word, pieces)
    if region is None:
        return None
    if all(part.variable for part in region.parts):
        has_point = any(map(_is_finite, region.parts))
        is_clear = not (word == "and" and (has_point or same_region(region, NOTHING)))
        return region if is_clear and not _is_redundant(region) else None
    if any(part.variable for part in region.parts) or all(map(_is_finite, region.parts)):
        return None
    union = Region("or", region.parts)
    return union if _is_disjoint(region.parts) else None


def _joined_by_comma(pieces: list[str]) -> Region | None:
    """`x>0, x\\ne2` holds both conditions; `x<1, x>3`, which no x satisfies, lists two rays."""
    excluded = ""
    conditions = []
    for piece in pieces:
        if _RELATION.search(piece) is None and excluded:
            # x \ne 1, 2
            piece = f"{excluded}\\ne {piece}"
        sides = _RELATION.split(piece)
        is_exclusion = "\\ne" in piece and len(sides) == 2
        excluded = sides[0].strip() if is_exclusion else ""
        conditions.append(piece)
    region = _combined("and", conditions)
    if region is None or not all(part.variable for part in region.parts):
        return None
    if any(map(_is_finite, region.parts)):
        return None
    if same_region(region, NOTHING):
        union = Region("or", region.parts, variable=region.variable)
        return union if _is_disjoint(region.parts) else None
    return None if _is_redundant(region) else region


def _is_finite(region: Region) -> bool:
    """Whether a region is written as single points."""
    if region.kind == "interval":
        return region.low is region.high
    return region.kind == "or" and all(map(_is_finite, region.parts))


def _is_redundant(region: Region) -> bool:
    """Whether a part could be left out."""
    rests = (region.parts[:k] + region.parts[k + 1 :] for k in range(len(region.parts)))
    return any(same_region(region, Region(region.kind, rest)) for rest in rests)


def _is_disjoint(parts: tuple[Region, ...]) -> bool:
    """Whether no two parts are known to share more than an end."""
    pairs = ((a, b) for k, a in enumerate(parts) for b in parts[:k])
    return all(
        same_region(both, NOTHING) is not False or _is_finite_overlap(both)
        for both in (Region("and", pair) for pair in pairs)
    )


def _is_finite_overlap(both: Region) -> bool:
    ends = [end for end in both.endpoints() if isinstance(end.value, Real)]
    points = Region("or", tuple(map(_point, ends)))
    return same_region(Region("minus", (both, points)), NOTHING) is True


def _named(region: Region | None, name: str) -> Region | None:
    if region is None or region.variable not in ("", name):
        return None
    return replace(region, variable=name)


def _endpoint(text: str) -> Endpoint | None:
    tree = parse_expression(text.strip())
    return None if tree is None else Endpoint(text.strip(), real_value(tree))


def _interval(text: str) -> Region | None:
    """`(a,b)`, `[a,b)`, or French `]a,b[`; a group in parentheses."""
    if len(text) < 3 or text[0] not in "([]" or text[-1] not in ")][":
        return None
    inner = text[1:-1]
    pieces = split_at(inner, ",", ";")
    if len(pieces) == 1 and text[0] + text[-1] == "()" and enclosed(text):
        return parse_region(inner)
    low, high = (_endpoint(piece) for piece in pieces) if len(pieces) == 2 else (None, None)
    if low is None or high is None:
        return None
    if low.value is not None and high.value is not None and not low.value < high.value:
        return None
    return Region("interval", (), low, high, text[0] == "[", text[-1] == "]")


def _points(text: str) -> Region | None:
    """`\\{1,2\\}` as single points."""
    inner = enclosed(text, "\\{", "\\}")
    if inner is None or "\\{" in inner:
        return None
    ends = [_endpoint(piece) for piece in split_at(inner, ",", ";")]
    points = [_point(end) for end in ends if end is not None]
    return Region("or", tuple(points)) if len(points) == len(ends) else None


def _point(end: Endpoint) -> Region:
    return Region("interval", (), end, end, True, True)


def _set_builder(text: str) -> Region | None:
    """`\\{x | 0<x<1\\}`."""
    inner = enclosed(text, "\\{", "\\}")
    match = _BUILDER.fullmatch(inner) if inner else None
    if not match:
        return None
    name = match[1].removesuffix("\\reals").strip().removesuffix("\\in").strip()
    region = parse_region(match[2])
    if region is None or not _VARIABLE.fullmatch(name) or region.variable != name:
        return None
    return region


def _inequality(text: str) -> Region | None:
    """A chain such as `0 \\le x < 1` or `x \\ne 2` with one variable between values."""
    sides = [side.strip() for side in _RELATION.split(text)]
    signs = [_SPELLINGS.get(sign, sign) for sign in _RELATION.findall(text)]
    places = [k for k, side in enumerate(sides) if _VARIABLE.fullmatch(side)]
    if not places:
        return _distance(sides, signs)
    if len(places) > 1:
        places = [k for k in places if sides[k] in _UNKNOWNS]
    if not 1 <= len(signs) <= 2 or len(places) != 1 or (len(signs) == 2 and places != [1]):
        return None
    place = places[0]
    bounds = []
    for k, sign in enumerate(signs):
        value = _endpoint(sides[k] if k < place else sides[k + 1])
        if value is None or _holds_name(value.text, sides[place]):
            return None
        bounds.append(_bound(_FLIPPED[sign] if k < place else sign, value))
    region = bounds[0] if len(bounds) == 1 else Region("and", tuple(bounds))
    return _named(region, sides[place])


def _holds_name(text: str, name: str) -> bool:
    tree = parse_expression(text)
    return tree is None or name.strip().removeprefix("\\") in symbols_of(tree)


def _solved(text: str) -> Region | None:
    """The solution of an inequality in one variable, or of a chain of two."""
    sides = [side.strip() for side in _RELATION.split(text)]
    signs = [_SPELLINGS.get(sign, sign) for sign in _RELATION.findall(text)]
    trees = [parse_expression(side) for side in sides]
    known = [tree for tree in trees if tree is not None]
    if not 1 <= len(signs) <= 2 or len(known) < len(sides):
        return None
    names = frozenset().union(*map(symbols_of, known))
    if len(names) != 1:
        return None
    parts = []
    for left, right, sign in zip(known, known[1:], signs, strict=False):
        pieces = solution(difference(left, right), sign)
        if pieces is None:
            return None
        parts.append(Region("or", tuple(_stretch(*piece) for piece in pieces)))
    name = next(iter(names))
    spelled = name if len(name) == 1 or "_" in name else f"\\{name}"
    return _named(parts[0] if len(parts) == 1 else Region("and", tuple(parts)), spelled)


def _stretch(low: Tree | None, high: Tree | None, is_point: bool) -> Region:
    first = MINUS_INFINITY if low is None else Endpoint(repr(low), real_value(low))
    second = INFINITY if high is None else Endpoint(repr(high), real_value(high))
    return _point(first) if is_point else Region("interval", (), first, second)


def _distance(sides: list[str], signs: list[str]) -> Region | None:
    """`|x-a| < r`, or the other way round, as the interval around a or its complement."""
    if len(sides) == 2 and not _DISTANCE.fullmatch(sides[0]):
        sides, signs = sides[::-1], [_FLIPPED[signs[0]]]
    match = _DISTANCE.fullmatch(sides[0])
    if match is None or len(sides) != 2 or "(" in match["shift"]:
        return None
    centre = f"-({match['shift'] or '0'})"
    low, high = (_endpoint(f"{centre}{side}({sides[1]})") for side in "-+")
    values = [end.value for end in (low, high) if end is not None and end.value is not None]
    if low is None or high is None or len(values) < 2 or values[0] > values[1]:
        return None
    sign = signs[0]
    if sign in ("=", "!="):
        region = Region("or", (_point(low), _point(high)))
        region = region if sign == "=" else Region("minus", (REALS, region))
    else:
        kind = "and" if sign[0] == "<" else "or"
        region = Region(kind, (_bound(_FLIPPED[sign], low), _bound(sign, high)))
    return _named(region, match["name"])


def _bound(sign: str, end: Endpoint) -> Region:
    """Where `x sign end` holds."""
    if sign == "=":
        return _point(end)
    if sign == "!=":
        return Region("minus", (REALS, _point(end)))
    if sign[0] == "<":
        return Region("interval", (), MINUS_INFINITY, end, False, sign == "<=")
    return Region("interval", (), end, INFINITY, sign == ">=", False)
