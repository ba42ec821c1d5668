"""math-verify's verdicts on two answers, for audits: they decide no verdict.

Runs in grading processes only: its grammar and SymPy may take unbounded time and memory. Its own
timeouts are off: they replace signal handlers, and the grading process has limits already.
"""

import functools
import logging
import re
from fractions import Fraction
from typing import Any

PRECISION_DIGITS = 30
_DECIMAL = re.compile(r"(?<![0-9.,_])([0-9]*)\.([0-9]+)(?![0-9.])")
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])")
_NAMES = {
    "\\deg ": "^\\circ ", "\\reals": "\\mathbb{R}", "\\integers": "\\mathbb{Z}",
    "\\naturals": "\\mathbb{N}", "\\rationals": "\\mathbb{Q}", "\\complexes": "\\mathbb{C}",
    "*": "\\cdot ",
}  # fmt: skip


def same_by_library(first: str, second: str) -> bool | None:
    """Whether math-verify calls two normalised texts equal both ways round.

    None if it cannot read one of the texts; it may parse a fragment of a text and compare that.
    Decimals are exact: 0.333 is not 1/3. Only its LaTeX grammar is used: its other reader hands
    text to `sympy.parse_expr`.
    """
    # Imported here: the verifier's own process and quick comparisons need no SymPy.
    from math_verify import verify

    pair = [_parse(_respell(text)) for text in (first, second)]
    if not all(pair):
        return None
    # It folds case: `X` and `x` are one symbol to it.
    if _differ_by_case(first, second):
        return False
    options = {"timeout_seconds": None, "numeric_precision": PRECISION_DIGITS}
    return all(verify(gold, target, **options) for gold, target in (pair, pair[::-1]))


def same_by_bare_library(answer: str, reference: str) -> bool:
    """Whether math-verify alone, as most trainers use it, takes the boxed answer for the reference.

    False if it cannot read one of the texts.
    """
    from math_verify import parse, verify

    gold, target = (
        parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (reference, answer)
    )
    return bool(verify(gold, target, timeout_seconds=None))


@functools.lru_cache(maxsize=256)
def _parse(text: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    for name in ("math_verify", "math_verify.parser", "math_verify.grader", "math_verify.utils"):
        # They warn once that no timeout is set and log every parse error of a completion.
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return parse(
        f"\\boxed{{{text}}}",
        extraction_config=[LatexExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )


def _respell(text: str) -> str:
    """Normalised text in LaTeX that math-verify knows, decimals as fractions."""
    for name, latex in _NAMES.items():
        text = text.replace(name, latex)
    return _DECIMAL.sub(_as_fraction, text)


def _as_fraction(match: re.Match[str]) -> str:
    value = Fraction(f"{match[1] or 0}.{match[2]}")
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _differ_by_case(first: str, second: str) -> bool:
    letters, others = set(_LETTER.findall(first)), set(_LETTER.findall(second))
    return letters != others and {x.lower() for x in letters} == {x.lower() for x in others}
