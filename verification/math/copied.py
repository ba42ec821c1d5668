"""Whether the text of a problem contains an expression, in any notation.

Pure string code in time linear in the texts; runs in the verifier and its grading processes. An
expression is taken for the bag of its numbers and names: order, brackets, signs, layout and
neutral zeros and ones do not count. A power counts as its equal factors, a root as one of degree 2.
Expressions of equal value with the same bag are hardly ever different.
"""

import functools
import re
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

from verification.math.number_words import SMALL
from verification.math.operations import literal
from verification.math.text import normalise
from verification.math.trees import Tree, num

MAX_PROBLEM_CHARS = 20_000
MAX_COPIES = 12
MAX_LEAVES = 4000
BREAK = "."
"""Separates leaves that have ordinary words between them."""

_TOKEN = re.compile(r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+|\\[A-Za-z]+|[A-Za-z]+|[^\s]")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[A-Za-z]*\}(?:\{[lcr| ]{0,20}\})?")
_RAISED = re.compile(
    r" (?:raised )?to the (?:power (?:of )?|([0-9]{1,3}) power(?![a-z]))", re.IGNORECASE
)
_INVERSE = re.compile(r"\\(sin|cos|tan|cot|sec|csc)\^(?:\{-1\}|-1)")
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])")
_COUNTED = re.compile(
    r"(?<![A-Za-z])C\(([0-9A-Za-z]{1,9}), ?([0-9A-Za-z]{1,9})\)"
    r"|\^?_?\{?(?<![0-9])([0-9]{1,9})\}?C_?\{?([0-9]{1,9})\}?"
)
_EXPONENT = re.compile(
    r"-?(?:(?P<whole>[0-9]{1,4})|(?P<half>0?\.5)|(?P<top>[0-9]{1,2})/(?P<bottom>[0-9]{1,2})"
    r"|\\frac\{(?P<upper>[0-9]{1,2})\}\{(?P<lower>[0-9]{1,2})\}|2\^-1|2\^\{-1\})"
)
# Operations by their names in problems.
_NAMES = {
    "sine": "sin", "cosine": "cos", "tangent": "tan", "cotangent": "cot", "secant": "sec",
    "cosecant": "csc", "lg": "log", "logarithm": "log", "gcf": "gcd", "hcf": "gcd",
    "divisor": "gcd", "factor": "gcd", "multiple": "lcm", "factorial": "!", "permutations": "!",
    "modulo": "mod", "bmod": "mod", "pmod": "mod", "remainder": "mod", "divided": "mod",
    "choose": "binom", "combinations": "binom", "coefficient": "binom", "limit": "lim",
    "integral": "int", "integrate": "int", "determinant": "det", "arcsine": "arcsin",
    "asin": "arcsin", "acos": "arccos", "atan": "arctan", "minimum": "min", "maximum": "max",
    "smallest": "min", "largest": "max", "smaller": "min", "larger": "max", "iint": "int",
    "oint": "int", "intop": "int", "degree": "deg",
}  # fmt: skip
FUNCTIONS = frozenset(
    "sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan arccot log ln gcd lcm mod "
    "binom lim int sum prod det min max ! arg".split()
)
BINDERS = frozenset({"sum", "prod", "int", "lim"})
_WORDS = {word: str(value) for word, value in SMALL.items() if value <= 12}
_WORDS |= {"half": "2", "twice": "2", "exp": "e", "percent": "%"}
_MARKS = frozenset(
    "frac text cdot times left right circ deg degree degrees radians to displaystyle le ge ne in "
    "quad qquad equiv cup cap setminus lfloor rfloor lceil rceil langle rangle mathrm dots ldots "
    "div pm mp boxed approx infty".split()
)
# Words between the parts of one expression.
_JOINING = frozenset(
    "and plus minus times by over divided multiplied to the power from with of than "
    "squared cubed mod modulo choose raised".split()
)
_PROSE = frozenset(
    "a an is it if in on at as or be we he she his her who how has had are was for let not can all "
    "any use its our out see you do does did so no now new each set get add per sum one this that "
    "what find the value given per via yes man men age bag box car day".split()
)
_LETTERS = re.compile(r"[A-Za-z]")
MAX_PRODUCT_LETTERS = 3


class Leaves(NamedTuple):
    """Numbers and names of a text in its order, and its functions."""

    sequence: tuple[str, ...]
    functions: frozenset[str]


def stands_in(expression: str, problem: str, *trees: Tree) -> bool:
    """Whether a problem's text contains a normalised expression or one of its trees."""
    bags = [leaves_of(expression, grouped) for grouped in (False, True)]
    bags += [Leaves(tuple(tree_leaves(tree)), bags[0].functions) for tree in trees]
    for grouped in (False, True):
        found = leaves_of_problem(problem, grouped)
        if any(bag.functions <= found.functions and _is_part(bag, found) for bag in bags):
            return True
    return False


