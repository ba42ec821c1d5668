"""Whether a right answer leaves the operation undone that the problem asks for.

Pure string code in time linear in the texts; runs in the verifier and its grading processes, and
on answers that are equal to the reference alone. An answer is unevaluated when it holds an
operation that the reference does not (see `operations`), and by the rule the problem contains it
(see `copied`) or it can be carried out as written. So is a number in another form than the one
asked for (see `forms`). docs/verification.md says why.
"""

import re
from collections import Counter
from fractions import Fraction

from megatron_rl.config.reward import UnevaluatedRule
from verification.math.answer import spelled, trimmed
from verification.math.copied import MAX_PROBLEM_CHARS, is_run, stands_in
from verification.math.expression import parse_expression
from verification.math.forms import form_of, is_other_form
from verification.math.linear import determinant_cells, operands_of
from verification.math.notation import respell
from verification.math.operations import (
    BRACKETS,
    CALL,
    OPEN_KINDS,
    TOP_SUM,
    operations_of,
    operations_of_both,
)  # fmt: skip
from verification.math.plain import Words, read_plain, settle_choices
from verification.math.split import split_at
from verification.math.text import MAX_CHARS, normalise, without_marks
from verification.math.trees import MINUS_ONE, ONE, ZERO, Tree, inverse, subtrees
from verification.math.typed import with_letters
from verification.math.units import ANGLE, split_unit
from verification.verdict import Verdict

UNEVALUATED = Verdict(False, "unevaluated")
_REGION = re.compile(r"[<>]|\\(?:le|ge|ne|cup|setminus)(?![a-z])|(?<![a-z])or(?![a-z])")
_OF_SETS = ("call cup", "call setminus")
_BARE_NAME = re.compile(
    r"(?:\\?[A-Za-z]+|[A-Za-z]_\{?[0-9A-Za-z]+\}?|[A-Za-z]'*(?:\^\{?-1\}?)?\([0-9A-Za-z](?:,[0-9A-Za-z]){0,3}\))"
)
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])")
_CALL_START = re.compile(
    r"\\(?:sin|cos|tan|cot|sec|csc|sinh|cosh|tanh|arcsin|arccos|arctan|log|ln|gcd|lcm|det|binom"
    r"|sum|prod|int|lim)(?![A-Za-z])"
)
_FUNCTION_POWER = re.compile(r"^ ?\^(?:[2-9]|\{[0-9]{1,2}\})")
_ANGLE = re.compile(
    r"\\frac\{(?P<top>[0-9]{0,3}) ?\\pi ?\}\{(?P<below>[0-9]{1,3})\}"
    r"|(?:\\frac\{(?P<above>[0-9]{1,3})\}\{(?P<bottom>[0-9]{1,3})\}\*?|(?P<times>[0-9]{0,3}))"
    r" ?\\pi(?:/(?P<over>[0-9]{1,3}))?"
)
_DECIMAL = re.compile(r"(?<![0-9.])[0-9]{0,3}\.[0-9]{1,4}(?![0-9.])")
_LONG_CALLS = ("\\sum", "\\prod", "\\int", "\\lim")
_TRANSPOSE = re.compile(r"\^ ?\{? ?(?:T|\\top|\\text\{T\}) ?\}?|\\(?:begin|end)\{[a-zA-Z]*\}")
_RECIPROCALS = {"sec": "cos", "csc": "sin", "cot": "tan", "cos": "sec", "sin": "csc", "tan": "cot"}
_RECIPROCAL = re.compile(
    r"\\frac\{1\}\{\\(sec|csc|cot|cos|sin|tan)(?![a-z])([^{}]{1,40}|[^{}]{0,20}\{[^{}]{0,20}\}\{?[^{}]{0,20}\}?)\}"
    r"|1/\\(sec|csc|cot|cos|sin|tan)(?![a-z])(.{1,60})"
)
_NUMERAL = re.compile(r"[0-9]{1,400}(?:\.[0-9]{1,400})?")
_ROW_GAP = re.compile(r"(?<=\\\\)\[[^\[\]]{0,12}\]")
MAX_CALLS = 8
MAX_PARTS = 60


