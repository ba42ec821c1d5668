"""Values with several notations: combinations, systems, vectors, residue classes.

Pure string code on normalised texts; runs in grading processes.
"""

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from verification.math.numbers import parse_number, spell_repeating
from verification.math.split import enclosed, split_at, split_list

_COUNT = r"(?:[0-9]{1,3}|[a-zN]|\{[^{}\\]{1,12}\})"
_BEFORE = rf"(?:\{{\}}[_^]({_COUNT})|\{{[_^]({_COUNT})\}}|(?<![0-9A-Za-z)}}\]_^])[_^]({_COUNT}))"
# {}_5C_2, {}^5C_2, _5P_2
_PREFIXED = re.compile(rf"{_BEFORE} ?([CP]) ?_({_COUNT})")
# 5C2
_BETWEEN = re.compile(r"(?<![0-9A-Za-z.}_^])([0-9]{1,3}) ?([CP]) ?([0-9]{1,3})(?![0-9A-Za-z.])")
# C_5^2 as much of the world writes it, and A_5^2 for arrangements.
_STACKED = re.compile(
    rf"(?<![A-Za-z\\])([CA])(?:_({_COUNT})\^({_COUNT})|\^({_COUNT})_({_COUNT}))(?![0-9a-z])"
)
_LISTED = re.compile(r"(?<![A-Za-z\\])C\(([^(),\\]{1,12}),([^(),\\]{1,12})\)")
_WHOLE = re.compile(r"[0-9nmkrN+-]+")
_SPELLINGS = {
    "\\text{gcd}": "\\gcd ", "\\text{lcm}": "\\lcm ", "\\text{max}": "\\max ",
    "\\text{min}": "\\min ", "\\text{Im}": "\\Im ", "\\text{arg}": "\\arg ",
    "\\text{Re}": "\\Re ", "\\text{cis}": "\\cis ",
    "\\simeq": "\\approx", "≃": "\\approx", "≡": "\\equiv ", "⌊": "\\lfloor ", "⌋": "\\rfloor ",
    "⌈": "\\lceil ", "⌉": "\\rceil ", "\\jmath": "j", "\\imath": "i", "\\text{to}": ":",
}  # fmt: skip
_SYSTEM = re.compile(
    r"(?:\\\{)? ?\\begin\{(cases|rcases|array|aligned|align|gathered|matrix)\}(?:\{[lcr| ]*\})?"
    r"(.*)\\end\{\1\}",
    re.DOTALL,
)
_ROW_END = re.compile(r"\\\\(?: ?\[[^\[\]]{0,12}\])?")
_ALIGNMENT = re.compile(r"& ?(?==|<|>|\\le|\\ge|\\ne)|(?<==) ?&")
_BLACKBOARD = re.compile(r"\\(?:mathbb|Bbb|mathds) ?\{? ?([RZNQC])")
_SETS = "RZNQC"
_SET_SIGNS = (("ℝ", "R"), ("ℤ", "Z"), ("\\R", "R"), ("\\Z", "Z"), ("\\reals", "R"), ("ℚ", "Q"))
_BOLD_SET = re.compile(
    r"(?P<member>\\in ?)?\\(?:mathbf|textbf|boldsymbol|bold) ?(?P<brace>\{ ?)?(?P<name>[RZNQC])"
    r"(?(brace) ?\}|(?![A-Za-z]))"
)
_UNIT_VECTOR = re.compile(
    r"\\(?:hat|vec|bar|overrightarrow|widehat|overline) ?\{? ?([ijk]) ?\}?"
    r"|(?<![A-Za-z\\])([ijk])(?![A-Za-z])|(?<=\\)([ijk])(?![A-Za-z])"
)


_CONGRUENCE = re.compile(
    r"(?:(?P<name>[A-Za-z](?:_[0-9A-Za-z])?|[A-Za-z]\^[0-9]) ?(?:\\equiv|=) ?)?"
    r"(?P<residues>[^\\()]{1,60}|(?:[^\\()]|\\text\{(?:or|and)\}|\\equiv|\\pm){1,60}?) ?"
    r"(?:\\pmod ?(?:\{(?P<braced>[0-9]{1,12})\}|(?P<digit>[0-9]))"
    r"|\(?(?:\\b?mod(?![a-z])|\\text\{mod\}|(?<![A-Za-z])mod(?![a-z]))"
    r" ?\{?(?P<bare>[0-9]{1,12})\}?\)?)"
)


@dataclass(frozen=True)
class Congruence:
    """Classes of whole numbers by one modulus."""

    name: str
    residues: tuple[Fraction, ...]
    modulus: int

    def classes(self) -> Counter[Fraction]:
        """Count of each least residue named."""
        return Counter(residue % self.modulus for residue in self.residues)


def respell(text: str, other: str) -> str:
    """A text in this module's notation. `C(5,2)` stays a point where the other text is a pair."""
    for spelling, known in _SPELLINGS.items():
        if spelling in text:
            text = text.replace(spelling, known)
    text = spell_repeating(text)
    if "C" in text or "P" in text or "A" in text:
        text = _PREFIXED.sub(_spell_prefixed, text)
        text = _BETWEEN.sub(lambda m: _spell_count(m[2], m[1], m[3]), text)
        text = _STACKED.sub(_spell_stacked, text)
        if not other.startswith(("(", "[")):
            text = _LISTED.sub(_spell_listed, text)
    return _system_as_list(text) if "\\begin" in text else text


