"""Whether a boxed answer equals a mathematical reference.

`compare_quickly` is pure string code and runs in the verifier; `compare` calls math-verify, which
may hang or eat memory on hostile text, and runs only in a grading process.
"""

import logging
import re

from verification.verdict import CORRECT, WRONG, Verdict

MAX_ANSWER_CHARS = 1000
MAX_DEPTH = 30
MAX_DIGITS = 400
_INTEGER = re.compile(r"[+-]?[0-9]+")
_LONG_NUMBER = re.compile(rf"[0-9]{{{MAX_DIGITS},}}")
# Towers, exponents of five digits or more, and factorials that SymPy would write out in full.
_EXPLOSIVE = re.compile(
    r"(?:\^|\*\*)[\s{(]*-?[0-9]{5,}"
    r"|(?:\^|\*\*)[\s{(]*-?[0-9.]+[\s})]*(?:\^|\*\*)"
    r"|[0-9]{4,}[\s})]*!"
    r"|!\s*!|!\s*\)+\s*!"
)


def compare_quickly(answer: str, reference: str) -> Verdict | None:
    """Verdict where plain text decides: equal text, two integers, hopeless input; else None.

    Time linear in the answer. Reasons of refusal: answer_too_long, too_many_digits,
    answer_too_deep, explosive_answer.
    """
    answer, reference = _tidy(answer), _tidy(reference)
    if answer == reference:
        return CORRECT
    if len(answer) > MAX_ANSWER_CHARS:
        return Verdict(False, "answer_too_long")
    if _LONG_NUMBER.search(answer):
        return Verdict(False, "too_many_digits")
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(reference):
        return CORRECT if int(answer) == int(reference) else WRONG
    if _depth(answer) > MAX_DEPTH:
        return Verdict(False, "answer_too_deep")
    if _EXPLOSIVE.search(answer) and not _EXPLOSIVE.search(reference):
        return Verdict(False, "explosive_answer")
    return None


def compare(answer: str, reference: str) -> Verdict:
    """Verdict of math-verify on the answer, both sides wrapped as one boxed expression.

    Unbounded in time and memory: call it only in a grading process.
    """
    # Imported here: the verifier's own process uses the quick half and needs no SymPy.
    from math_verify import parse, verify

    quick = compare_quickly(answer, reference)
    if quick is not None:
        return quick
    # The grading process has its own limits; math-verify's would replace its signal handler.
    gold = parse(f"\\boxed{{{_tidy(reference)}}}", parsing_timeout=None)
    target = parse(f"\\boxed{{{_tidy(answer)}}}", parsing_timeout=None)
    return CORRECT if verify(gold, target, timeout_seconds=None) else WRONG


def prepare() -> None:
    """Load math-verify and its grammar, so that no completion pays for it."""
    for name in ("math_verify", "math_verify.parser", "math_verify.grader", "math_verify.utils"):
        # They warn once that no timeout is set and log every parse error of a completion.
        logging.getLogger(name).setLevel(logging.CRITICAL)
    compare("\\frac{1}{2}", "0.25")


def _tidy(text: str) -> str:
    """Text without math delimiters, surrounding space and a final full stop."""
    text = text.replace("\\$", "").replace("$", "").strip()
    return text.removesuffix(".").rstrip()


def _depth(text: str) -> int:
    deepest = depth = 0
    for char in text:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth -= 1
    return deepest