def is_unevaluated(answer: str, reference: str, problem: str, rule: UnevaluatedRule) -> bool:
    """Whether a right answer holds an operation that it should evaluate; see the module."""
    if rule == "accept" or max(len(answer), len(reference)) > MAX_CHARS:
        return False
    first, second = spelled(trimmed(answer), trimmed(reference))
    problem = with_letters(problem[:MAX_PROBLEM_CHARS])
    pair = settle_choices(first, second)
    if isinstance(pair, Verdict):
        return False
    if pair != (first, second):
        first, second = normalise(pair[0]), normalise(pair[1])
    first, second = _values(first, second)
    if not first or first == second or without_marks(first) == without_marks(second):
        return False
    if isinstance(read_plain(first), Words):
        return False
    if is_other_form(first, second, problem):
        return True
    if _is_linear_copy(first, second, problem, rule):
        return True
    if determinant_cells(first) and not determinant_cells(second):
        return rule == "refuse" or not problem or _holds_entries(problem, first)
    # C(5,2) is a binomial coefficient, here as in comparisons.
    first, second = normalise(respell(first, second)), normalise(respell(second, first))
    (held, unit), (wanted, _) = split_unit(first), split_unit(second)
    if unit is not None and not form_of(held.strip()) and unit.dimension in ("", ANGLE):
        held = first
    operations, allowed = operations_of_both(held.strip(), wanted.strip())
    extra = operations - allowed
    if _REGION.search(second):
        extra = Counter({kind: extra[kind] for kind in extra if kind not in _OF_SETS})
    if not extra:
        return False
    is_number = form_of(held.strip()) == "scientific"
    if rule == "refuse" and not is_number and _is_open(extra, allowed):
        return True
    is_shown = bool(+allowed) and _shows(problem, wanted.strip())
    return not is_shown and _is_copied(held, extra, allowed, problem)


def _shows(problem: str, reference: str) -> bool:
    """Whether the problem contains the reference alone, not within a longer expression."""
    text = normalise(problem[:MAX_PROBLEM_CHARS])
    # A word before or behind it is no factor, but a single letter is.
    before = r"(?<![-0-9+*/^({\\])(?<![^A-Za-z\\][A-Za-z])"
    behind = r"(?! ?[-+*/^=(]|[0-9]|[A-Za-z](?![A-Za-z]))"
    return re.search(before + re.escape(reference) + behind, text) is not None


def _is_open(extra: Counter[str], allowed: Counter[str]) -> bool:
    is_factored = allowed[BRACKETS] > 0
    return any(
        kind in OPEN_KINDS
        or kind.startswith(CALL)
        or (kind == TOP_SUM and is_factored)
        or (kind == "sum" and not allowed["sum"])
        for kind in extra
    )


def _values(first: str, second: str) -> tuple[str, str]:
    """Both texts without the names that they give to their values."""
    sides, others = ([side.strip() for side in split_at(t, "=")] for t in (first, second))
    if len(others) == 2 and _BARE_NAME.fullmatch(others[0]):
        others = others[1:]
    if len(others) > 1:
        return first, second
    if len(sides) > 1:
        if not any(map(_LETTER.search, sides)):
            # 2+3=5 is worked out on one side.
            sides.sort(key=len, reverse=True)
        elif _BARE_NAME.fullmatch(sides[-1]):
            sides.reverse()
        elif len(sides) == 2 and _is_equation(sides):
            return first, others[0] if others else second
    return sides[-1], others[0]


def _is_equation(sides: list[str]) -> bool:
    """`x+3=7` and `x^2=9` tell no value; `f(2)=7`, `AB=7` and `\\cos A=\\frac12` do."""
    if _BARE_NAME.fullmatch(sides[0]):
        return False
    tree = parse_expression(sides[0])
    return tree is not None and (tree[0] == "sum" or (tree[0] != "num" and _has_number(tree)))


def _has_number(tree: Tree) -> bool:
    if tree[0] == "call":
        return False
    return tree[0] == "num" or any(_has_number(c) for c in tree[1:] if isinstance(c, tuple))


def _is_linear_copy(first: str, second: str, problem: str, rule: UnevaluatedRule) -> bool:
    """Whether a sum, product, power or transpose of matrices in numbers remains to be done."""
    operands = operands_of(first)
    if not operands or operands_of(second) or _LETTER.search(_TRANSPOSE.sub("", first)):
        return False
    return rule == "refuse" or all(stands_in(one, problem) for one in operands)


def _holds_entries(problem: str, determinant: str) -> bool:
    """Whether a problem has the numbers of a determinant in a row, in any order or notation."""
    found = _entries(normalise(problem[:MAX_PROBLEM_CHARS]))
    wanted = Counter(_entries(determinant))
    size = wanted.total()
    windows = (found[place : place + size] for place in range(len(found) - size + 1))
    return any(Counter(window) == wanted for window in windows)


