r"""Sets of numbers in one spelling: `\mathbb{Z}_{>0}`, "all positive integers", `\{1,2,3,\ldots\}`.

Pure string code on one raw text; runs in the verifier and its grading processes.
"""

import re

_LETTER = (
    r"(?:\\(?:mathbb|Bbb|mathbf) ?\{? ?(?P<letter>[ZNR]) ?\}?|(?P<sign>[ℤℕℝ])"
    r"|\\(?P<short>[ZNR])(?![A-Za-z]))"
)
_HALF = re.compile(
    rf"{_LETTER} ?(?:\^ ?\{{? ?(?P<power>[-+*]|\\ast) ?\}}?|(?P<raised>[⁺⁻])"
    r"|_ ?\{? ?(?:(?P<below>[<>]|\\geq?(?![a-z])|≥)? ?(?P<bound>[01])|(?P<index>[+-])) ?\}?)"
)
_WORDS = re.compile(
    r"(?:\\text ?\{ ?)?(?:any |every |all )?(?:the )?(?:set of )?(?:all )?(?:the )?"
    r"(?P<kind>positive|negative|non-?negative) "
    r"(?:integers?|(?P<real>real(?: number)?s?))(?: ?\}? ?[a-z])? ?\}?",
    re.IGNORECASE,
)
_LISTED = re.compile(
    r"(?:\\left)? ?\\?\{ ?(?:(?P<positive>1, ?2, ?3(?:, ?4(?:, ?5)?)?)|0, ?1, ?2(?:, ?3(?:, ?4)?)?)"
    r", ?(?:\\[lc]?dots|\.\.\.|…) ?(?:\\right)? ?\\?\}"
)
_MEMBER = re.compile(r"(?:(?:\\text ?\{ ?)?(?:for )?all ?\}? ?)?[A-Za-z] ?(?:\\in(?![a-z])|∈) ?")
_REAL = r"(?:\\(?:mathbb|Bbb) ?\{? ?R ?\}?|\\R(?![A-Za-z])|ℝ)"
_IS_REAL = rf"(?:\\in(?![a-z])|∈) ?{_REAL}"
_JOINT = r"(?: ?(?:,|;|:|\\mid|\\text ?\{ ?,? ?(?:and|with|where|but|such that) ?\}| and ) ?)"
_REAL_FIRST = re.compile(rf"(?P<name>[a-z]) ?{_IS_REAL}{_JOINT}(?P<rest>(?P=name) ?[\\<>≤≥≠!].*)")
_REAL_LAST = re.compile(
    rf"(?P<rest>(?P<name>[a-z]) ?(?:[<>≤≥≠]|!=|\\(?:neq?|geq?|leq?)(?![a-z])).*?){_JOINT}"
    rf"(?P=name) ?{_IS_REAL}"
)
_INTEGERS = r"(?:\\(?:mathbb|Bbb) ?\{? ?Z ?\}?|\\Z(?![A-Za-z])|ℤ)"
_FAMILY = re.compile(
    r"(?:\\left ?)?\\\{ ?(?P<head>(?:(?!\\in(?![a-z]))[^,;|:<>]){1,200}?) ?(?:\||\\mid|:|\\vert) ?"
    r"(?:(?P<name>[a-z]) ?= ?(?P<value>[^,;<>=]{1,200}), ?)?"
    rf"(?P<member>[a-z] ?(?:\\in(?![a-z])|∈) ?{_INTEGERS}) ?(?:\\right ?)?\\\}}"
)
_POSITIVE, _NEGATIVE, _NATURAL = "\\integers^{+}", "\\integers^{-}", "\\integers_{0}^{+}"

_WHOLE_HALVES = {"positive": _POSITIVE, "negative": _NEGATIVE, "nonnegative": _NATURAL}
_REAL_HALVES = {
    "positive": "(0,\\infty)", "negative": "(-\\infty,0)", "nonnegative": "[0,\\infty)",
}  # fmt: skip


def spell_sets(text: str) -> str:
    """The text with one spelling for a half of the numbers, a family and a real unknown."""
    text = text.strip()
    words = _WORDS.fullmatch(text)
    if words:
        kind = words["kind"].lower()
        halves = _REAL_HALVES if words["real"] else _WHOLE_HALVES
        return halves[kind.replace("-", "")]
    listed = _LISTED.fullmatch(text)
    if listed:
        return _POSITIVE if listed["positive"] else _NATURAL
    family = _FAMILY.fullmatch(text)
    if family:
        return _spell_family(family) or text
    real = _REAL_FIRST.fullmatch(text) or _REAL_LAST.fullmatch(text)
    if real:
        return real["rest"]
    half = _HALF.fullmatch(_MEMBER.sub("", text, count=1))
    return text if half is None else _spell_half(half) or text


def _spell_family(family: re.Match[str]) -> str:
    """`k\\pi, k \\in \\mathbb{Z}` for a set of such numbers."""
    if family["name"] is None:
        return f"{family['head']}, {family['member']}"
    if family["head"].strip() != family["name"]:
        return ""
    return f"{family['name']}={family['value']}, {family['member']}"


def _spell_half(half: re.Match[str]) -> str:
    letter = half["letter"] or half["sign"] or half["short"]
    mark = half["power"] or half["raised"] or half["below"] or half["index"] or ""
    is_real, bound = letter in "Rℝ", half["bound"]
    if mark in ("-", "⁻", "<"):
        return "" if letter in "Nℕ" or bound == "1" else "(-\\infty,0)" if is_real else _NEGATIVE
    from_zero = bound == "0" and mark != ">"
    if from_zero:
        # Z_0 alone is no known set.
        is_known = bool(mark) or letter in "Nℕ"
        return ("[0,\\infty)" if is_real else _NATURAL) if is_known else ""
    if bound == "1":
        return _POSITIVE if mark not in ("", ">") and not is_real else ""
    if mark in ("*", "\\ast"):
        return _POSITIVE if letter in "Nℕ" else ""
    return "(0,\\infty)" if is_real else _POSITIVE
