"""Points at which expressions with symbols are compared.

Pure functions; used in grading processes. A hash of both expressions seeds the points of a pair, so
that no answer can be written for points known beforehand. Every process draws the same points,
whichever of the two is the reference.
"""

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator
from fractions import Fraction

from verification.math.trees import Tree, subtrees

Point = dict[str, Fraction]

ENOUGH_POINTS = 3
SMOOTH_POINTS = 6
BRANCHED_POINTS = 40
STEPPED_POINTS = 80
SPARE_POINTS = 400
MAX_LITERALS = 12
MAX_TIED_NAMES = 6
# Names that mathematics gives to whole numbers; (-1)^n has no real value between them.
_WHOLE_NAMES = frozenset("nmk")
_STEPS = frozenset("floor ceil mod sign max min gcd lcm factorial binom perm".split())
_ENTIRE = frozenset("sin cos tan cot sec csc sinh cosh tanh coth exp arctan".split())
# Sizes that a drawn number may have: roots and logarithms ask for large, for positive ones, arcs
# for those below 1; and near 1 no term of a high power drowns the others.
_SIZES = ((1, 4), (0, 1), (1, 2), (4, 40), (Fraction(1, 50), Fraction(1, 5)), (40, 3000))


def is_whole_name(name: str) -> bool:
    """Whether a symbol stands for whole numbers: n, m and k, also n_1 and n'."""
    return name[0] in _WHOLE_NAMES and (len(name) == 1 or name[1] in "_'")


def points_of(first: Tree, second: Tree, names: list[str]) -> tuple[int, Iterator[Point]]:
    """Number of points to compare (few for smooth functions, many for others), and the points.

    There are more points than that number, for functions that are real at few points.
    """
    spellings = sorted((repr(first), repr(second)))
    seed = hashlib.sha256("\n".join(spellings).encode("utf-8", "surrogatepass")).digest()
    draw = random.Random(seed)
    count = max(SMOOTH_POINTS, *(_grade(tree, names) for tree in (first, second)))
    literals = _literals(first, second)
    points = (
        {name: _number(name, index, count, literals, draw) for name in names}
        for index in range(count + SPARE_POINTS)
    )
    return count, points


def is_enough(points: list[Point]) -> bool:
    """Whether points show that two functions agree, and not only where names are tied.

    n!/(k!(k-n)!) and n!/(k!(n-k)!) have both a value only where n is k, and agree there.
    """
    if len(points) < ENOUGH_POINTS:
        return False
    names = sorted(points[0])
    kinds: list[Callable[[Point], Fraction]] = [
        lambda point, name=name: point[name] for name in names
    ]
    for one, other in itertools.combinations(names[:MAX_TIED_NAMES], 2):
        kinds.append(lambda point, a=one, b=other: point[a] - point[b])
        kinds.append(lambda point, a=one, b=other: point[a] + point[b])
    return all(len({kind(point) for point in points}) >= ENOUGH_POINTS for kind in kinds)


def _literals(first: Tree, second: Tree) -> list[Fraction]:
    """Numbers near which branches may meet: those in the trees, their products and ratios."""
    found = {Fraction(1)}
    parts = (part for tree in (first, second) for part in subtrees(tree))
    found.update(abs(part[1]) for part in parts if part[0] == "num" and part[1])
    singles = sorted(number for number in found if number < 1 << 40)[-MAX_LITERALS:]
    # The literals themselves come up about as often as all that is made of them.
    return singles * len(singles) + sorted(
        {n for a in singles for b in singles for n in (a * b, a / b)}
    )


def _grade(tree: Tree, names: list[str]) -> int:
    """Number of points for a tree: more where signs, branches or steps distinguish it."""
    return max(_grade_of_root(part, names) for part in subtrees(tree))


def _grade_of_root(tree: Tree, names: list[str]) -> int:
    """Number of points for the operation at the root of a tree."""
    if tree[0] == "pow":
        return _grade_of_power(tree, names)
    if tree[0] != "call":
        return 0
    # A function of whole names may depend on their residue alone.
    is_residual = tree[1] in _ENTIRE and any(map(is_whole_name, names))
    if tree[1] in _STEPS or is_residual:
        return STEPPED_POINTS
    return 0 if tree[1] in _ENTIRE else BRANCHED_POINTS


def _grade_of_power(tree: Tree, names: list[str]) -> int:
    exponent = tree[2]
    if exponent[0] == "num":
        return 0 if exponent[1].denominator == 1 else BRANCHED_POINTS
    if tree[1] == ("const", "e") or (tree[1][0] == "num" and tree[1][1] > 0):
        return 0
    return STEPPED_POINTS if any(map(is_whole_name, names)) else BRANCHED_POINTS


def _number(
    name: str, index: int, count: int, literals: list[Fraction], draw: random.Random
) -> Fraction:
    if is_whole_name(name):
        return _whole_number(index, draw)
    if count == STEPPED_POINTS and index % 3:
        return _grid_number(index, literals, draw)
    low, high = _SIZES[index % len(_SIZES)]
    # Binary fractions: a negative one has no real root but of odd degree.
    value = low + (high - low) * Fraction(2 * draw.randrange(1 << 15) + 1, 1 << 16)
    if index >= SMOOTH_POINTS and index % 4 == 0:
        value = _near_literals(literals, draw)
    # The first three are positive, for lengths and other things that are.
    return -value if index > 2 and draw.random() < 0.5 else value


def _near_literals(literals: list[Fraction], draw: random.Random) -> Fraction:
    """A number between two literals, which may bound where a function is real, or near one."""
    low, high = sorted((draw.choice(literals), draw.choice([Fraction(0), *literals])))
    if low == high:
        return low * Fraction(draw.randrange(1 << 11, 1 << 13), 1 << 12)
    return low + (high - low) * Fraction(2 * draw.randrange(1 << 15) + 1, 1 << 16)


def _whole_number(index: int, draw: random.Random) -> Fraction:
    """Every small number in turn, and some large ones of every residue."""
    if index % 3 == 0:
        return Fraction(draw.randrange(2, 40))
    if index % 3 == 1:
        return Fraction((index // 3 + draw.randrange(0, 2) * 12) % 24 - 9)
    size = (100, 1000, 1 << 40)[index // 3 % 3]
    return Fraction(draw.choice((1, -1)) * draw.randrange(size // 2, size))


def _grid_number(index: int, literals: list[Fraction], draw: random.Random) -> Fraction:
    """Whole numbers of both signs, fractions, numbers near whole ones, and the literals."""
    whole = Fraction(draw.choice((index // 3 - 12, draw.randrange(-9, 10), draw.randrange(60))))
    kind = draw.randrange(6)
    if kind == 0:
        return whole + Fraction(draw.choice((1, -1)), draw.choice((2, 3, 4, 5, 6, 7)))
    if kind == 1:
        whole = draw.choice((whole, draw.choice(literals)))
        return whole + draw.choice((1, -1)) * Fraction(1, 1 << 12)
    return draw.choice((1, -1)) * draw.choice(literals) if kind == 2 else whole
