r"""Where one statement of an answer ends and the next begins without a comma.

Pure string code; runs in the verifier and its grading processes on raw text, before spacing is
taken away. `x=1 \quad x=2` states two values, as `x=1, x=2` does. Only wide spaces, line breaks and
a space before a name with its own equals sign part statements: `A=2\,r=6` is one chain.
"""

import re

MAX_SIDE_CHARS = 120
# A space between two formulas in dollars too.
_GAP = re.compile(
    r"(?P<wide>\\q?quad(?![A-Za-z])|\\\\(?: ?\[[^\[\]]{0,12}\])?|\n)|\\[ ;:>]|\\enspace(?![A-Za-z])"
    r"|(?<=\$) {1,9}(?=\$)|(?<=[0-9)}\]]) {1,9}(?=[A-Za-z](?:_[0-9A-Za-z])? ?=)"
)
_BRACKET = re.compile(r"\\(?:begin|end)(?=\{)|\\[{}]|\\.|[(\[{}\])]", re.DOTALL)
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
_NUMBER = r"[-+]?(?:[0-9]+(?:\.[0-9]+)?(?:/[0-9]+)?|\\[dt]?frac(?:\{[0-9]+\}\{[0-9]+\}|[0-9]{2}))"
_VALUES = re.compile(rf"(?:{_NUMBER}|[\s,;]){{1,40}}")
_OPEN_END = re.compile(r"(?:[-+*/=<>,;:&^_|(]|\\[A-Za-z]+|(?<![A-Za-z])(?:or|and))$")
# Before a space alone: `A=\frac12 b h=6` is one chain.
_STATED_NUMBER = re.compile(r"=(?:[-+0-9.,/*{} ()^_$]|\\(?:[dt]?frac|sqrt)(?![A-Za-z])){1,60}$")
_FINISHED = re.compile(r"\\(?:pi|infty|alpha|beta|theta|circ|emptyset|deg|quad|qquad)$")


def part_statements(text: str) -> str:
    """The text with a comma where a gap parts two statements, or two numbers and nothing else."""
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
    """How many brackets and environments are open at each place."""
    depths, depth, index = [], 0, 0
    for match in _BRACKET.finditer(text):
        while index < len(places) and places[index] <= match.start():
            depths.append(depth)
            index += 1
        depth += _DEPTH.get(match[0], 0)
    return depths + [depth] * (len(places) - index)
