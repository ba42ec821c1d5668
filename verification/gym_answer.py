"""Scores of reasoning_gym tasks through the dataset's own scorer.

Runs in a grading process: some scorers hand the answer to SymPy, which evaluates text. Datasets
whose scorers cannot be trusted are refused by name before a run starts. Screens refuse answers that
other scorers would accept although they do not answer the question; all other answers go to the
scorer. Both lists come from giving the same answers, and pieces of the question, to every dataset
of reasoning_gym 0.1.25.
"""

import ast
import functools
import json
import math
import re
import tokenize
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from verification.verdict import CORRECT, WRONG, GradingError, Verdict

_EVALUATES = "its scorer evaluates the answer as Python"
_NO_REFERENCE = "its entries carry no reference answer"
_NOT_JSON = "its scorer compares tuples, which entries no longer hold after JSON"
REFUSED_DATASETS = {
    "string_insertion": _EVALUATES,
    "spiral_matrix": _EVALUATES,
    "binary_matrix": _EVALUATES,
    "n_queens": _EVALUATES,
    "game_of_life_halting": "its scorer accepts any text",
    "coin_flip": "its scorer accepts any prefix of the answer, such as 0",
    "prime_factorization": "its scorer raises on text that is no number",
    "list_functions": "the same seed gives different entries",
    "arc_agi": _NOT_JSON,
    "rearc": _NOT_JSON,
    "boxnet": _NO_REFERENCE,
    "graph_color": _NO_REFERENCE,
    "propositional_logic": _NO_REFERENCE,
    "rubiks_cube": _NO_REFERENCE,
    "rush_hour": _NO_REFERENCE,
    "composite": "it mixes other datasets: list those instead",
}

# Their scorers call sympy.parse_expr, which runs any Python in the text.
_SYMPY_DATASETS = frozenset(
    {
        "simple_integration", "intermediate_integration", "polynomial_multiplication",
        "countdown", "puzzle24",
    }
)  # fmt: skip
_SAFE_NAMES = frozenset(
    "sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log ln sqrt Abs pi E C".split()
)
_SAFE_TEXT = re.compile(r"[A-Za-z0-9\s+\-*/^().,=]*")
_NAME = re.compile(r"[A-Za-z]+")
_ATTRIBUTE = re.compile(r"\.\s*[A-Za-z]")
MAX_ANSWER_CHARS = 20_000

# Exceptions of scorers and their parsers on text that they cannot parse.
_SCORER_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, SyntaxError,
    TypeError, ValueError, tokenize.TokenError,
)  # fmt: skip


UNEVALUATED = Verdict(False, "unevaluated")
NON_FINITE = Verdict(False, "non_finite_answer")
SEVERAL = Verdict(False, "several_answers")
MALFORMED = Verdict(False, "unscorable_answer")
# Both puzzles have at most six numbers.
MAX_ARITHMETIC_CHARS = 200

_WORD = re.compile(r"[^\W\d_]+")
_NON_FINITE_WORDS = frozenset("nan nani nanj inf infi infj infinity infinityi infinityj".split())
_JOINING_WORDS = frozenset("i j e or and days day".split())
# Not within a hexadecimal number such as 0x7e999.
_FLOAT = re.compile(r"(?<![0-9A-Za-z_])[0-9.][0-9_.]{0,60}[eE][+-]?[0-9_]+")
_COUNT = re.compile(r"(-\s?)?\$?((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)")
_PLAIN_FLOAT = r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_POINT = re.compile(rf"\(?\s*{_PLAIN_FLOAT}\s*,\s*{_PLAIN_FLOAT}\s*\)?")
_ROOTS = re.compile(rf"{_PLAIN_FLOAT}(?:\s*,\s*{_PLAIN_FLOAT})*")
_NO_ROOTS = frozenset({"", '""', "''", "none", "no real solutions", "no solution", "no solutions"})
_DAYS = re.compile(r"[+-]?[0-9]+(?: days?)?\.?", re.IGNORECASE)
_DURATION = re.compile(r"(?:[0-9]+ days?,? ?)?[0-9]{1,3}:[0-9]{1,2}(?::[0-9]{1,2}(?:\.[0-9]+)?)?")
_ARITHMETIC = re.compile(r"[0-9\s+\-*/()]*")
_DIGITS = re.compile(r"[0-9]+")
_BUTTONS = re.compile(r"[A-Ca-c](?:\W*[A-Ca-c])*\W*")
_TEXT = re.compile(r"\\(?:text|texttt|mathrm|textbf) ?\{([^{}]*)\}")
_MOVES = re.compile(r"[UDLR\s,]*")


