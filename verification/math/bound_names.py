"""Names that a text may choose freely: whole numbers of general solutions, free constants.

Runs in grading processes. `2k\\pi` and `2n\\pi` are one set of angles, `x^2+C` and `x^2+c` one
family of functions. A whole number is bound if the text says so (`k \\in \\integers`) or where
it counts periods; a constant if it is added to, or multiplies, a function of a variable.
"""

import itertools
import re
from fractions import Fraction

from verification.math.expression import parse_expression
from verification.math.split import split_at
from verification.math.trees import (
    ZERO,
    Tree,
    at_point,
    difference,
    inverse,
    num,
    renamed,
    symbols_of,
)
from verification.math.values import real_value, same_value

BOUND_INTEGER = "k_integers"
_BOUND_MARK = re.compile(r"k_\\[a-z]")
_LETTERS = "knmljNKpqts"
_CONDITION = re.compile(
    r"(?:[,;]? ?\\text\{(?:,? ?(?:where|for|with|for (?:any|all|some|every)))\}|, ?|; ?|(?=\()| ?)"
    r"\(?(?:"
    rf"(?P<name>[{_LETTERS}]) ?\\in ?\\(?P<domain>integers|naturals|reals|rationals|complexes)"
    r" ?(?P<sign>\^\+|_\+|\^\{\+\})?"
    rf"|(?P<noun>[{_LETTERS}]) ?\\text\{{(?:is )?(?:an integer|any integer|integer)\}}"
    rf"|\\text\{{ ?,?(?:for )?(?:any|all|every|some)? ?integers?\}} ?(?P<after>[{_LETTERS}])"
    r")\)?$"
)
_TOKEN = re.compile(r"\\[A-Za-z]+|[A-Za-z]")
_PERIOD = re.compile(r"\\pi|\\deg")
_FREE_CONSTANT = re.compile(r"[Cc](?:_[0-9])?")
_INDEXED_CONSTANT = re.compile(r"[Cc]_[0-9]")
_LETTER_CONSTANTS = frozenset("ABCDab")
_VARIABLES = frozenset({"x", "t", "y", "u", "z", "s", "theta"})
MAX_CONSTANTS = 3


def with_bound_names(first: str, second: str) -> tuple[str, str]:
    """Both texts without conditions such as `, k \\in \\integers`, the bound letter under one name.

    A condition stays where the other text has a different one.
    """
    (bare, name, domain), (other, other_name, other_domain) = map(
        _without_condition, (first, second)
    )
    if domain and other_domain and domain != other_domain:
        return first, second
    if not bare or not other:
        return first, second
    if any(given and given not in _letters_of(text)
           for text, given in ((bare, name), (other, other_name))):  # fmt: skip
        # The condition is on something else.
        return first, second
    known = domain or other_domain
    pair = [(bare, name or other_name), (other, other_name or name)]
    letters = [_bound_letter(text, given) for text, given in pair]
    if not all(letters):
        return bare, other
    bound = f"k_\\{known or 'integers'} "
    return _with_bound(bare, letters[0], bound), _with_bound(other, letters[1], bound)


def same_progression(first: Tree, second: Tree) -> bool | None:
    """Whether two linear expressions in the bound integer take the same values."""
    pair = _progression(first), _progression(second)
    if pair[0] is None or pair[1] is None:
        return None
    (start, step), (other_start, other_step) = pair
    if not _is_whole_ratio(step, other_step) or not _is_whole_ratio(other_step, step):
        return False
    return _is_whole_ratio(difference(start, other_start), step)


def may_be_progression(tree: Tree) -> bool:
    """Whether the only symbol of a tree may be a whole number that counts."""
    names = symbols_of(tree)
    return len(names) == 1 and names <= {*_LETTERS, BOUND_INTEGER}


def is_class(tree: Tree, residue: Fraction, modulus: int) -> bool:
    """Whether a tree is `11k+7` for a residue and a modulus, with any letter."""
    names = symbols_of(tree)
    if not may_be_progression(tree):
        return False
    multiples = ("prod", num(modulus), ("sym", BOUND_INTEGER))
    bound = renamed(tree, dict.fromkeys(names, BOUND_INTEGER))
    return same_progression(("sum", num(residue), multiples), bound) is True


def same_but_for_constants(first: Tree, second: Tree) -> bool | None:
    """Whether two trees are equal up to the names of their free constants."""
    constants, others = _free_constants(first), _free_constants(second)
    if _INDEXED_CONSTANT.fullmatch(min(others, default="")) and len(others) > 1:
        constants = constants or _letter_constants(first, len(others))
    if _INDEXED_CONSTANT.fullmatch(min(constants, default="")) and len(constants) > 1:
        others = others or _letter_constants(second, len(constants))
    constants = constants or _renamed_constant(second, first, others)
    others = others or _renamed_constant(first, second, constants)
    if not constants or len(constants) != len(others) or len(constants) > MAX_CONSTANTS:
        return None
    if symbols_of(first) - constants != symbols_of(second) - others:
        return None
    ordered = sorted(constants)
    for names in itertools.permutations(sorted(others)):
        if same_value(renamed(first, dict(zip(ordered, names, strict=True))), second):
            return True
    return False


