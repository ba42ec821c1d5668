r"""Answers as people type them: names of letters and functions, sets, angles, rows of a matrix.

Pure string code; runs in the verifier and its grading processes. `typed` works on one text, the
functions below it on a pair.
"""

import functools
import re
from collections.abc import Callable

from verification.math.markup import unescaped, without_markup
from verification.math.number_sets import spell_sets

Spelling = tuple[list[str], re.Pattern[str], str | Callable[[re.Match[str]], str]]
"""Marks, of which one must occur (a replacement with groups is compiled each time); pattern; its
replacement."""

# --- one text -------------------------------------------------------------------------------------

_GREEK = (
    "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|rho|sigma|tau|upsilon|phi"
    "|chi|psi|omega|Gamma|Delta|Theta|Lambda|Sigma|Phi|Psi|Omega"
)
_MARKED = re.compile(r"\\(?:text|mathrm|operatorname|mbox|textbf|mathbf)[a-z]*\*? ?\{[^{}]*\}")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")
_KNOWN = re.compile(
    rf"{_GREEK}|[sS]qrt|cbrt|d?t?frac|infinity|infty|union|degrees|radians|(?:arc)?(?:sin|cos|tan)h?"
    r"|(?:sin|cos|tan)[xy]"
    r"|binom(?:ial)?|comb"
)
_LETTER = re.compile(rf"(?<![\\A-Za-z])({_GREEK}|pi|Pi)(?![A-Za-z])")
_PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")
_NAMES_TYPED = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2}|[)\]] ?[Uu] ?[(\[]")
_MEMBER_OF = re.compile(
    rf"^(\\?(?:{_GREEK})|[A-Za-z](?:_[0-9A-Za-z])?) in ?"
    r"(?:(?=[(\[]|\\\{|\\left|\\mathbb)|\{(?P<items>[^{}]{1,200})\}$)"
)
_ANGLE_BRACKETS = re.compile(r"<([^<>=]{1,200},[^<>=]{1,200})>")
_MARKED_SET = re.compile(r"\\text\{(\\\{[^{}A-Za-z]{1,200}\\\})\}")
_MAY_BE_SET = re.compile(r"[ZNRℤℕℝ…]|integer|tive real|dots|\.\(|\.\.\.")
_SIGNS = str.maketrans({
    "∠": "\\angle ", "∡": "\\angle ", "△": "\\triangle ",
    "∛": "\\sqrt[3]", "∜": "\\sqrt[4]", "≔": "=",
})  # fmt: skip
_LOW_DIGITS = re.compile(r"(?<=log)[₀-₉]{1,9}")


@functools.lru_cache(maxsize=1024)
def typed(text: str) -> str:
    """The text with escapes, Markdown and typed names as LaTeX."""
    text = without_markup(unescaped(text))
    if not text.isascii():
        text = _LOW_DIGITS.sub(_spell_low_log, text).translate(_SIGNS)
    text = _respelled(text, _SPELLINGS)
    if text[:1] == "<" or text[:7] == "\\text{\\":
        text = _with_brackets(text)
    if _MAY_BE_SET.search(text):
        text = spell_sets(_with_cycle(text))
    return _spell_names(text) if _NAMES_TYPED.search(text) else text


def _respelled(text: str, spellings: list[Spelling]) -> str:
    for marks, pattern, spelling in spellings:
        if any(mark in text for mark in marks):
            text = pattern.sub(spelling, text)
    return text


def _with_brackets(text: str) -> str:
    """`<1,2>` with LaTeX's brackets; a set without the mark of a text."""
    text = _ANGLE_BRACKETS.sub(r"\\langle \1\\rangle ", text)
    return _MARKED_SET.sub(r"\1", text)


_CYCLE = re.compile(
    r"(-?[0-9]{0,20}\.)(?:\(([0-9]{1,12})\)"
    r"|([0-9]{0,12}?)(?:([0-9])\4\4{1,20}|([0-9]{2,6})\5{1,6})(?:\.\.\.|…|\\[lc]?dots))"
)


def _with_cycle(text: str) -> str:
    """`0.(3)` and `0.333...` as a repeating decimal."""
    match = _CYCLE.fullmatch(text)
    if match is None:
        return text
    return f"{match[1]}{match[3] or ''}\\overline{{{match[2] or match[4] or match[5]}}}"


def with_letters(problem: str) -> str:
    """A problem with every typed name of a letter as LaTeX."""
    return _LETTER.sub(lambda match: f"\\{match[0]} ", problem)


def _order_ends(match: re.Match[str]) -> str:
    ends = sorted((match[1], match[3]))
    return f"\\angle {ends[0]}{match[2]}{ends[1]}"


def _spell_names(text: str) -> str:
    text = _respelled(text, _WORDINGS)
    outside = _MARKED.sub(" ", text)
    is_prose = any(not _KNOWN.fullmatch(word) for word in _WORD.findall(outside))
    kept: list[str] = []

    def keep(match: re.Match[str]) -> str:
        kept.append(match[0])
        return f"\0{len(kept) - 1}\0"

    masked = _MARKED.sub(keep, text.replace("\0", ""))
    if not _NAMES_TYPED.search(masked):
        return text
    text = masked
    text = _MEMBER_OF.sub(_spell_member, text) if " in" in text else text
    text = _respelled(text, _TYPED if is_prose else _TYPED_FORMULAS + _TYPED)
    letters = _PI if is_prose else _LETTER
    text = letters.sub(
        lambda match: f"\\{match[0].lower() if match[0] == 'Pi' else match[0]} ", text
    )
    return re.sub("\0([0-9]+)\0", lambda match: kept[int(match[1])], text)


def _spell_log(match: re.Match[str]) -> str:
    """`log_12 5` to base 12: who types no backslash types no braces."""
    base = f"{{{match[2]}}}" if match[2] else ""
    return f"{match[1]}\\log_{base}"


def _spell_comparison(match: re.Match[str]) -> str:
    sign = ">" if match["more"] else "<"
    return f"{match['name']}{sign}{'=' if match['equal'] else ''}{match['value']}"


def _spell_mapping(match: re.Match[str]) -> str:
    """`f: x \\mapsto 2x` as an equation."""
    return f"{match['head'] or 'f'}({match['name']})={match['value']}"


def _compiled(*rows: tuple[str, str, str | Callable[[re.Match[str]], str]]) -> list[Spelling]:
    """Spellings of rows: marks between blanks, pattern, replacement."""
    return [(marks.split(), re.compile(pattern), spelling) for marks, pattern, spelling in rows]


_ENDS = r"(?=[A-Z]{1,3}(?![A-Za-z]))"
_BARE = r"(?<![\\A-Za-z])"
_CAPITALS = "Sqrt Abs Ln Log Exp Sin Cos Tan Max Min"
# Angles and triangles, equations, signs, matrices.
_SPELLINGS = _compiled(
    ("\\Delta", r"\\Delta ?(?=[A-Z]{3}(?![A-Za-z]))", r"\\triangle "),
    ("\\widehat", r"\\widehat ?(?=\{ ?[A-Z]{3} ?\})", r"\\angle "),
    ("\\measuredangle", r"\\measuredangle", r"\\angle"),
    ("\\bigtriangleup", r"\\bigtriangleup", r"\\triangle"),
    ("angle", rf"\\text\{{ ?(angle|triangle) ?\}} ?{_ENDS}", r"\\\1 "),
    ("angle", rf"{_BARE}(angle|triangle) {_ENDS}", r"\\\1 "),
    ("\\angle", r"\\angle ?\{?([A-Z])([A-Z])([A-Z])(?![A-Za-z])\}?", _order_ends),
    ("\\angle", r"^m ?(\\angle ?\{?[A-Z]{1,3}\}?)\Z", r"\1"),
    (":= \\colon", r":=|\\(?:coloneqq?|colonequals)(?![a-z]) ?", "="),
    ("\\mapsto",
     r"^(?!.*\\equiv)(?:(?P<head>[A-Za-z]) ?: ?)?(?P<name>[a-z]) ?"
     r"\\mapsto(?![a-z]) ?(?P<value>.+)\Z",
     _spell_mapping),
    ("\\equiv", r"([A-Za-z]\([a-z]\)|f) ?\\equiv(?![a-z]) ?(?!.*mod)", r"\1="),
    ("+", r"\+ ?/ ?-|(?:^|(?<=[=,{(])|(?<=[=,] ))\+-(?=[0-9A-Za-z\\])", r"\\pm "),
    ("const", r"\+ ?(?:\\(?:text|mathrm|mbox) ?\{ ?)?(?:an? )?(?:arbitrary )?"
     r"const(?:ant)?\.?(?: ?\})?$", "+C"),
    ("smallmatrix", r"\{([pb]?)small", r"{\1"),
)  # fmt: skip
_NAME = r"^(?P<name>[A-Za-z](?:_[0-9])?) ?(?:\\text ?\{ ?)?"
# Whole texts: `x is 5`, `x is greater than 5`, `$5 dollars`, `3 to 4`, `Yes!`, `negative 3`.
_WORDINGS = _compiled(
    ("is equals", rf"{_NAME}(?:(?<![A-Za-z])is(?: equal to)?|equals) ?\}}? ?"
     r"(?P<value>(?:[-0-9.($]|\\(?:[dt]?frac|sqrt|pi)(?![a-z])).{0,200})\Z", r"\g<name>=\g<value>"),
    ("than", rf"{_NAME}(?:is )?(?:strictly )?(?:(?P<more>greater|larger)|less|smaller) than"
     r"(?P<equal> or equal to)? ?\}? ?(?P<value>[-0-9.\\].{0,99})\Z", _spell_comparison),
    ("dollar", r"^\\?\$ ?([0-9.,]{1,40}) ?(?:\\text ?\{ ?)?dollars? ?\}?\Z", r"\\$\1"),
    (" to ", r"^([0-9]{1,9}) to ([0-9]{1,9})\Z", r"\1:\2"),
    ("of in", r"^([0-9]{1,9}) (?:out of|in) ([0-9]{1,9})\Z", r"\\frac{\1}{\2}"),
    ("!", r"^(?i:(yes|no|true|false))!+\Z", r"\1"),
    ("neg min", r"^\\text ?\{ ?(?:negative|minus) ([0-9.,/]{1,40}) ?\}\Z", r"-\1"),
    ("neg min", r"^(?:\\text ?\{ ?)?(?:negative|minus) ?\}? ?([0-9\\(].{0,200})\Z", r"-\1"),
    ("here", r"^[Tt]here (?:are|is) (?:exactly )?([0-9].{0,200})\Z", r"\1"),
    ("point", r"^(?:[Tt]he )?point (\(.{1,200}\))\Z", r"\1"),
    ("\\text", r"^([0-9.,]{1,40}) ?\\text ?\{ ?\( ?([a-z][a-z ]{0,30}) ?\) ?\}\Z",
     r"\1\\text{ \2}"),
)  # fmt: skip
# Program names of functions, and LaTeX's without the backslash.
_TYPED = _compiled(
    (_CAPITALS, rf"{_BARE}({_CAPITALS.replace(' ', '|')})(?=\()", lambda match: match[0].lower()),
    ("log", rf"{_BARE}([A-Za-z]?)log ?_ ?"
     r"(?:([0-9]{1,9})(?= ?\(| [0-9A-Za-z\\])|(?=\{|[A-Za-z](?![A-Za-z])))", _spell_log),
    ("inf oo", r"(?:(?<=[-+(\[,<=])|(?<=[-+(\[,<=] )|^)(?:infinity|infty|inf|oo)(?= ?[)\],]| ?$)",
     r"\\infty "),
    ("U u", r"(?<=[)\]]) ?(?:U|u|union) ?(?=[(\[])", r"\\cup "),
    ("sqrt", rf"{_BARE}sqrt ?([0-9]{{1,20}})(?![0-9.])", r"\\sqrt{\1}"),
    ("cbrt", rf"{_BARE}cbrt ?\(([^()]{{1,100}})\)", r"\\sqrt[3]{\1}"),
    ("abs", rf"{_BARE}abs ?\(([^()]{{1,100}})\)", r"|\1|"),
)  # fmt: skip
_TYPED_FORMULAS = _compiled(
    ("log2 log10", rf"{_BARE}log(2|10)(?= ?\()", r"\\log_{\1}"),
    ("frac sqrt", rf"{_BARE}([dt]?frac|sqrt)(?= ?\{{|(?<=sqrt)\[)", r"\\\1"),
    ("sin cos tan cot csc ln lg log",
     rf"{_BARE}(arcsin|arccos|arctan|(?:sin|cos|tan|cot)h?|csc|ln|lg|log)"
     r"(?= ?[|0-9^√\\]| [A-Za-z](?![A-Za-z]) ?(?:[-+*/^)=|,]|$)|[xy](?![A-Za-z(]))", r"\\\1 "),
    ("binom omb nCr choose",
     rf"{_BARE}(?:binom(?:ial)?|n?[cC]omb|nCr|choose) ?\(([^(),]{{1,40}}),([^(),]{{1,40}})\)",
     r"\\binom{\1}{\2}"),
)  # fmt: skip


def _spell_low_log(match: re.Match[str]) -> str:
    """`log₂3` to base 2."""
    return f"_{{{''.join(chr(ord(digit) - 0x2050) for digit in match[0])}}}"


def _spell_member(match: re.Match[str]) -> str:
    """`x in {1,2}` with LaTeX's sign and braces, where it begins the text."""
    items = match["items"]
    return f"{match[1]} \\in " + (f"\\{{{items}\\}}" if items else "")


# --- a pair ---------------------------------------------------------------------------------------

_FUNCTION = re.compile(r"\$?[A-Za-z]\(x\) ?= ?([^=]{1,500})")
_GRAPH = re.compile(r"\$?y ?= ?([^=y]{1,500})")


def as_functions(first: str, second: str) -> tuple[str, str]:
    """The right-hand sides of `y=` and `f(x)=`; other pairs as they are."""
    for one, other in ((first, second), (second, first)):
        graph, function = _GRAPH.fullmatch(one), _FUNCTION.fullmatch(other)
        if graph and function:
            return graph[1], function[1]
    return first, second


_ENTRIES = r"[^\[\]()]{1,200}"
_ROWS = re.compile(
    r"(?:(?:Matrix|(?:np|numpy)\.array) ?\()?(?:"
    rf"\[ ?(?P<square>\[{_ENTRIES}\](?: ?, ?\[{_ENTRIES}\]){{0,9}}) ?\]"
    rf"|\( ?(?P<round>\({_ENTRIES}\)(?: ?, ?\({_ENTRIES}\)){{1,9}}) ?\))\)?"
)
_LINES = re.compile(r"\[([^\[\];]{1,200}(?:;[^\[\];]{1,200}){1,9})\]")
_ROW = re.compile(r"[(\[]([^\[\]()]{1,200})[)\]]")
_PAIR = re.compile(r"[-+0-9./]{1,40}, ?[-+0-9./]{1,40}")
_SEGMENT = re.compile(
    r"(?:(?:\\text ?\{ ?)?(?:the )?(?:line )?segment ?\}? ?)?(?:\\(?:overline|bar) ?\{ ?)?"
    r"([A-Z]{2}) ?\}?"
)


def as_reference_writes(answer: str, reference: str) -> str:
    """The answer without brackets, or a segment's mark, that the reference lacks or has."""
    # Written out: a generator would cost every pair a microsecond.
    is_marked = "overline" in answer or "overline" in reference
    if is_marked or "segment" in answer or "segment" in reference:
        segments = _SEGMENT.fullmatch(answer), _SEGMENT.fullmatch(reference)
        is_same = segments[0] and segments[1] and segments[0][1] == segments[1][1]
        return reference if is_same else answer
    if answer[:1] != "(" or answer[-1:] != ")" or not _PAIR.fullmatch(reference):
        return answer
    is_same = answer[1:-1].replace(" ", "") == reference.replace(" ", "")
    return reference if is_same else answer


def with_rows(text: str, other: str) -> str:
    """A list of rows, `[[1,2],[3,4]]` or `[1 2; 3 4]`, as a matrix, if the other text is one."""
    if "matrix" not in other and "array" not in other:
        return text
    rows, lines = _ROWS.fullmatch(text), _LINES.fullmatch(text)
    if rows:
        found = [row.replace(",", "&") for row in _ROW.findall(rows["square"] or rows["round"])]
    elif lines:
        found = ["&".join(line.replace(",", " ").split()) for line in lines[1].split(";")]
    else:
        return text
    return "\\begin{pmatrix}" + "\\\\".join(found) + "\\end{pmatrix}"