def compare_quickly(answer: str, reference: str) -> Verdict | None:
    """Correct for the reference itself, which every scorer not refused accepts; else None."""
    return CORRECT if answer == reference else None


def compare(answer: str, entry_json: str) -> Verdict:
    """Verdict of the dataset's own scorer; only its full score counts as correct.

    The entry is {"question", "answer", "metadata"} with the dataset's name in "dataset" or in
    metadata.source_dataset. Raises GradingError for a bad entry, also for one
    whose reference its scorer does not accept. A scorer that raises on the answer makes it
    "unscorable_answer"; see `screen` for answers that never reach it.
    """
    entry = _parse_entry(entry_json)
    name = _dataset_of(entry)
    if len(answer) > MAX_ANSWER_CHARS:
        return Verdict(False, "answer_too_long")
    if name in _SYMPY_DATASETS and not is_plain_expression(answer):
        return Verdict(False, "unsafe_answer")
    _check_reference(name, entry_json)
    try:
        screened = screen(name, answer, entry)
        if screened is not None:
            return screened
        return CORRECT if _scorer(name)(answer, entry) == 1.0 else WRONG
    except _SCORER_ERRORS:
        return Verdict(False, "unscorable_answer")


def is_plain_expression(text: str) -> bool:
    """Whether a text holds only numbers, operators, one-letter names and elementary functions."""
    if not _SAFE_TEXT.fullmatch(text) or _ATTRIBUTE.search(text):
        return False
    return all(len(name) == 1 or name in _SAFE_NAMES for name in _NAME.findall(text))


def prepare() -> None:
    """Load reasoning_gym, so that no completion pays for it."""
    _scorer("chain_sum")


def _parse_entry(entry_json: str) -> dict[str, Any]:
    try:
        entry = json.loads(entry_json)
    except json.JSONDecodeError as error:
        raise GradingError(f"the entry of a reasoning_gym prompt is no JSON: {error}") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("answer"), str):
        raise GradingError("the entry of a reasoning_gym prompt holds no text under 'answer'")
    return entry


def _dataset_of(entry: dict[str, Any]) -> str:
    metadata = entry.get("metadata")
    name = entry.get("dataset")
    if name is None and isinstance(metadata, dict):
        name = metadata.get("source_dataset")
    if not isinstance(name, str):
        raise GradingError("the entry of a reasoning_gym prompt names no dataset")
    if name in REFUSED_DATASETS:
        raise GradingError(f"reasoning_gym dataset {name!r} is refused: {REFUSED_DATASETS[name]}")
    return name


@functools.cache
def _scorer(name: str) -> Callable[[str, dict[str, Any]], float]:
    # Imported here: the verifier's own process checks names only and needs no reasoning_gym.
    from reasoning_gym.factory import get_score_answer_fn

    try:
        return get_score_answer_fn(name)
    except ValueError as error:
        raise GradingError(f"reasoning_gym has no dataset {name!r}") from error


@functools.lru_cache(maxsize=1024)
def _check_reference(name: str, entry_json: str) -> None:
    """Raise GradingError unless screen and scorer accept the entry's own answer; once an entry."""
    entry = _parse_entry(entry_json)
    try:
        screened = screen(name, entry["answer"], entry)
        score = _scorer(name)(entry["answer"], entry)
    except _SCORER_ERRORS as error:
        problem = f"the scorer of {name!r} fails on its reference: {error!r:.200}"
        raise GradingError(problem) from error
    if screened not in (None, CORRECT):
        raise GradingError(f"{name!r} calls its own reference a {screened.reason}")
    if screened is None and score != 1.0:
        raise GradingError(
            f"the scorer of {name!r} scores its reference answer {score} instead of 1"
        )


def screen(name: str, answer: str, entry: dict[str, Any]) -> Verdict | None:
    """The verdict on an answer that the dataset's scorer would misread; None: it decides.

    Reasons: non_finite_answer (`nan` is at no distance from anything), several_answers,
    unevaluated, unscorable_answer, wrong_answer.
    """
    answer = answer.strip()
    if not _is_finite(answer):
        return NON_FINITE
    dataset_screen = _SCREENS.get(name)
    return None if dataset_screen is None else dataset_screen(answer, entry)


def _is_finite(answer: str) -> bool:
    """False for numbers of which one is not finite; a word among other words is no number."""
    words = {word.lower() for word in _WORD.findall(answer)}
    if words & _NON_FINITE_WORDS and words <= _NON_FINITE_WORDS | _JOINING_WORDS:
        return False
    return not any(math.isinf(_float(match[0])) for match in _FLOAT.finditer(answer))


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _one_count(answer: str, entry: dict[str, Any]) -> Verdict | None:
    """The scorer takes the first digits of any text, without their sign."""
    numbers = _COUNT.findall(answer)
    if len(numbers) != 1 or any(mark in answer for mark in "*/=^"):
        return SEVERAL if numbers else MALFORMED
    sign, digits = numbers[0]
    value = Fraction(digits.replace(",", "")) * (-1 if sign else 1)
    return CORRECT if value == Fraction(entry["answer"].replace(",", "")) else WRONG


