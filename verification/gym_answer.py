"""Scores of reasoning_gym tasks through the dataset's own scorer.

Runs in a grading process: some scorers hand the answer to SymPy, which evaluates text. Datasets
whose scorers cannot be trusted are refused by name before a run starts.
"""

import functools
import json
import re
import tokenize
from collections.abc import Callable
from typing import Any

from verification.gym_screens import screen
from verification.verdict import CORRECT, WRONG, GradingError, Verdict

_EVALUATES = "its scorer evaluates the answer as Python"
_NO_REFERENCE = "its entries carry no reference answer"
_NOT_JSON = "its scorer compares tuples, which entries no longer hold after JSON"
# Found by scoring own, empty and senseless answers of every dataset of reasoning_gym 0.1.25.
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

# Their scorers call sympy.parse_expr, which runs whatever Python the text is.
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

# What scorers and their parsers raise on text they do not understand.
_SCORER_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, SyntaxError,
    TypeError, ValueError, tokenize.TokenError,
)  # fmt: skip


def compare_quickly(answer: str, reference: str) -> Verdict | None:
    """Correct for the reference itself, which every scorer not refused accepts; else None."""
    return CORRECT if answer == reference else None


def compare(answer: str, entry_json: str) -> Verdict:
    """Verdict of the dataset's own scorer; only its full score counts as correct.

    The entry is {"question", "answer", "metadata"} with the dataset's name in "dataset" or in
    metadata.source_dataset. Raises GradingError for a bad entry, also for one
    whose reference its scorer does not accept. A scorer that raises on the answer makes it
    "unscorable_answer"; see `gym_screens.screen` for answers that never reach it.
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
