r"""Markup around an answer, and what JSON and HTML made of its LaTeX.

Pure string code; runs in the verifier and its grading processes. Doubled backslashes become single
ones, `\x0crac` (JSON's reading of `\frac`) becomes `\frac`, `&lt;` becomes `<`, and the stars of
Markdown go.
"""

import re

_RUN = re.compile(r"\\+")
_ESCAPED = re.compile(
    r"\\\\(?:[{}$%]|\(.{0,1000}\\\\\)|\[.{0,1000}\\\\\]|(?:[dt]?frac|sqrt|pi|text|left|le|leq|ge|geq"
    r"|ne|neq|infty|boxed|begin|pm|mp|angle|triangle|mathbb|mathrm|cos|sin|tan|ln|log|cdot|times|cup"
    r"|cap|in|theta|alpha|beta|gamma|lambda|omega|phi|circ|binom|overline|quad|det)(?![A-Za-z]))",
    re.DOTALL,
)
MAX_ESCAPES = 3
_STRONG = re.compile(
    r"(?<![0-9A-Za-z)}\]*])(\*\*|__)(?=[^\s*_])([^*_]{1,200}(?:[*_][^*_]{1,200}){0,9})\1"
    r"(?![0-9A-Za-z({\[\\*])"
)
_AROUND = ("```", "`", "**", "__", "*", "_")
# Commands whose first letter, behind a backslash, is an escape of JSON and Python.
_SWALLOWED = re.compile(
    r"\x0c(?=rac(?![a-z]))|\x08(?=(?:inom|oxed|egin|eta|ar|mod)(?![a-z]))"
    r"|\t(?=(?:ext|imes|frac|heta|an|au|o|riangle)(?![a-z]))|\r(?=(?:ight|ho|ceil|floor)(?![a-z]))"
)
_LETTERS = {"\x0c": "\\f", "\x08": "\\b", "\t": "\\t", "\r": "\\r"}
# The escape at the start of a text is stripped as a blank.
_CUT = {"rac{": "\\frac{", "ext{": "\\text{"}
_ENTITY = re.compile(r"&(lt|gt|le|ge|ne|amp|nbsp|times|minus|pi|deg|plusmn|quot|infin);")
_ENTITIES = {
    "lt": "<", "gt": ">", "le": "≤", "ge": "≥", "ne": "≠", "amp": "&", "nbsp": " ", "times": "×",
    "minus": "-", "pi": "π", "deg": "°", "plusmn": "±", "quot": '"', "infin": "∞",
}  # fmt: skip
_TAG = re.compile(r"<(/?)(b|i|strong|em|code|u|span|p|sup|sub)>")
_RAISED = {"sup": "^{", "sub": "_{"}


def unescaped(text: str) -> str:
    """The text with single backslashes if all were doubled, and with its swallowed ones."""
    if text[:4] in _CUT:
        text = _CUT[text[:4]] + text[4:]
    if not text.isprintable():
        text = _SWALLOWED.sub(lambda match: _LETTERS[match[0]], text)
    for _ in range(MAX_ESCAPES):
        if "\\\\" not in text or not _ESCAPED.search(text):
            return text
        if any(len(run) % 2 for run in _RUN.findall(text)):
            return text
        text = _RUN.sub(lambda run: "\\" * (len(run[0]) // 2), text)
    return text


def without_markup(text: str) -> str:
    """The text without HTML, and without stars, underscores and backquotes around it."""
    if "&" in text and ";" in text:
        text = _ENTITY.sub(lambda match: _ENTITIES[match[1]], text)
    if "</" in text:
        text = _TAG.sub(_spell_tag, text)
    if text[:1] == "'" == text[-1:] and text.count("'") == 2:
        text = text[1:-1]
    has_marks = "*" in text or "_" in text or "`" in text
    return _without_markdown(text) if has_marks else text


def _spell_tag(tag: re.Match[str]) -> str:
    is_raised = tag[2] in _RAISED
    return "}" * is_raised if tag[1] else _RAISED.get(tag[2], "")


def _without_markdown(text: str) -> str:
    text = _STRONG.sub(r"\2", text.strip())
    for mark in _AROUND:
        inner = text[len(mark) : -len(mark)]
        is_whole = text.startswith(mark) and text.endswith(mark) and mark[0] not in inner
        if is_whole and inner.strip():
            return inner.strip()
    return text
