"""One spelling for every mathematical answer, and refusals of hopeless text.

Pure string code; runs in the verifier and its grading processes on hostile text. Every pattern
reads a text from left to right without backtracking over more than a bounded stretch, and texts
longer than MAX_CHARS are refused before any pattern sees them.
"""

import functools
import re

from verification.math.number_words import spell_bases, spell_factors
from verification.math.phrasing import (
    TEXT,
    join_thousands,
    part_statements,
    spell_sentences,
    without_styling,
)
from verification.math.split import bracket_depths

MAX_CHARS = 1000
MAX_DEPTH = 30
MAX_DIGITS = 400
_LONG_NUMBER = re.compile(rf"[0-9]{{{MAX_DIGITS},}}")

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_GREEK = dict(
    zip(
        "αβγδεζηθικλμνξρστυφχψωΓΔΘΛΞΠΣΦΨΩ",
        "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau "
        "upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega".split(),
        strict=True,
    )
)
_SYMBOLS = {
    "×": "*", "⋅": "*", "·": "*", "∙": "*", "•": "*", "∗": "*", "÷": "/", "∕": "/", "⁄": "/",
    "π": "\\pi ", "√": "\\sqrt ", "∞": "\\infty ", "≤": "\\le ", "⩽": "\\le ", "≥": "\\ge ",
    "⩾": "\\ge ", "≠": "\\ne ", "±": "\\pm ", "∓": "\\mp ", "∪": "\\cup ", "∩": "\\cap ",
    "∈": "\\in ", "∅": "\\emptyset ", "ℝ": "\\reals ", "ℤ": "\\integers ", "°": "\\deg ",
    "º": "\\deg ", "≈": "\\approx ", "∣": "|", "∨": "\\text{or}", "∧": "\\text{and}", "′": "'",
    "‘": "'", "’": "'", "“": '"', "”": '"', "⟨": "\\langle ", "⟩": "\\rangle ", "∖": "\\setminus ",
    "½": "\\frac{1}{2}", "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}", "⅓": "\\frac{1}{3}",
    "⅔": "\\frac{2}{3}", "⅛": "\\frac{1}{8}", "→": "\\to ", "…": "...", "∆": "\\Delta ",
    "¢": "\\cent ", "″": "''",
}  # fmt: skip
_CHARS = str.maketrans(
    {char: f"\\{name} " for char, name in _GREEK.items()}
    | _SYMBOLS
    | dict.fromkeys("−–—‐‑﹣", "-")
    | dict.fromkeys("\t\n\r\x0b\x0c\u00a0\u2002\u2003\u2004\u2005\u2009\u200a\u202f\u3000~", " ")
    | dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u200e\u200f")
    # The full-width forms of printable ASCII.
    | {chr(0xFEE0 + code): chr(code) for code in range(0x21, 0x7F)}
)