def _assignments(answer: str, entry: dict[str, Any]) -> Verdict | None:
    """The scorer skips words between a name and a role, such as `if` and `or`."""
    reference = {word.lower() for word in _WORD.findall(entry["answer"])}
    words = {word.lower() for word in _WORD.findall(answer)}
    return None if words <= reference | {"is", "a", "an", "and"} else WRONG


def _orthocenter(answer: str, entry: dict[str, Any]) -> Verdict | None:
    """The scorer reads the first two numbers of a list."""
    is_point = entry["metadata"].get("task_type") == "orthocenter"
    return MALFORMED if is_point and not _POINT.fullmatch(answer) else None


def _roots(answer: str, entry: dict[str, Any]) -> Verdict | None:
    """The scorer skips all but numbers: text without a number would mean "no roots"."""
    if not entry["answer"]:
        return None if answer.lower().rstrip(".") in _NO_ROOTS else WRONG
    return None if _ROOTS.fullmatch(answer) else MALFORMED


def _expanded(answer: str, entry: dict[str, Any]) -> Verdict | None:
    """SymPy multiplies by a number, and powers of one name, while it reads: `2*(x + 3)`."""
    if "(" in answer:
        return UNEVALUATED
    monomials = []
    for term in re.split(r"[+-]", answer.replace(" ", "").replace("**", "^")):
        if term:
            factors = term.split("*")
            names = sorted(factor for factor in factors if not factor.isdigit())
            bases = {name.split("^")[0] for name in names}
            is_product = len(factors) - len(names) > 1 or len(bases) < len(names) or "/" in term
            if is_product or any(base[:1].isdigit() for base in bases):
                return UNEVALUATED
            monomials.append(tuple(names))
    return UNEVALUATED if len(set(monomials)) < len(monomials) else None


def _interval(answer: str, entry: dict[str, Any]) -> Verdict | None:
    """The scorer reads only the start of the answer."""
    is_date = entry["metadata"].get("task_type") == "date"
    return None if (_DAYS if is_date else _DURATION).fullmatch(answer) else MALFORMED


def _puzzle24(answer: str, entry: dict[str, Any]) -> Verdict | None:
    """The scorer does not look at the question's numbers: `6*4*1*1` would solve every puzzle."""
    return _arithmetic(answer, entry["metadata"]["numbers"], 24)


def _countdown(answer: str, entry: dict[str, Any]) -> Verdict | None:
    return _arithmetic(answer, entry["metadata"]["numbers"], entry["metadata"]["target"])


def _arithmetic(answer: str, numbers: list[int], target: int) -> Verdict | None:
    """Whether an expression of the four operations uses each number once and gives the target."""
    answer = answer.removesuffix(".")
    if len(answer) > MAX_ARITHMETIC_CHARS or not _ARITHMETIC.fullmatch(answer):
        return MALFORMED
    if sorted(map(int, _DIGITS.findall(answer))) != sorted(numbers):
        return WRONG
    try:
        return None if _value(ast.parse(answer, mode="eval").body) == target else WRONG
    except (SyntaxError, ArithmeticError, ValueError):
        return MALFORMED


def _value(node: ast.expr) -> Fraction:
    """Exact value; ValueError for anything but the four operations."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATIONS:
        raise ValueError("no operation of arithmetic")
    return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))


_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


def _only(pattern: re.Pattern[str]) -> Callable[[str, dict[str, Any]], Verdict | None]:
    """A screen for scorers that pick single letters out of any text."""
    return lambda answer, entry: None if pattern.fullmatch(_bare(answer)) else MALFORMED


def _bare(answer: str) -> str:
    """An answer without a final full stop, dollar signs or `\\text{}` around it."""
    answer = answer.removesuffix(".").strip().strip("$").removesuffix("\\")
    match = _TEXT.fullmatch(answer)
    return match[1] if match else answer


_SCREENS: dict[str, Callable[[str, dict[str, Any]], Verdict | None]] = {
    "advanced_geometry": _orthocenter,
    "countdown": _countdown,
    "gsm_symbolic": _one_count,
    "knights_knaves": _assignments,
    "polynomial_equations": _roots,
    "polynomial_multiplication": _expanded,
    "puzzle24": _puzzle24,
    "quantum_lock": _only(_BUTTONS),
    "sokoban": _only(_MOVES),
    "time_intervals": _interval,
}
