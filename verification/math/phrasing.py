r"""Styling, gaps and words around the values of an answer, reduced to plain mathematics.

Pure string code; runs in the verifier and its grading processes.

- Styling: LaTeX that changes how an answer looks goes; siunitx's commands become plain LaTeX.
- Gaps between statements, on raw text: `x=1 \quad x=2` states two values, as `x=1, x=2` does. Only
  wide spaces, line breaks and a space before a name with its own equals sign part statements:
  `A=2\,r=6` is one chain.
- Words, on text whose commands have one spelling: `\text{The area is }12` is `\text{The area}=12`,
  "all real numbers except 2" is `\reals\setminus\{2\}`, and `{1\over2}` a fraction.
"""

import re

# --- styling --------------------------------------------------------------------------------------

_ARGUMENT = r"(?:\{[^{}]{0,80}\}|\[[^\[\]]{0,80}\])"
# Removed with the content of their braces.
_INVISIBLE = re.compile(
    r"\\(?:[hv]?phantom|[hv]space|label|tag|ref|vskip|noalign|rule)(?![A-Za-z])\*? ?"
    rf"{_ARGUMENT}{{1,3}}|\\(?:[hm]?kern|[hm]skip) ?-?[0-9.]{{1,9}} ?(?:pt|em|ex|mm|cm|mu|in)"
)
# Only the commands are removed: the content of their last braces is the answer.
_DECORATION = re.compile(
    r"\\(?:textcolor|colorbox|color)(?![A-Za-z]) ?(?:\[[^\[\]]{0,40}\])?\{[^{}]{0,40}\}"
    r"|\\fcolorbox ?\{[^{}]{0,40}\} ?\{[^{}]{0,40}\}"
    r"|\\(?:underline|uline|underbar|fbox|framebox|boxed|mathop|mathbin|mathrel|mathinner|smash"
    r"|mathclap|hfill|hfil|vfill|hline|relax|noindent|centering|nonumber|notag|allowbreak|nobreak"
    r"|small|tiny|scriptsize|footnotesize|LARGE|huge|Huge|bfseries|itshape|rmfamily|scriptstyle"
    r"|cal|sf|tt)(?![A-Za-z])"
)
_ROW_END = re.compile(
    r"\\\\\*? ?\[ ?-?[0-9.]{1,9} ?(?:pt|em|ex|mm|cm|in|px|mu|\\[A-Za-z]{1,20}) ?\]|\\cr(?![A-Za-z])"
)
_MARK = re.compile(r"\\(?:text|mathrm|textrm|mbox|text(?:bf|it)|hbox) ?\{ ?([,:]) ?\}")
_PRIMES = re.compile(r"\^ ?(?:\{ ?((?:\\prime ?){1,3})\}|\\prime(?![A-Za-z]))")
_GROUP = re.compile(r"(?:^|(?<=[-+*/=(, ]))\{ ?([0-9.]{1,60}|[A-Za-z]) ?\}(?![0-9A-Za-z_^{])")
_SIUNITX_QUANTITY = re.compile(
    r"\\(?:SI|qty)(?![A-Za-z]) ?(?:\[[^\[\]]{0,80}\])?\{([^{}]{1,80})\} ?"
    r"\{((?:[^{}]|\{[^{}]{0,20}\}){1,80})\}"
)
_SIUNITX_UNIT = re.compile(
    r"\\(?:si|unit)(?![A-Za-z]) ?(?:\[[^\[\]]{0,80}\])?\{((?:[^{}]|\{[^{}]{0,20}\}){1,80})\}"
)
_SIUNITX_NUMBER = re.compile(r"\\(num|ang)(?![A-Za-z]) ?(?:\[[^\[\]]{0,80}\])?\{([^{}]{1,80})\}")
# \kilo\metre is one unit.
_PREFIX = re.compile(r"\\(milli|centi|deci|kilo|mega|micro|nano) ?\\(?=[a-z])")
_UNIT_COMMANDS = {
    "per": "/", "squared": "^2", "cubed": "^3", "percent": "%", "degree": "\\deg ",
    "degreeCelsius": "\\deg C", "celsius": "\\deg C", "dollar": "\\$", "cdot": " ", "usd": "\\$",
}  # fmt: skip
_COMMAND = re.compile(r"\\([A-Za-z]+) ?")
# Most texts consist of these alone and hold nothing to remove.
_ANY_COMMAND = re.compile(r"\\(?:[A-Za-z]+|.?)|\{(?= ?[,:])", re.DOTALL)
_PLAIN_COMMANDS = {f"\\{char}" for char in "{}(),;!%$"} | {
    f"\\{name}"
    for name in "frac dfrac tfrac sqrt text mathrm mathbf textbf pi left right cdot times le ge "
    "leq geq in infty cup cap pm circ sin cos tan ln log theta alpha beta mathbb begin end ne "
    "neq angle binom overline emptyset approx lambda".split()
}
# Possessive here and below: a space or a digit could belong to either of two turns of a repetition,
# and an answer of 40 such places would be tried in 2^40 ways.
# 1,\\! 234, as no list is spaced; "1, 234" are two numbers.
_TIGHT = r"(?:\\!|\\negthinspace(?![A-Za-z]) ?)"
_GROUPED = re.compile(
    rf"(?<![0-9.,])[1-9][0-9]{{0,2}}(?:"
    rf"(?: ?{_TIGHT}{{0,2}}\{{ ?, ?\}}(?:{_TIGHT}|\\[,:;]|[ {{}}])*+"
    rf"| ?,(?: ?{_TIGHT} ?){{1,2}}|{_TIGHT},(?:{_TIGHT}| )*+)[0-9]{{3}}(?![0-9])){{1,9}}"
)
_NOT_OF_NUMBER = re.compile(r"negthinspace|[^0-9]")