def with_bold_sets(text: str, other: str) -> str:
    r"""A raw text with `\mathbf{R}` as the real numbers where it is a set for certain.

    It is a set behind `\in`, and where the other text names that set or, for R, infinity.
    """
    if len(text) == 1 and text in _SETS and text in _BLACKBOARD.findall(other):
        return f"\\mathbb{{{text}}}"
    if "\\mathbf" not in text and "\\bold" not in text and "\\textbf" not in text:
        return text
    sets = set(_BLACKBOARD.findall(other)) | {name for sign, name in _SET_SIGNS if sign in other}

    def spell(match: re.Match[str]) -> str:
        is_line = match["name"] == "R" and "\\infty" in other
        is_set = bool(match["member"]) or match["name"] in sets or is_line
        return f"{match['member'] or ''}\\mathbb{{{match['name']}}}" if is_set else match[0]

    return _BOLD_SET.sub(spell, text)


def rows_of_cases(text: str) -> list[list[str]] | None:
    """Rows of a `cases` environment around the whole text, each as its columns."""
    match = _SYSTEM.fullmatch(text)
    if match is None or match[1] == "matrix" or (match[1] == "array" and text[0] != "\\"):
        return None
    body = _ALIGNMENT.sub("", match[2].strip())
    rows = [row for row in _ROW_END.split(body) if row.strip()]
    return [[cell.strip(" ,;.") for cell in row.split("&")] for row in rows]


def vector_components(text: str) -> tuple[str, ...] | None:
    """Components of `2\\hat{i}-3\\hat{j}`, two or three; None for anything else."""
    if not _UNIT_VECTOR.search(text):
        return None
    components = {}
    for term in _signed_terms(text):
        units = _UNIT_VECTOR.findall(term)
        if len(units) != 1:
            return None
        unit = "".join(units[0])
        factor = _UNIT_VECTOR.sub("", term).strip(" *")
        if unit in components:
            return None
        components[unit] = f"{factor}1" if factor in ("", "+", "-") else factor.lstrip("+")
    is_marked = "\\hat" in text or "\\vec" in text or "\\bar" in text or "\\overr" in text
    if len(components) < 2 and not is_marked:
        return None
    axes = "ijk" if "k" in components else "ij"
    return tuple(components.get(axis, "0") for axis in axes)


def read_congruence(text: str) -> Congruence | None:
    """The congruence that a normalised text is; None when it is none."""
    if "mod" not in text:
        return None
    match = _CONGRUENCE.fullmatch(text)
    if match is None:
        return None
    modulus = int(match["braced"] or match["digit"] or match["bare"])
    items = [item.removeprefix("\\equiv").strip() for item in split_list(match["residues"])]
    if len(items) == 1 and items[0].startswith("\\pm"):
        items = [items[0][3:], f"-{items[0][3:].strip()}"]
    values = [parse_number(item.strip()) for item in items]
    known = tuple(value for value in values if value is not None and value.denominator == 1)
    if not known or len(known) < len(items) or modulus < 2:
        return None
    return Congruence(match["name"] or "", known, modulus)


def same_congruence(first: Congruence, second: Congruence) -> bool:
    """Whether two congruences name the same classes of the same unknown."""
    if first.name and second.name and first.name != second.name:
        return False
    return first.modulus == second.modulus and first.classes() == second.classes()


def _signed_terms(text: str) -> list[str]:
    inside = enclosed(text)
    text = (inside if inside is not None else text).replace("-", "+-")
    return [term.strip() for term in split_at(text, "+") if term.strip()]


def _spell_prefixed(match: re.Match[str]) -> str:
    return _spell_count(match[4], match[1] or match[2] or match[3], match[5])


def _spell_stacked(match: re.Match[str]) -> str:
    total, chosen = match[2] or match[5], match[3] or match[4]
    pair = total.strip("{}"), chosen.strip("{}")
    if all(part.isdecimal() for part in pair):
        # C_1^2 is a constant squared.
        is_count = int(pair[0]) >= int(pair[1])
    else:
        is_count = match[1] == "C" and not pair[0].isdecimal() and bool(_WHOLE.fullmatch(pair[0]))
    return _spell_count(match[1], *pair) if is_count else match[0]


def _spell_listed(match: re.Match[str]) -> str:
    is_count = _WHOLE.fullmatch(match[1]) and _WHOLE.fullmatch(match[2])
    return _spell_count("C", match[1], match[2]) if is_count else match[0]


def _spell_count(letter: str, total: str, chosen: str) -> str:
    total, chosen = total.strip("{}"), chosen.strip("{}")
    if letter == "C":
        return f"\\binom{{{total}}}{{{chosen}}}"
    return f"\\frac{{({total})!}}{{({total}-({chosen}))!}}"


def _system_as_list(text: str) -> str:
    """`\\begin{cases}x=1\\\\y=2\\end{cases}` as `x=1, y=2`."""
    is_system = text.startswith(("\\begin{cases}", "\\begin{rcases}", "\\{", "\\begin{aligned}"))
    rows = rows_of_cases(text) if is_system else None
    if rows is None or any(len(row) > 1 for row in rows):
        return text
    return ", ".join(row[0] for row in rows)