def is_run(problem: str, tree: Tree) -> bool:
    """Whether an expression fills the space between two breaks of a problem.

    So `3+4` of `\\sqrt{(3+4)^2}` for "Compute 3+4."
    """
    leaves = tree_leaves(tree)
    if _is_weak(leaves):
        return False
    return frozenset(Counter(_without_neutral(leaves)).items()) in _runs(problem)


@functools.lru_cache(maxsize=256)
def _runs(problem: str) -> frozenset[frozenset[tuple[str, int]]]:
    """Bags of two leaves or more between the breaks of a problem."""
    runs: list[list[str]] = [[]]
    for leaf in leaves_of_problem(problem, True).sequence:
        if leaf == BREAK:
            runs.append([])
        else:
            runs[-1].append(leaf)
    bags = [_without_neutral(run) for run in runs]
    return frozenset(frozenset(Counter(bag).items()) for bag in bags if len(bag) > 1)


def _is_weak(sequence: Iterable[str]) -> bool:
    """Whether an expression has so few distinct leaves that zeros and ones count too."""
    return len(set(_without_neutral(sequence))) < 2


def _without_neutral(sequence: Iterable[str]) -> tuple[str, ...]:
    return tuple(leaf for leaf in sequence if leaf not in ("0", "1"))


@functools.lru_cache(maxsize=256)
def leaves_of_problem(problem: str, grouped: bool) -> Leaves:
    """Leaves of a problem; a long problem is read up to the limit."""
    return leaves_of(normalise(problem[:MAX_PROBLEM_CHARS]), grouped)


def leaves_of(text: str, grouped: bool) -> Leaves:
    """Leaves of a normalised text; `grouped`: 1,234 is one number."""
    text = _ENVIRONMENT.sub(" ", text)
    text = _RAISED.sub(lambda m: f"^{{{m[1]}}}" if m[1] else "^", text)
    text = _INVERSE.sub(r"\\arc\1 ", text)
    text = _COUNTED.sub(lambda m: f"\\binom{{{m[1] or m[3]}}}{{{m[2] or m[4]}}}", text)
    if grouped:
        text = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    return _Reader(_TOKEN.findall(text)).read()


def tree_leaves(tree: Tree) -> list[str]:
    """Leaves of a parsed expression."""
    kind = tree[0]
    if kind == "num":
        return _of_number(tree[1])
    if kind in ("sym", "const"):
        return re.findall(r"[A-Za-z]+|[0-9]+", tree[1])
    if kind == "pow":
        return _powered(tree_leaves(tree[1]), tree[2])
    children = tree[2:] if kind == "call" else tree[1:]
    if kind == "call" and tree[1] == "log" and tree[3] == num(10):
        children = children[:1]
    return [leaf for child in children for leaf in tree_leaves(child)][:MAX_LEAVES]


def _powered(base: list[str], exponent: Tree) -> list[str]:
    value = literal(exponent)
    if value is None:
        return base + tree_leaves(exponent)
    top, bottom = abs(value.numerator), value.denominator
    copies = base * top if top <= MAX_COPIES else [*base, str(top)]
    return (copies + ([str(bottom)] if bottom > 1 else []))[:MAX_LEAVES]


def _of_number(value: Fraction) -> list[str]:
    top, bottom = str(abs(value.numerator)), str(value.denominator)
    return [top] if bottom == "1" else [top, bottom]


def _is_part(bag: Leaves, found: Leaves) -> bool:
    """Whether some run of leaves between two breaks is the bag."""
    is_known = set(_without_neutral(bag.sequence)) <= _names_of(found)
    if is_known and _is_run(bag.sequence, found.sequence):
        return True
    if not bag.functions & BINDERS:
        return False
    # A bound name may be any other.
    return _is_run(_anonymous(bag.sequence), _anonymous(found.sequence))


@functools.lru_cache(maxsize=64)
def _names_of(found: Leaves) -> frozenset[str]:
    return frozenset(found.sequence)


def _anonymous(sequence: Iterable[str]) -> tuple[str, ...]:
    return tuple("?" if _LETTERS.fullmatch(leaf) else leaf for leaf in sequence)


def _is_run(wanted: tuple[str, ...], found: tuple[str, ...]) -> bool:
    if not _is_weak(wanted):
        wanted, found = _without_neutral(wanted), _without_neutral(found)
    if not wanted:
        return False
    # Leaves missing (positive) or in excess (negative) in the window.
    missing = Counter(wanted)
    size = len(wanted)
    unequal = len(missing)
    for place, leaf in enumerate(found):
        for name, change in ((leaf, -1), (found[place - size] if place >= size else None, 1)):
            if name is not None:
                unequal += (missing[name] == 0) - (missing[name] + change == 0)
                missing[name] += change
        if place >= size - 1 and unequal == 0:
            return True
    return False