def join_thousands(text: str) -> str:
    r"""The text with `11,\! 111`, `11{,} 111` and `11\!,\!111` as `11111`."""
    if "\\!" not in text and "{," not in text and "{ ," not in text and "\\neg" not in text:
        return text
    return _GROUPED.sub(lambda match: _NOT_OF_NUMBER.sub("", match[0]), text)


def without_styling(text: str) -> str:
    """The text without colours, boxes, lines, phantoms, skips; siunitx's commands spelled out."""
    if "\\" not in text or _PLAIN_COMMANDS.issuperset(_ANY_COMMAND.findall(text)):
        return text
    text = _SIUNITX_QUANTITY.sub(lambda match: match[1] + _spell_unit(match[2]), text)
    text = _SIUNITX_UNIT.sub(lambda match: _spell_unit(match[1]), text)
    text = _SIUNITX_NUMBER.sub(lambda match: match[2] + "\\deg " * (match[1] == "ang"), text)
    text = _MARK.sub(r"{\1}", text)
    text = _ROW_END.sub(r"\\\\", text)
    text = _PRIMES.sub(lambda match: "'" * max((match[1] or "").count("\\"), 1), text)
    for pattern in (_INVISIBLE, _DECORATION):
        text = pattern.sub("", text)
    # A space at the end of a line is stripped away and leaves its backslash.
    text = text.rstrip()
    text = text[:-1] if text.endswith("\\") and not text.endswith("\\\\") else text
    return _GROUP.sub(r"\1", text)


def _spell_unit(unit: str) -> str:
    """siunitx's `\\kilo\\metre\\per\\hour` or `m.s^{-1}` as text."""
    unit = _PREFIX.sub(r"\\\1", unit).replace("~", " ").replace("\\,", " ")
    spelled = _COMMAND.sub(lambda match: f" {_UNIT_COMMANDS.get(match[1], match[1])} ", unit)
    spelled = " ".join(spelled.replace(".", " ").replace("{", "").replace("}", "").split())
    spelled = spelled.replace(" ^", "^")
    return spelled if spelled.startswith(("\\", "%")) else f"\\text{{{spelled}}}"


# --- statements -----------------------------------------------------------------------------------