# Spelling -> LaTeX commands that get it, without their backslash.
_SPELLINGS = {
    " ": ", ; : > quad qquad enspace thinspace",
    "": "! left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr displaystyle textstyle "
        "limits nolimits rm bf it middle strut mathstrut normalsize large Large bm boldsymbol "
        "negthinspace mathord ensuremath #",
    "\\text": "textrm textbf textit textnormal textup textsf texttt textsc textsl mbox hbox mathrm "
              "mathbf mathit mathsf mathtt bold operatorname operatorname* emph",
    "\\frac": "dfrac tfrac cfrac nicefrac sfrac", "\\binom": "dbinom tbinom",
    "\\theta": "vartheta", "\\phi": "varphi", "\\epsilon": "varepsilon", "\\rho": "varrho",
    "\\sigma": "varsigma", "\\le": "leq leqslant leqq", "\\ge": "geq geqslant geqq", "\\ne": "neq",
    "<": "lt", ">": "gt", "*": "times cdot ast bullet", "/": "div", "...": "ldots dots cdots dotsc",
    "\\emptyset": "varnothing O", "|": "lvert rvert vert mid", "\\{": "lbrace", "\\}": "rbrace",
    "[": "lbrack", "]": "rbrack", ":": "colon", "%": "%", "_": "_", "and": "&",
    "\\text{or}": "lor vee", "\\text{and}": "land wedge", "\\deg ": "degree textdegree degrees",
    "\\cent ": "cents textcent", "£": "pounds textsterling", "€": "euro texteuro", "¥": "yen",
    "\\$": "textdollar", "\\reals ": "R", "\\integers ": "Z", "\\naturals ": "N",
    "\\rationals ": "Q", "\\complexes ": "C", "\\setminus": "backslash", "\\tan": "tg",
    "\\cot": "ctg", "\\arctan": "arctg", "\\cup": "bigcup",
}  # fmt: skip
_COMMANDS = {f"\\{name}": text for text, names in _SPELLINGS.items() for name in names.split()}
_COMMANDS["\\ "] = " "
_SET_DIFFERENCE = re.compile(r"(?<=\\reals) *[-/] ?(?=\\\{)")
_CHOOSE = re.compile(
    r"(?:\\left ?)?[{(]([^{}()\\]{1,40})\\choose ?([^{}()\\]{1,40})(?:\\right ?)?[})]"
)
_ORDINAL = re.compile(
    r"(?<=[0-9])(?:\^ ?(\{)? ?)?(?:\\text\{ ?(?:st|nd|rd|th) ?\}|st|nd|rd|th)(?(1) ?\}|)(?![a-z])"
)
_INCHES = re.compile(r"(?<=[0-9])\"$")
_ANSWER = (
    r"(?:(?:so|thus|hence|therefore),? )?(?:the |my )?(?:(?:final|correct|right|best) ){0,2}"
    r"(?:answer|option|choice)(?: is(?![A-Za-z'])| ?=)? ?:?"
)
_ANSWER_IS = re.compile(
    rf"^(?:\\text\{{ ?{_ANSWER} ?\}} ?|(\\text\{{ ?)?{_ANSWER}(?<=[s=:]) ?)(?=.)", re.IGNORECASE
)
_COMMAND = re.compile(r"\\(?:[A-Za-z]+\*?|.)|\*\*", re.DOTALL)
_SETS = {"R": "reals", "Z": "integers", "N": "naturals", "Q": "rationals", "C": "complexes"}
_BLACKBOARD = re.compile(r"\\(?:mathbb|Bbb|mathds) ?(?:\{ ?([RZNQC]) ?\}|([RZNQC]))")
_EMPTY_DELIMITER = re.compile(r"\\(?:left|right) ?\.")
_SUPERSCRIPT = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_SUBSCRIPT = re.compile(f"[{''.join(_SUBSCRIPTS)}]+")
# In the product of two vectors the order counts, and it is not the scalar one.
_VECTOR = r"\\(?:vec|overrightarrow) ?(?:\{([^{}]{1,9})\}|([A-Za-z]))"
_CROSS_PRODUCT = re.compile(rf"{_VECTOR} ?\\times ?(?:{_VECTOR})?")
_ROOT_SIGN = re.compile(r"√ ?([0-9.]+|[A-Za-zπ])")
_DEGREE = re.compile(
    r"\^ ?(?:\{ ?(?:\\circ|o|\\deg) ?\}|(?:\\circ|\\deg|(?<=[0-9]\^)o)(?![A-Za-z])) ?"
)
# Letters that no lettered choice bears; in text they are more likely units than variables.
_LETTER_UNITS = frozenset("mgshlLNWV")
# 1, 234 are two numbers and 1,234 may be one.
_IDLE_READING = re.compile(r" (?![0-9.])|(?<![0-9.,]) |(?<=,) (?![0-9]{3}(?![0-9]))")
_QUANTITY = re.compile(r"(-?[0-9][0-9.,/]{0,40}) ?([A-Za-z][A-Za-z/. ]{1,40})")
_FUNCTIONS = frozenset(
    "sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan log ln exp".split()
)
_BRACED_CHAR = re.compile(r"([_^]) ?\{ ?([0-9A-Za-z]) ?\}")
_FRAC_DIGITS = re.compile(r"\\frac ?([0-9A-Za-z]) ?([0-9A-Za-z])")
_FRAC_FIRST = re.compile(r"\\frac ?([0-9A-Za-z]) ?(?=[{\\])")
_FRAC_SECOND = re.compile(r"\\frac ?(\{[^{}]*\}) ?([0-9A-Za-z])")
_COMMA_GROUP = re.compile(r"((?<![0-9])0)?\{ ?, ?\}([0-9]*)")
_BLANKS = re.compile(r" {2,}")
# A space parts digits (2 1/2), a command from a letter (\sin x), items and words; no more.
_IDLE_SPACE = re.compile(r"(?<![0-9A-Za-z.,;]) | (?![0-9A-Za-z.])")
# Spelling -> whole answers in words that get it.
_MEANINGS = {
    "\\emptyset": (
        "no solution|no solutions|no real solution|no real solutions|no integer solutions|empty set"
        "|the empty set|none|no real roots|no values|no value|there is no solution|no such x|\\{\\"
        "|there are no solutions|no solution exists|no solutions exist|there are no real solutions"
    ),
    "\\reals": (
        "all real numbers|all reals|the real numbers|real numbers|all real x|all real values"
        "|all real|any real number|the set of all real numbers|the set of real numbers"
        "|all real values of x|every real number|any real x|all real numbers x|all values of x"
        "|\\forall x\\in\\reals|for all real x"
    ),
    "\\integers": (
        "all integers|any integer|every integer|integers|the integers|the set of integers"
        "|the set of all integers"
    ),
    "\\infty": "infinity|+\\infty|inf|positive infinity",
    "-\\infty": "negative infinity|-infinity|minus infinity",
    "\\text{does not exist}": (
        "dne|does not exist|d.n.e|undefined|not defined|is undefined|it is undefined"
    ),
}
_ALIASES = {phrase: text for text, phrases in _MEANINGS.items() for phrase in phrases.split("|")}
_WRAPPERS = (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("\\boxed{", "}"), ("{", "}"))
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# Integers, decimals and fractions that `normalise` leaves as they are: most answers.
_PLAIN = re.compile(r"-?(?:[0-9]+(?:[./][0-9]+)?|\\frac\{[0-9]+\}\{[0-9]+\})")


