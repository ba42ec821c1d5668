"""LaTeX that changes how an answer looks, taken away; siunitx's commands in plain LaTeX.

Pure string code; runs in the verifier and its grading processes.
"""

import re

_ARGUMENT = r"(?:\{[^{}]{0,80}\}|\[[^\[\]]{0,80}\])"
# With what stands in their braces.
_INVISIBLE = re.compile(
    r"\\(?:[hv]?phantom|[hv]space|label|tag|ref|vskip|noalign|rule)(?![A-Za-z])\*? ?"
    rf"{_ARGUMENT}{{1,3}}|\\(?:[hm]?kern|[hm]skip) ?-?[0-9.]{{1,9}} ?(?:pt|em|ex|mm|cm|mu|in)"
)
# The commands alone: what stands in their last braces is the answer.
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
_QUANTITY = re.compile(
    r"\\(?:SI|qty)(?![A-Za-z]) ?(?:\[[^\[\]]{0,80}\])?\{([^{}]{1,80})\} ?"
    r"\{((?:[^{}]|\{[^{}]{0,20}\}){1,80})\}"
)
_UNIT = re.compile(
    r"\\(?:si|unit)(?![A-Za-z]) ?(?:\[[^\[\]]{0,80}\])?\{((?:[^{}]|\{[^{}]{0,20}\}){1,80})\}"
)
_NUMBER = re.compile(r"\\(num|ang)(?![A-Za-z]) ?(?:\[[^\[\]]{0,80}\])?\{([^{}]{1,80})\}")
# \kilo\metre is one unit.
_PREFIX = re.compile(r"\\(milli|centi|deci|kilo|mega|micro|nano) ?\\(?=[a-z])")
_UNIT_COMMANDS = {
    "per": "/", "squared": "^2", "cubed": "^3", "percent": "%", "degree": "\\deg ",
    "degreeCelsius": "\\deg C", "celsius": "\\deg C", "dollar": "\\$", "cdot": " ", "usd": "\\$",
}  # fmt: skip
_COMMAND = re.compile(r"\\([A-Za-z]+) ?")
# Texts of these alone, as most are, hold nothing to take away.
_ANY_COMMAND = re.compile(r"\\(?:[A-Za-z]+|.?)|\{(?= ?[,:])", re.DOTALL)
_PLAIN_COMMANDS = {f"\\{char}" for char in "{}(),;!%$"} | {
    f"\\{name}"
    for name in "frac dfrac tfrac sqrt text mathrm mathbf textbf pi left right cdot times le ge "
    "leq geq in infty cup cap pm circ sin cos tan ln log theta alpha beta mathbb begin end ne "
    "neq angle binom overline emptyset approx lambda".split()
}
# 1,\\! 234, as no list is spaced; "1, 234" are two numbers.
_TIGHT = r"(?:\\!|\\negthinspace(?![A-Za-z]) ?)"
_GROUPED = re.compile(
    rf"(?<![0-9.,])[1-9][0-9]{{0,2}}(?:(?: ?{_TIGHT}{{0,2}}\{{ ?, ?\}}(?:{_TIGHT}|\\[,:;]|[ {{}}])*"
    rf"| ?,(?: ?{_TIGHT} ?){{1,2}}|{_TIGHT},(?:{_TIGHT}| )*)[0-9]{{3}}(?![0-9])){{1,9}}"
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
    text = _QUANTITY.sub(lambda match: match[1] + _spell_unit(match[2]), text)
    text = _UNIT.sub(lambda match: _spell_unit(match[1]), text)
    text = _NUMBER.sub(lambda match: match[2] + "\\deg " * (match[1] == "ang"), text)
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
