r"""Answers as people type them: names of letters and functions, sets, angles, rows of a matrix.

Pure string code; runs in the verifier and its grading processes. `typed` works on one text, the
functions below it on a pair.
"""

import functools
import re

from verification.math.markup import unescaped, without_markup
from verification.math.number_sets import spell_sets

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
_INFINITY = re.compile(
    r"(?:(?<=[-+(\[,<=])|(?<=[-+(\[,<=] )|^)(?:infinity|infty|inf|oo)(?= ?[)\],]| ?$)"
)
_NAMES_TYPED = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2}|[)\]] ?[Uu] ?[(\[]")
_MEMBER_OF = re.compile(
    rf"^(\\?(?:{_GREEK})|[A-Za-z](?:_[0-9A-Za-z])?) in ?"
    r"(?:(?=[(\[]|\\\{|\\left|\\mathbb)|\{(?P<items>[^{}]{1,200})\}$)"
)
# Program names of functions, and LaTeX's without the backslash.
_CAPITAL = re.compile(r"(?<![\\A-Za-z])(Sqrt|Abs|Ln|Log|Exp|Sin|Cos|Tan|Max|Min)(?=\()")
_COMMAND_TYPED = re.compile(r"(?<![\\A-Za-z])([dt]?frac|sqrt)(?= ?\{|(?<=sqrt)\[)")
_FUNCTION_TYPED = re.compile(
    r"(?<![\\A-Za-z])(arcsin|arccos|arctan|(?:sin|cos|tan|cot)h?|csc|ln|lg|log)"
    r"(?= ?[|0-9^√\\]| [A-Za-z](?![A-Za-z]) ?(?:[-+*/^)=|,]|$)|[xy](?![A-Za-z(]))"
)
_LOG_OF_PROGRAMS = re.compile(r"(?<![\\A-Za-z])log(2|10)(?= ?\()")
_BINOMIAL = re.compile(
    r"(?<![\\A-Za-z])(?:binom(?:ial)?|n?[cC]omb|nCr|choose) ?\(([^(),]{1,40}),([^(),]{1,40})\)"
)
_LOG = re.compile(
    r"(?<![\\A-Za-z])([A-Za-z]?)log ?_ ?"
    r"(?:([0-9]{1,9})(?= ?\(| [0-9A-Za-z\\])|(?=\{|[A-Za-z](?![A-Za-z])))"
)
_UNION = re.compile(r"(?<=[)\]]) ?(?:U|u|union) ?(?=[(\[])")
_ROOT = re.compile(r"(?<![\\A-Za-z])sqrt ?([0-9]{1,20})(?![0-9.])")
_CUBE_ROOT = re.compile(r"(?<![\\A-Za-z])cbrt ?\(([^()]{1,100})\)")
_ABSOLUTE = re.compile(r"(?<![\\A-Za-z])abs ?\(([^()]{1,100})\)")
_SAID_CONSTANT = re.compile(
    r"\+ ?(?:\\(?:text|mathrm|mbox) ?\{ ?)?(?:an? )?(?:arbitrary )?const(?:ant)?\.?(?: ?\})?$"
)
_ANGLE_BRACKETS = re.compile(r"<([^<>=]{1,200},[^<>=]{1,200})>")
_MARKED_SET = re.compile(r"\\text\{(\\\{[^{}A-Za-z]{1,200}\\\})\}")
_MAY_BE_SET = re.compile(r"[ZNRℤℕℝ…]|integer|tive real|dots|\.\(|\.\.\.")
_EITHER_SIGN = re.compile(r"\+ ?/ ?-|(?:^|(?<=[=,{(])|(?<=[=,] ))\+-(?=[0-9A-Za-z\\])")
_SIGNS = {
    "∠": "\\angle ", "∡": "\\angle ", "△": "\\triangle ",
    "∛": "\\sqrt[3]", "∜": "\\sqrt[4]", "≔": "=",
}  # fmt: skip
_SIGN = re.compile(f"[{''.join(_SIGNS)}]")
_LOW_DIGITS = re.compile(r"(?<=log)[₀-₉]{1,9}")
_ANGLE = re.compile(
    r"(?:\\text\{ ?(?P<marked>angle|triangle) ?\} ?|(?<![\\A-Za-z])(?P<bare>angle|triangle) )"
    r"(?=[A-Z]{1,3}(?![A-Za-z]))"
)
_HAT = re.compile(r"\\widehat ?(?=\{ ?[A-Z]{3} ?\})")
_DELTA = re.compile(r"\\Delta ?(?=[A-Z]{3}(?![A-Za-z]))")
_MEASURE = re.compile(r"m ?(\\angle ?\{?[A-Z]{1,3}\}?)")
_ANGLE_ENDS = re.compile(r"\\angle ?\{?([A-Z])([A-Z])([A-Z])(?![A-Za-z])\}?")


@functools.lru_cache(maxsize=1024)
def typed(text: str) -> str:
    """The text with escapes, Markdown and typed names as LaTeX."""
    text = without_markup(unescaped(text))
    if not text.isascii():
        text = _SIGN.sub(lambda match: _SIGNS[match[0]], _LOW_DIGITS.sub(_spell_low_log, text))
    if "angle" in text or "Delta" in text or "widehat" in text:
        text = _with_triangles(text)
    if ":=" in text or "\\colon" in text or "\\equiv" in text or "\\mapsto" in text:
        text = _with_equals_sign(text)
    if "+" in text:
        text = _EITHER_SIGN.sub(r"\\pm ", text)
        text = _SAID_CONSTANT.sub("+C", text) if "const" in text else text
    if "smallmatrix" in text:
        text = text.replace("{psmall", "{p").replace("{bsmall", "{b").replace("{small", "{")
    if text[:1] == "<" or text[:7] == "\\text{\\":
        text = _with_brackets(text)
    if _MAY_BE_SET.search(text):
        text = spell_sets(_with_cycle(text))
    if not _NAMES_TYPED.search(text):
        return text
    return _spell_names(text)


def _with_triangles(text: str) -> str:
    """The text with one spelling of angles and triangles."""
    if "\\Delta" in text:
        text = _DELTA.sub(r"\\triangle ", text)
    if "\\widehat" in text:
        text = _HAT.sub(r"\\angle ", text)
    text = text.replace("\\measuredangle", "\\angle").replace("\\bigtriangleup", "\\triangle")
    if "angle" not in text:
        return text
    text = _ANGLE_ENDS.sub(_order_ends, _ANGLE.sub(_spell_angle, text))
    measure = _MEASURE.fullmatch(text)
    return measure[1] if measure else text


def _with_brackets(text: str) -> str:
    """`<1,2>` with LaTeX's brackets; a set without the mark of a text."""
    text = _ANGLE_BRACKETS.sub(r"\\langle \1\\rangle ", text)
    return _MARKED_SET.sub(r"\1", text)


_IS = re.compile(
    r"(?P<name>[A-Za-z](?:_[0-9])?) ?(?:\\text ?\{ ?)?"
    r"(?:(?<![A-Za-z])is(?: equal to)?|equals) ?\}? ?"
    r"(?P<value>(?:[-0-9.($]|\\(?:[dt]?frac|sqrt|pi)(?![a-z])).{0,200})"
)
_COMPARED = re.compile(
    r"(?P<name>[A-Za-z](?:_[0-9])?) ?(?:\\text ?\{ ?)?(?:is )?(?:strictly )?"
    r"(?P<sign>greater|larger|less|smaller) than(?P<equal> or equal to)? ?\}? ?"
    r"(?P<value>[-0-9.\\].{0,99})"
)
_DEFINED = re.compile(r":=|\\(?:coloneqq?|colonequals)(?![a-z]) ?")
_IDENTICAL = re.compile(r"(?P<head>[A-Za-z]\([a-z]\)|f) ?\\equiv(?![a-z]) ?(?!.*mod)")
_MAPPED = re.compile(
    r"(?:(?P<head>[A-Za-z]) ?: ?)?(?P<name>[a-z]) ?\\mapsto(?![a-z]) ?(?P<value>.+)"
)


def _with_equals_sign(text: str) -> str:
    """`x := 5`, `f: x \\mapsto 2x` and `f(x) \\equiv 2x` as equations."""
    text = _DEFINED.sub("=", text)
    if "\\equiv" in text:
        return _IDENTICAL.sub(r"\g<head>=", text)
    if "\\mapsto" in text:
        mapped = _MAPPED.fullmatch(text)
        text = f"{mapped['head'] or 'f'}({mapped['name']})={mapped['value']}" if mapped else text
    return text


def _with_sign_for_words(text: str) -> str:
    """`x is 5` and `x is greater than 5` with signs."""
    stated, compared = _IS.fullmatch(text), _COMPARED.fullmatch(text)
    if compared:
        sign = (">" if compared["sign"] in ("greater", "larger") else "<") + "=" * bool(
            compared["equal"]
        )
        return f"{compared['name']}{sign}{compared['value']}"
    return f"{stated['name']}={stated['value']}" if stated else text


_SPARE = re.compile(r"dollar| to |!$| of | in |^(?:\\text ?\{ ?)?(?:neg|min|[Tt]h|point)|\( ?[a-z]")
_SPARE_WORDS = (
    (re.compile(r"\\?\$ ?([0-9.,]{1,40}) ?(?:\\text ?\{ ?)?dollars? ?\}?"), r"\\$\1"),
    (re.compile(r"([0-9]{1,9}) to ([0-9]{1,9})"), r"\1:\2"),
    (re.compile(r"([0-9]{1,9}) (?:out of|in) ([0-9]{1,9})"), r"\\frac{\1}{\2}"),
    (re.compile(r"(?i:(yes|no|true|false))!+"), r"\1"),
    (re.compile(r"\\text ?\{ ?(?:negative|minus) ([0-9.,/]{1,40}) ?\}"), r"-\1"),
    (re.compile(r"(?:\\text ?\{ ?)?(?:negative|minus) ?\}? ?([0-9\\(].{0,200})"), r"-\1"),
    (re.compile(r"[Tt]here (?:are|is) (?:exactly )?([0-9].{0,200})"), r"\1"),
    (re.compile(r"(?:[Tt]he )?point (\(.{1,200}\))"), r"\1"),
    (re.compile(r"([0-9.,]{1,40}) ?\\text ?\{ ?\( ?([a-z][a-z ]{0,30}) ?\) ?\}"), r"\1\\text{ \2}"),
)


def _without_spare_words(text: str) -> str:
    """`$5 dollars` as `\\$5`, `3 to 4` as `3:4`, `Yes!` as `Yes`, `negative 3` as `-3`."""
    for pattern, spelling in _SPARE_WORDS:
        match = pattern.fullmatch(text)
        text = match.expand(spelling) if match else text
    return text


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


def _spell_angle(match: re.Match[str]) -> str:
    return f"\\{match['marked'] or match['bare']} "


def _order_ends(match: re.Match[str]) -> str:
    ends = sorted((match[1], match[3]))
    return f"\\angle {ends[0]}{match[2]}{ends[1]}"


def _spell_names(text: str) -> str:
    if "is" in text or "equals" in text or "than" in text:
        text = _with_sign_for_words(text)
    if _SPARE.search(text):
        text = _without_spare_words(text)
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
    for marks, pattern, spelling in _TYPED if is_prose else _TYPED_FORMULAS + _TYPED:
        if any(mark in text for mark in marks):
            text = pattern.sub(spelling, text)
    letters = _PI if is_prose else _LETTER
    text = letters.sub(
        lambda match: f"\\{match[0].lower() if match[0] == 'Pi' else match[0]} ", text
    )
    return re.sub("\0([0-9]+)\0", lambda match: kept[int(match[1])], text)


def _spell_function(match: re.Match[str]) -> str:
    return f"\\{match[1]} "


def _spell_log(match: re.Match[str]) -> str:
    """`log_12 5` to base 12: who types no backslash types no braces."""
    base = f"{{{match[2]}}}" if match[2] else ""
    return f"{match[1]}\\log_{base}"


# A pattern is tried where one of its marks occurs: a replacement with groups is compiled each time.
_TYPED = (
    (("Sq", "Abs", "Ln", "Log", "Exp", "Sin", "Cos", "Tan", "Max", "Min"), _CAPITAL,
     lambda match: match[0].lower()),
    (("log",), _LOG, _spell_log),
    (("inf", "oo"), _INFINITY, r"\\infty "),
    (("U", "u"), _UNION, r"\\cup "),
    (("sqrt",), _ROOT, r"\\sqrt{\1}"),
    (("cbrt",), _CUBE_ROOT, r"\\sqrt[3]{\1}"),
    (("abs",), _ABSOLUTE, r"|\1|"),
)  # fmt: skip
_TYPED_FORMULAS = (
    (("log2", "log10"), _LOG_OF_PROGRAMS, r"\\log_{\1}"),
    (("frac", "sqrt"), _COMMAND_TYPED, r"\\\1"),
    (("sin", "cos", "tan", "cot", "csc", "ln", "lg", "log"), _FUNCTION_TYPED, _spell_function),
    (("binom", "omb", "nCr", "choose"), _BINOMIAL, r"\\binom{\1}{\2}"),
)


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
