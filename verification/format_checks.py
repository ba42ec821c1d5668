"""The table FORMAT_CHECKS: forms of response that earn anything. Pure string code in linear time.

Runs in the verifier and in its grading processes.
"""

from collections.abc import Callable
from typing import NamedTuple

from verification.format import (
    CUT_OFF_REFUSALS,
    check_code_format,
    check_format,
    first_tagged_block,
    has_box,
    last_box,
    split_response,
    with_opening,
)

__all__ = ["CUT_OFF_REFUSALS", "FORMAT_CHECKS", "FormatResult"]


class FormatResult(NamedTuple):
    """What a format check found in a response."""

    refusal: str = ""
    """Why the response earns nothing; empty when it passed."""
    answer: str = ""
    """Content of the box, source of the code block, or the whole text."""
    tag: str = ""
    """Language tag of the code block."""
    thoughts: str = ""
    final: str = ""
    """What follows the thoughts; without thoughts the whole text."""


def think_box(text: str, prompt_tail: str = "") -> FormatResult:
    """One <think>...</think>, then an answer in \\boxed{}."""
    text = with_opening(text, prompt_tail)
    check = check_format(text)
    thoughts, final = split_response(text)
    return FormatResult(check.refusal, check.answer, "", thoughts, final)


def think_code(text: str, prompt_tail: str = "") -> FormatResult:
    """One <think>...</think>, then a fenced code block with a language tag."""
    text = with_opening(text, prompt_tail)
    check = check_code_format(text)
    thoughts, final = split_response(text)
    return FormatResult(check.refusal, check.source, check.tag, thoughts, final)


def box(text: str, prompt_tail: str = "") -> FormatResult:
    """An answer in \\boxed{}, wherever it is."""
    answer = last_box(text)
    if answer is None:
        return FormatResult("unclosed_box" if has_box(text) else "no_boxed")
    return FormatResult("" if answer.strip() else "empty_box", answer.strip(), final=text)


def code(text: str, prompt_tail: str = "") -> FormatResult:
    """A fenced code block with a language tag, wherever it is."""
    check = first_tagged_block(text)
    return FormatResult(check.refusal, check.source, check.tag, final=text)


def anything(text: str, prompt_tail: str = "") -> FormatResult:
    """Any text that is not blank; all of it is the answer."""
    return FormatResult("" if text.strip() else "empty_response", text, final=text)


FORMAT_CHECKS: dict[str, Callable[[str, str], FormatResult]] = {
    "think_box": think_box,
    "think_code": think_code,
    "box": box,
    "code": code,
    "none": anything,
}
"""f(response, end of the rendered prompt)."""