def _without_condition(text: str) -> tuple[str, str, str]:
    """A text without its condition, and the condition's letter and domain."""
    match = _CONDITION.search(text)
    if match is None:
        return text, "", ""
    name = match["name"] or match["noun"] or match["after"]
    domain = (match["domain"] or "integers") + "positive" * bool(match["sign"])
    return text[: match.start()].rstrip(" ,;"), name, domain


def _letters_of(text: str) -> set[str]:
    return {token for token in _TOKEN.findall(text) if len(token) == 1}


def _bound_letter(text: str, given: str) -> str:
    """The letter that a text binds: the one it names, or the one that counts periods."""
    if _BOUND_MARK.search(text):
        return ""
    letters = _letters_of(split_at(text, "=")[-1]) & set(_LETTERS)
    if given:
        return given if given in letters else (letters.pop() if len(letters) == 1 else "")
    if len(letters) != 1 or not _PERIOD.search(text):
        return ""
    letter = letters.pop()
    terms = split_at(
        split_at(text, "=")[-1], "+", "-", ",", ";", "\\pm", "\\mp", "\\text{or}", "\\text{and}"
    )
    counted = [term for term in terms if letter in _letters_of(term)]
    periods = [term for term in counted if _counts_periods(term, letter)]
    # (-1)^n x + n \pi
    rest = [term for term in counted if term not in periods]
    is_clear = all("(-1)^" in term and _letters_of(term) == {letter} for term in rest)
    return letter if periods and is_clear else ""


def _counts_periods(term: str, letter: str) -> bool:
    """Whether a term is a multiple of a period, or one plus a constant: `(2k+1)\\pi`."""
    if _letters_of(term) != {letter} or not _PERIOD.search(term):
        return False
    tree = parse_expression(term.strip())
    return tree is not None and _progression(renamed(tree, {letter: BOUND_INTEGER})) is not None


def _with_bound(text: str, letter: str, bound: str) -> str:
    return _TOKEN.sub(lambda token: f" {bound}" if token[0] == letter else token[0], text).strip()


def _progression(tree: Tree) -> tuple[Tree, Tree] | None:
    """Start and step of a tree that is linear in the bound integer and has no other symbol."""
    if symbols_of(tree) != {BOUND_INTEGER}:
        return None
    at = [at_point(tree, {BOUND_INTEGER: Fraction(value)}) for value in (0, 1, 2, 5)]
    values = [real_value(value) for value in at]
    if any(value is None for value in values):
        return None
    start, step = at[0], difference(at[1], at[0])
    for value, tree_there in ((2, at[2]), (5, at[3])):
        there = ("sum", start, ("prod", num(value), step))
        if not same_value(there, tree_there):
            return None
    return None if same_value(step, ZERO) is not False else (start, step)


def _is_whole_ratio(first: Tree, second: Tree) -> bool:
    ratio = ("prod", first, inverse(second))
    value = real_value(ratio)
    if value is None or not abs(float(value)) <= 10**6:
        return False
    return same_value(ratio, num(round(float(value)))) is True


def _free_constants(tree: Tree) -> frozenset[str]:
    """Constants of integration: `C` added to or multiplying a function of x, `C_1` anywhere."""
    names = {name for name in symbols_of(tree) if _FREE_CONSTANT.fullmatch(name)}
    indexed = {name for name in names if _INDEXED_CONSTANT.fullmatch(name)}
    if len(indexed) > 1:
        return frozenset(indexed)
    variables = symbols_of(tree) - names
    if len(names) != 1 or not variables or not variables <= _VARIABLES:
        return frozenset()
    symbol = ("sym", *names)
    return frozenset(names) if _stands_outside(tree, symbol) else frozenset()


def _stands_outside(tree: Tree, symbol: Tree) -> bool:
    """Whether a symbol occurs only as a term of a tree or a factor of a term."""
    terms = tree[1:] if tree[0] == "sum" else (tree,)
    holding = [term for term in terms if symbol[1] in symbols_of(term)]
    if len(holding) != 1:
        return False
    term = holding[0]
    if term == symbol:
        return len(terms) > 1
    factors = term[1:] if term[0] == "prod" else ()
    rest = [factor for factor in factors if factor != symbol]
    is_growth = any(factor[0] == "pow" and symbols_of(factor[2]) for factor in rest)
    is_growth = is_growth or any(factor[:2] == ("call", "exp") for factor in rest)
    return len(rest) == len(factors) - 1 and is_growth


def _letter_constants(tree: Tree, count: int) -> frozenset[str]:
    names = symbols_of(tree) & _LETTER_CONSTANTS
    return frozenset(names) if len(names) == count else frozenset()


def _renamed_constant(tree: Tree, other: Tree, constants: frozenset[str]) -> frozenset[str]:
    """The A or K of the other tree in the position of this tree's only free constant."""
    names = symbols_of(other) - symbols_of(tree)
    is_one = len(constants) == len(names) == 1 and not _INDEXED_CONSTANT.fullmatch(min(constants))
    is_free = is_one and names <= {"A", "B", "K", "k"} and _stands_outside(other, ("sym", *names))
    return names if is_free else frozenset()