MAX_SIDE_CHARS = 120
# A space between two formulas in dollars too.
_GAP = re.compile(
    r"(?P<wide>\\q?quad(?![A-Za-z])|\\\\(?: ?\[[^\[\]]{0,12}\])?|\n)|\\[ ;:>]|\\enspace(?![A-Za-z])"
    r"|(?<=\$) {1,9}(?=\$)|(?<=[0-9)}\]]) {1,9}(?=[A-Za-z](?:_[0-9A-Za-z])? ?=)"
)
_ANY_BRACKET = re.compile(r"\\(?:begin|end)(?=\{)|\\[{}]|\\.|[(\[{}\])]", re.DOTALL)
_DEPTH = dict.fromkeys(("(", "[", "{", "\\{", "\\begin"), 1) | dict.fromkeys(
    (")", "]", "}", "\\}", "\\end"), -1
)
# The left-hand side of an equation, which is no condition, unit, operation or differential.
_SIDE = re.compile(
    r"[$\s]*(?!d[a-z][\s\\=]|(?:or|and|if|for|when|where)(?![a-z])"
    r"|\\text[a-z]*\b(?! ?\{[^{}]*\} ?=)"
    r"|\\(?:mathrm|mbox|cdot|times|div|pm|mp|to|cup|cap|le|ge|ne|approx|equiv|implies|iff|in|mid|[Rr]ightarrow|Longrightarrow|Leftrightarrow|leq|geq|neq|lor|land|vee|wedge|circ)(?![A-Za-z]))"
    r"[A-Za-z0-9\\|(][^=<>,;&\n]{0,80}?=(?!=)"
)
_NUMBER = (
    r"[-+]?(?:[0-9]++(?:\.[0-9]++)?(?:/[0-9]++)?|\\[dt]?frac(?:\{[0-9]+\}\{[0-9]+\}|[0-9]{2}))"
)
_VALUES = re.compile(rf"(?:{_NUMBER}|[\s,;]){{1,40}}+")
_OPEN_END = re.compile(r"(?:[-+*/=<>,;:&^_|(]|\\[A-Za-z]+|(?<![A-Za-z])(?:or|and))$")
# Before a space alone: `A=\frac12 b h=6` is one chain.
_STATED_NUMBER = re.compile(r"=(?:[-+0-9.,/*{} ()^_$]|\\(?:[dt]?frac|sqrt)(?![A-Za-z])){1,60}$")
_FINISHED = re.compile(r"\\(?:pi|infty|alpha|beta|theta|circ|emptyset|deg|quad|qquad)$")


def part_statements(text: str) -> str:
    """The text with a comma where a gap separates two statements, or two numbers alone."""
    gaps = [match for match in _GAP.finditer(text) if match.start() and match.end() < len(text)]
    if not gaps:
        return text
    depths = _depths(text, [match.start() for match in gaps])
    has_numbers_alone = _VALUES.fullmatch(_GAP.sub(" ", text)) is not None
    pieces: list[str] = []
    start = stated = 0
    for match, depth in zip(gaps, depths, strict=True):
        left = text[stated : match.start()]
        if depth or match.start() < start or not left.strip(" $") or _is_open(left):
            continue
        if match[0].isspace() and not match["wide"] and not _STATED_NUMBER.search(left):
            continue
        rest = text[match.end() : match.end() + MAX_SIDE_CHARS]
        is_next = "=" in left and _SIDE.match(_GAP.sub(" ", rest)) is not None
        if is_next or (has_numbers_alone and match["wide"] and rest.lstrip()[:1] not in (",", ";")):
            pieces.append(text[start : match.start()] + ", ")
            start = stated = match.end()
    return "".join((*pieces, text[start:]))


def _is_open(left: str) -> bool:
    left = left.rstrip()[-MAX_SIDE_CHARS:]
    return _OPEN_END.search(left) is not None and _FINISHED.search(left) is None


def _depths(text: str, places: list[int]) -> list[int]:
    """Number of open brackets and environments at each position."""
    depths, depth, index = [], 0, 0
    for match in _ANY_BRACKET.finditer(text):
        while index < len(places) and places[index] <= match.start():
            depths.append(depth)
            index += 1
        depth += _DEPTH.get(match[0], 0)
    return depths + [depth] * (len(places) - index)


# --- sentences ------------------------------------------------------------------------------------

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
# The text behind a label must be one value, not an equation or a list of labels.
_NO_VALUE = re.compile(r"[=<>:;]|\\(?:le|ge|ne|in|approx|equiv)(?![a-z])|, |\\text\{[^{}]*:")
TEXT = re.compile(r"\\text ?\{([^{}]*)\}")
_EXCEPT = re.compile(
    r" *(?:the set of )?all (?:real numbers|reals|real values|real) ?(?:of )?(?:x)? ?,?"
    r" *(?:except|excluding|other than|besides) (?:for )?(?:when )?(?P<rest>.{1,80})",
    re.DOTALL,
)
_EXCLUDED = re.compile(r"(?:[a-z] ?= ?)?((?:[-+0-9./^{} ]|\\(?:frac|sqrt|pm|pi) ?){1,30}+)")
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
    match = _EXCEPT.fullmatch(TEXT.sub(r" \1 ", text))
    if match is None:
        return text
    items = [_EXCLUDED.fullmatch(part.strip()) for part in _SEPARATOR.split(match["rest"])]
    values = [item[1].strip() for item in items if item is not None]
    if len(values) < len(items) or not all(values):
        return text
    return f"\\reals \\setminus \\{{{','.join(values)}\\}}"


def bare_words(text: str) -> str:
    """The text without `\\text{}` and dollar signs, with single spaces."""
    return " ".join(TEXT.sub(r" \1 ", text).replace("$", "").split())