class _Reader:
    """One pass over the tokens of a text."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._place = 0
        self._leaves: list[str] = []
        self._functions: set[str] = set()
        self._open: list[int] = []
        self._atom = 0
        self._roots: set[int] = set()
        self._waiting_power = 0

    def read(self) -> Leaves:
        while self._place < len(self._tokens) and len(self._leaves) < MAX_LEAVES:
            token = self._tokens[self._place]
            self._place += 1
            if token[0].isdecimal() or (token[0] == "." and len(token) > 1):
                self._emit(*_of_number(Fraction(token)))
            elif token[0] == "\\" and len(token) > 1:
                self._command(token[1:])
            elif token.isalpha() and token.isascii():
                self._word(token)
            else:
                self._sign(token)
        return Leaves(tuple(self._leaves), frozenset(self._functions))

    def _emit(self, *leaves: str) -> None:
        self._atom = self._start(len(self._leaves))
        self._leaves += leaves
        self._end_atom()

    def _start(self, place: int) -> int:
        """Where an atom begins whose leaves begin at a place: a root belongs to its number."""
        return place - 1 if place - 1 in self._roots else place

    def _end_atom(self) -> None:
        if self._waiting_power and not self._open:
            count, self._waiting_power = self._waiting_power, 0
            self._repeat(count)

    def _repeat(self, count: int) -> None:
        atom = self._leaves[self._atom :]
        if count > MAX_COPIES or len(atom) * count > MAX_LEAVES:
            self._leaves.append(str(count))
        else:
            self._leaves += atom * (count - 1)

    def _command(self, name: str) -> None:
        known = _NAMES.get(name, name)
        if known in FUNCTIONS:
            self._functions.add(known)
        elif name == "sqrt":
            if self._peek() != "[":
                self._roots.add(len(self._leaves))
                self._leaves.append("2")
        elif name == "exp":
            self._emit("e")
        elif name not in _MARKS:
            self._emit(name)

    def _word(self, word: str) -> None:
        lower = word.lower()
        known = _NAMES.get(lower, lower)
        if len(word) == 1:
            self._emit(word)
        elif known in FUNCTIONS:
            self._functions.add(known)
            if lower not in FUNCTIONS and lower not in _JOINING:
                self._leaves.append(BREAK)
        elif lower in ("squared", "cubed"):
            self._repeat(2 if lower == "squared" else 3)
        elif lower in _WORDS:
            self._emit(_WORDS[lower])
        elif lower == "sqrt":
            self._leaves.append("2")
        elif lower in ("square", "cube") and self._peek().lower() == "root":
            self._place += 1
            self._leaves.append("2" if lower == "square" else "3")
        elif lower in _MARKS or lower in _JOINING or lower == "pi":
            self._leaves += ["pi"] if lower == "pi" else []
        elif len(word) <= MAX_PRODUCT_LETTERS and lower not in _PROSE:
            self._emit(*word)
            self._atom = len(self._leaves) - 1
        else:
            self._leaves.append(BREAK)

    def _sign(self, sign: str) -> None:
        if sign in "([{":
            self._open.append(len(self._leaves))
        elif sign in ")]}":
            self._atom = self._start(self._open.pop()) if self._open else 0
            self._end_atom()
        elif sign == "^":
            self._power()
        elif sign == "!":
            self._functions.add("!")
        elif sign == "%":
            self._emit("%")
        elif sign in ".?":
            self._leaves.append(BREAK)

    def _power(self) -> None:
        """Read a whole or fractional exponent as copies and degree; any other stays as leaves."""
        exponent, end = self._exponent()
        match = _EXPONENT.fullmatch(exponent)
        if match is None:
            return
        is_function = self._place > 1 and self._tokens[self._place - 2].lstrip("\\") in FUNCTIONS
        self._place = end
        top = int(match["whole"] or match["top"] or match["upper"] or 1)
        bottom = match["bottom"] or match["lower"] or ("" if match["whole"] else "2")
        if is_function:
            self._waiting_power = top
        elif top:
            self._repeat(top)
        else:
            self._leaves.append("0")
        if bottom:
            self._leaves.append(bottom)

    def _exponent(self) -> tuple[str, int]:
        """Text of the exponent behind the caret, without brackets around it, and its end."""
        place, depth, parts = self._place, 0, []
        while place < min(len(self._tokens), self._place + 16):
            token = self._tokens[place]
            depth += (token in "({") - (token in ")}")
            parts.append(token)
            place += 1
            if depth <= 0 and token != "-":
                break
        text = "".join(parts)
        while len(text) > 1 and text[0] + text[-1] in ("()", "{}"):
            text = text[1:-1]
        return text, place

    def _peek(self) -> str:
        return self._tokens[self._place] if self._place < len(self._tokens) else ""
