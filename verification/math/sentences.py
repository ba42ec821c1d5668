r"""What answers say in words around a value, in the notation of mathematics.

Pure string code; runs in the verifier and its grading processes on texts whose commands have one
spelling. `\text{The area is }12` is `\text{The area}=12`, "all real numbers except 2" is
`\reals\setminus\{2\}`, and `{1\over2}` a fraction.
"""

import re

_OVER = re.compile(r"\{([^{}]{1,60}?) ?\\over(?![A-Za-z]) ?([^{}]{1,60})\}")
_OVER_SIGN = re.compile(r" ?\\over(?![A-Za-z]) ?")
# \\mathbf{\\frac12} is no text.
_BOLD = re.compile(r"\\text ?\{(?=[^{}]{0,40}\\(?:frac|sqrt)[^{}]{0,40}\{)")
_WORDS = r"[A-Za-z][A-Za-z' -]{2,60}?"
_STATED = re.compile(
    rf"\\text\{{ ?(?P<words>{_WORDS})(?: is| are| equals| is equal to| ?:) ?\}} ?"
    r"(?P<rest>[^A-Za-z].*)",
    re.DOTALL,
)
_STATED_EQUATION = re.compile(
    r"\\text\{ ?(?:the )?(?:equation(?: of the (?:line|circle|parabola|ellipse))?|solutions?|line)"
    r"(?: is| are| ?:) ?\} ?(?P<rest>[^\\]*=.*)",
    re.DOTALL | re.IGNORECASE,
)
_NO_LABEL = re.compile(
    r"(?<![A-Za-z])(?:(?:yes|true|false|option|choice|case|step|part|[A-J])$"
    r"|(?:negative|minus|plus|times|over|half|twice|double|inverse|reciprocal|opposite|than)"
    r"(?![A-Za-z]))",
    re.IGNORECASE,
)
# "The area is 3*4=12": a chain, whose values must agree.
_CHAIN = re.compile(
    r"(?P<words>\\text\{[A-Za-z' -]{2,60}?|[A-Za-z][A-Za-z' ]{0,60}?) ?(?<![A-Za-z])"
    r"(?:is equal to|is|are|equals)(?![A-Za-z]) ?(?P<end>\}?) ?"
    r"(?P<rest>(?:[-+*/(){}0-9., ]|\\(?:frac|sqrt|pi|deg)(?![a-z])){1,80}=.*)",
    re.DOTALL,
)
# What stands behind a label must be one value, not an equation or a list of labels.
_NO_VALUE = re.compile(r"[=<>:;]|\\(?:le|ge|ne|in|approx|equiv)(?![a-z])|, |\\text\{[^{}]*:")
_TEXT = re.compile(r"\\text ?\{([^{}]*)\}")
_EXCEPT = re.compile(
    r" *(?:the set of )?all (?:real numbers|reals|real values|real) ?(?:of )?(?:x)? ?,?"
    r" *(?:except|excluding|other than|besides) (?:for )?(?:when )?(?P<rest>.{1,80})",
    re.DOTALL,
)
_EXCLUDED = re.compile(r"(?:[a-z] ?= ?)?((?:[-+0-9./^{} ]|\\(?:frac|sqrt|pm|pi) ?){1,30})")
_SEPARATOR = re.compile(r",? and | or |,")
_FOR_ALL = re.compile(
    r"(?P<function>[fgh]\(x\) ?=[^\\,;]{1,80}?|[fgh]\(x\) ?=(?:(?!\\text|\\forall).){1,80}?) ?,? ?"
    r"(?:\\text\{ ?,? ?for (?:all|any|every)(?: real)?(?: numbers?)? ?\}|\\forall(?![a-z])) ?x"
    r"(?: ?\\in ?\\reals)?",
    re.DOTALL,
)


def spell_sentences(text: str) -> str:
    """The text with `=` behind labels, exceptions as sets and `\\over` as a fraction."""
    if "\\over" in text:
        text = _OVER.sub(r"\\frac{\1}{\2}", text)
        halves = _OVER_SIGN.split(text)
        if len(halves) == 2 and all(half.count("{") == half.count("}") for half in halves):
            text = f"\\frac{{{halves[0]}}}{{{halves[1]}}}"
    if "for" in text:
        match = _FOR_ALL.fullmatch(text)
        text = match["function"] if match else text
    if "=" in text:
        match = _CHAIN.fullmatch(text)
        text = f"{match['words']}{match['end']}={match['rest']}" if match else text
    if "\\text" not in text and "all real" not in text:
        return text
    text = _BOLD.sub("{", text)
    stated = _STATED_EQUATION.fullmatch(text)
    if stated and ":" not in stated["rest"]:
        return stated["rest"]
    stated = _STATED.fullmatch(text)
    if stated and not _NO_LABEL.search(stated["words"]) and not _NO_VALUE.search(stated["rest"]):
        return f"\\text{{{stated['words']}}}={stated['rest']}"
    return _spell_exception(text) if "all real" in text else text


def _spell_exception(text: str) -> str:
    match = _EXCEPT.fullmatch(_TEXT.sub(r" \1 ", text))
    if match is None:
        return text
    items = [_EXCLUDED.fullmatch(part.strip()) for part in _SEPARATOR.split(match["rest"])]
    values = [item[1].strip() for item in items if item is not None]
    if len(values) < len(items) or not all(values):
        return text
    return f"\\reals \\setminus \\{{{','.join(values)}\\}}"
