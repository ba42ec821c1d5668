"""The format gate: whether a response has the shape that the system prompt asks for.

Runs in the verifier and in its grading processes. Pure string code in time linear in the text,
whatever the text is.
"""

import re
from typing import NamedTuple

THINK_START = "<think>"
THINK_END = "</think>"
BOX_START = "\\boxed{"
# An escaped character is consumed as a pair, so that \{ and \} are not counted as braces.
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)

CUT_OFF_REFUSALS = frozenset({"no_think_end", "no_boxed", "box_before_think_end", "unclosed_box"})
"""Refusals that a longer completion might have avoided."""


class FormatCheck(NamedTuple):
    """Outcome of the gate: either a boxed answer or the reason of the refusal."""

    answer: str
    """Content of the last box, stripped; empty when refused."""
    refusal: str
    """Empty when the gate is passed."""

    @property
    def is_passed(self) -> bool:
        """Whether the response has the shape asked for."""
        return not self.refusal


def check_format(text: str) -> FormatCheck:
    """The boxed answer of a response, or why the format gate refuses it.

    The response starts with `<think>`, has exactly one `<think>...</think>` pair, and after it a
    `\\boxed{}`; the last box counts. Refusals: no_think_start, several_think_tags, no_think_end,
    no_boxed, box_before_think_end, unclosed_box, empty_box.
    Source: Magistral (arXiv 2506.10910), section 2.2.1.
    """
    if not text.startswith(THINK_START):
        return FormatCheck("", "no_think_start")
    if text.count(THINK_START) > 1 or text.count(THINK_END) > 1:
        return FormatCheck("", "several_think_tags")
    thoughts, tag, final = text.partition(THINK_END)
    if not tag:
        return FormatCheck("", "no_think_end")
    if BOX_START not in final:
        return FormatCheck("", "box_before_think_end" if BOX_START in thoughts else "no_boxed")
    answer = last_box(final)
    if answer is None:
        return FormatCheck("", "unclosed_box")
    if not answer.strip():
        return FormatCheck("", "empty_box")
    return FormatCheck(answer.strip(), "")


def last_box(text: str) -> str | None:
    """Content of the last `\\boxed{...}` with balanced braces; None when it is absent or open."""
    start = text.rfind(BOX_START)
    if start < 0:
        return None
    start += len(BOX_START)
    depth = 1
    for match in _BRACE.finditer(text, start):
        if match.group() == "{":
            depth += 1
        elif match.group() == "}":
            depth -= 1
            if depth == 0:
                return text[start : match.start()]
    return None