def refusal(text: str) -> str:
    """Why a text must not reach a parser, or "": too_many_digits, answer_too_deep."""
    if _LONG_NUMBER.search(text):
        return "too_many_digits"
    is_deep = any(depth > MAX_DEPTH for _, depth in bracket_depths(text))
    return "answer_too_deep" if is_deep else ""


def _spell_cross(match: re.Match[str]) -> str:
    first, second = match[1] or match[2], match[3] or match[4] or ""
    return f"\\cross{{{first}}}{{{second}}}"


def normalise(text: str) -> str:
    """The text in one spelling: ASCII and LaTeX, single spaces only where they separate tokens.

    Meaning is kept: `2 1/2` and `21/2` stay different, `\\text{}` keeps words apart from products.
    Plain numbers and fractions, most answers, are spelled already. For texts of at most MAX_CHARS.
    """
    return text if _PLAIN.fullmatch(text) else _normalise(text)


@functools.lru_cache(maxsize=1024)
def _normalise(text: str) -> str:
    text = without_styling(join_thousands(text))
    if "\\choose" in text:
        text = _CHOOSE.sub(r"\\binom{\1}{\2}", text)
    text = _ROOT_SIGN.sub(r"\\sqrt{\1}", part_statements(unwrap(text.strip())))
    text = _SUPERSCRIPT.sub(lambda m: f"^{{{''.join(map(_SUPERSCRIPTS.get, m[0]))}}}", text)
    text = _SUBSCRIPT.sub(lambda m: f"_{{{''.join(map(_SUBSCRIPTS.get, m[0]))}}}", text)
    text = unwrap(text.translate(_CHARS).strip())
    if "\\times" in text:
        text = _CROSS_PRODUCT.sub(_spell_cross, text)
    text = _EMPTY_DELIMITER.sub("", _BLACKBOARD.sub(_name_of_set, text))
    if "$" in text:
        text = _without_math_delimiters(text)
    text = _DEGREE.sub(r"\\deg ", _COMMAND.sub(_spell_command, text))
    text = _SET_DIFFERENCE.sub(r"\\setminus ", spell_sentences(text))
    text = _COMMA_GROUP.sub(_spell_comma, text.replace("{:}", ":"))
    text = _ANSWER_IS.sub(r"\1", text.strip())
    if "\\text" in text:
        text = TEXT.sub(_spell_text, text)
    text = _ORDINAL.sub("", text)
    if "\\frac" in text:
        text = _FRAC_DIGITS.sub(r"\\frac{\1}{\2}", text)
        text = _FRAC_SECOND.sub(r"\\frac\1{\2}", _FRAC_FIRST.sub(r"\\frac{\1}", text))
    if "_" in text or "base" in text:
        text = spell_bases(text)
    text = _BRACED_CHAR.sub(r"\1\2", spell_factors(text))
    text = _IDLE_SPACE.sub("", _BLANKS.sub(" ", text))
    # An ellipsis is not a full stop.
    # The sign of inches, or an end of quotation.
    text = text if text.startswith('"') else _INCHES.sub("''", text)
    text = text.strip(' "')
    text = text.removeprefix("=").lstrip()
    text = text if text.endswith("...") else text.rstrip(".,; ").strip(' "')
    text = unwrap(text.removesuffix("\\\\"))
    return _ALIASES.get(_bare_words(text), text)