def _entries(text: str) -> list[Fraction]:
    numbers = [Fraction(number) for number in _NUMERAL.findall(_ROW_GAP.sub(" ", text))]
    # Rows and columns of a unit matrix change no determinant.
    return [number for number in numbers if number not in (0, 1)]


# --- copied ---------------------------------------------------------------------------------------


def _is_copied(text: str, extra: Counter[str], allowed: Counter[str], problem: str) -> bool:
    if not problem:
        return False
    if any(stands_in(same, problem) for same in _other_spellings(text)):
        return True
    tree = parse_expression(text)
    trees = () if tree is None else tuple(_settled(tree, cancels=c) for c in (False, True))
    if stands_in(text, problem, *trees):
        return True
    parts = [part for whole in trees for part in subtrees(whole)][:MAX_PARTS]
    if any(operations_of(part) - allowed and is_run(problem, part) for part in parts):
        return True
    if not any(kind.startswith(CALL) for kind in extra):
        return False
    return any(stands_in(call, problem) for call in _calls(text))


def _other_spellings(text: str) -> list[str]:
    """The text with angles in degrees for parts of pi, per cent for decimals, and the cosine for
    one over the secant."""
    spellings = [
        _ANGLE.sub(_in_degrees, text),
        _DECIMAL.sub(_in_percent, text),
        _RECIPROCAL.sub(lambda m: f"\\{_RECIPROCALS[m[1] or m[3]]} {m[2] or m[4]}", text),
    ]
    return [spelling for spelling in spellings if spelling != text]


def _in_degrees(match: re.Match[str]) -> str:
    factor = int(match["top"] or match["above"] or match["times"] or 1)
    degrees = Fraction(
        180 * factor, int(match["below"] or match["bottom"] or match["over"] or 1) or 1
    )
    return f"{degrees}\\deg " if degrees.denominator == 1 else match[0]


def _in_percent(match: re.Match[str]) -> str:
    percent = Fraction(match[0]) * 100
    return f"{percent}%" if percent.denominator == 1 else match[0]


def _calls(text: str) -> list[str]:
    """Functions of a text with their arguments."""
    calls = []
    for match in list(_CALL_START.finditer(text))[:MAX_CALLS]:
        depth, end = 0, len(text)
        is_long = match[0] in _LONG_CALLS
        for place in range(match.end(), len(text)):
            char = text[place]
            depth += (char in "({[") - (char in ")}]")
            is_next = char in "+-*/=,;" and place > match.end() and text[place - 1] not in "^_("
            if depth < 0 or (depth == 0 and is_next and not (is_long and char in "*/")):
                end = place
                break
        # The square of a cosine holds the cosine.
        name, argument = match[0], text[match.end() : end]
        calls.append(f"{name} {_FUNCTION_POWER.sub('', argument)}")
    return calls


def _settled(tree: Tree, *, cancels: bool) -> Tree:
    """A tree without redundant parts: `+0`, `*1`, `^1`, products with 0.

    cancels: also without `+5-5` and `*2/2`.
    """
    kind = tree[0]
    if kind in ("num", "sym", "const"):
        return tree
    if kind == "call":
        return (*tree[:2], *(_settled(child, cancels=cancels) for child in tree[2:]))
    children = [_settled(child, cancels=cancels) for child in tree[1:]]
    if kind == "pow":
        if children[1] == ONE:
            return children[0]
        return ONE if children[1] == ZERO else (kind, *children)
    is_sum = kind == "sum"
    neutral = ZERO if is_sum else ONE
    if not is_sum and ZERO in children:
        return ZERO
    left: list[Tree] = []
    for child in children:
        opposite = _opposite(child, is_sum=is_sum)
        if cancels and opposite in left:
            left.remove(opposite)
        elif child != neutral:
            left.append(child)
    if not is_sum and left and all(_is_inverse(factor) for factor in left):
        # The 1 above a fraction bar is none that was added.
        return (kind, neutral, *left)
    if len(left) < 2:
        return left[0] if left else neutral
    return (kind, *left)


def _is_inverse(tree: Tree) -> bool:
    return tree[0] == "pow" and tree[2] == MINUS_ONE


def _opposite(tree: Tree, *, is_sum: bool) -> Tree:
    if is_sum:
        if tree[0] == "num":
            return ("num", -tree[1])
        if tree[0] == "prod" and tree[1] == MINUS_ONE:
            return tree[2] if len(tree) == 3 else ("prod", *tree[2:])
        return ("prod", MINUS_ONE, tree)
    if tree[0] == "pow" and tree[2] == MINUS_ONE:
        return tree[1]
    return inverse(tree)