def unwrap(text: str) -> str:
    """The text without math delimiters, boxes or braces around the whole of it."""
    for _ in range(4):
        for opening, closing in _WRAPPERS:
            if not text.startswith(opening) or not text.endswith(closing):
                continue
            inner = text[len(opening) : len(text) - len(closing)]
            if len(text) > len(opening) and _is_balanced(inner, closing):
                text = inner.strip()
                break
        else:
            return text
    return text


def _bare_words(text: str) -> str:
    return text.replace("\\text{", " ").replace("}", " ").strip(" .").lower()


def _is_balanced(inner: str, closing: str) -> bool:
    """Whether the delimiters removed around a text were a pair."""
    if closing != "}":
        return closing not in inner
    depth = 0
    for match in _BRACE.finditer(inner):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth < 0:
            return False
    return depth == 0


def _without_math_delimiters(text: str) -> str:
    """Text without its bare dollar signs if they pair up, else with them as the currency."""
    bare = text.replace("\\$", "")
    if bare.count("$") % 2 == 0:
        return text.replace("\\$", "\0").replace("$", "").replace("\0", "\\$")
    return text.replace("\\$", "$").replace("$", "\\$")


def _name_of_set(match: re.Match[str]) -> str:
    return f"\\{_SETS[match[1] or match[2]]} "


def _spell_command(match: re.Match[str]) -> str:
    command = match.group()
    return "^" if command == "**" else _COMMANDS.get(command, command)


def _spell_comma(match: re.Match[str]) -> str:
    """`1{,}000` groups thousands; `3{,}5` and `0{,}125` hold a decimal comma."""
    is_group = match[1] is None and len(match[2]) == 3
    return (match[1] or "") + ("," if is_group else ".") + match[2]


def _spell_text(match: re.Match[str]) -> str:
    """Words stay marked as text; function names, single letters and numbers need no mark."""
    words = match[1].strip()
    if words and not any(char.isalnum() for char in words):
        return f" {words} "
    if words in _FUNCTIONS and not (words == "sec" and match.end() == len(match.string)):
        return f"\\{words} "
    quantity = _QUANTITY.fullmatch(words)
    if quantity:
        return f"{quantity[1]} \\text{{{quantity[2]}}}"
    found = re.findall("[A-Za-z]+", words)
    is_marked = bool(found) and (max(map(len, found)) > 1 or _LETTER_UNITS.issuperset(found))
    return f"\\text{{{words}}}" if is_marked else f" {words} "


def without_marks(text: str) -> str:
    """A normalised text without text marks and redundant spaces."""
    return _IDLE_READING.sub("", TEXT.sub(r"\1", text))
