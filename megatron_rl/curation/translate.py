"""`data translate`: translates a share of the English problems into six other languages.

A served model (`asking.py`), a filled-in file, or your own function translates. This tool checks
that numbers, formulas and code are unchanged, and the language, by the classifier that also judges
completions. A problem with a refused translation stays unchanged.

Before translation each number, formula and piece of code becomes a placeholder such as ⟦3⟧. The
translator may move placeholders; each must return exactly once, without new pieces.

Source: Magistral (arXiv 2506.10910), section 2.2.4: 10 % of the English problems are translated
into French, Spanish, Italian, German, Chinese and Russian.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from megatron_rl.config.errors import InputError
from megatron_rl.curation.rows import Row
from megatron_rl.curation.tool import Outcome, Report, check_share, place_of
from megatron_rl.protocol.line_errors import decode_texts
from verification.language import canonical_code, detect

NAMES = {"fr": "French", "es": "Spanish", "it": "Italian", "de": "German", "zh": "Chinese",
         "ru": "Russian"}  # fmt: skip
GROWTH, GROWTH_CHARS = 3, 200
"""A translation has at most GROWTH times the characters of the source, plus GROWTH_CHARS."""
OPEN, CLOSE = "⟦", "⟧"
_COMMAND = re.compile(r"\\[A-Za-z]+")
_LONG_WORD = re.compile(r"[^\W\d_]{4,}")
_EXPECTED = '{"id": "...", "language": "fr", "text": "... with the placeholders of --requests ..."}'
# Lengths are bounded: many openings would take quadratic time. In a longer formula every number and
# command is a separate piece.
_PIECE = re.compile(
    r"```.{0,4000}?```"
    r"|`[^`\n]+`"
    r"|\\begin\{(?P<name>[A-Za-z]+\*?)\}.{0,4000}?\\end\{(?P=name)\}"
    r"|(?<!\\)\$\$.{1,4000}?(?<!\\)\$\$"
    # As in pandoc, so that "$5 and $7" are prices: no space inside, no digit after it.
    r"|(?<!\\)\$(?=\S)(?:\\.|[^$\\])*?(?<=\S)\$(?!\d)"
    r"|\\\(.{1,2000}?\\\)|\\\[.{1,4000}?\\\]"
    r"|https?://[!-~]+"
    r"|\\[A-Za-z]+\*?|\\."
    r"|\$?[-\u2212+]?\d+(?:[.,:/]\d+)*\s?%|\$?[-\u2212+]?\d+(?:[.,:/]\d+)*"
    # Signs of formulas that stand alone: ASCII, superscripts, fractions, operators.
    r"|[$^_=<>+*/|\u00b1-\u00b3\u00b9\u00bc-\u00be\u00d7\u00f7\u2070-\u209c\u2150-\u218b\u2200-\u22ff]",
    re.DOTALL,
)
_SIGN = re.compile(f"{OPEN}(\\d{{1,6}}){CLOSE}", re.ASCII)
_BRACES = re.compile(r"[{}]")


@dataclass(frozen=True)
class TranslateOptions:
    """Rules for problems to translate."""

    share: float = 0.1
    """Share of the eligible problems; only seed and question choose them."""
    languages: list[str] = field(default_factory=lambda: list(NAMES))
    """Codes of the languages."""
    tasks: list[str] = field(default_factory=lambda: ["math"])
    """Tasks of the eligible problems."""
    keep_source: bool = False
    """Also write the English problem, before its translation."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_share("--share", self.share)
        unknown = [code for code in self.languages if code not in NAMES]
        if unknown or not self.languages:
            raise InputError(f"--languages {unknown}: expected some of {', '.join(NAMES)}")


class Request(msgspec.Struct, frozen=True):
    """A text to translate; also a line of a requests or translations file."""

    id: str
    language: str
    text: str
    """With placeholders."""


Translator = Callable[[Request], str]
"""f(request) -> translated text with the placeholders; empty: no translation."""


class Protected(NamedTuple):
    """A text with placeholders, and their pieces."""

    text: str
    pieces: tuple[str, ...]
    """By number of the placeholder."""


class Chosen(NamedTuple):
    """A row to translate."""

    row: Row
    language: str
    protected: Protected

    @property
    def request(self) -> Request:
        return Request(self.row.prompt.id, self.language, self.protected.text)


def choose(rows: Sequence[Row], options: TranslateOptions) -> tuple[list[Chosen], Counter[str]]:
    """(rows to translate, counts of ineligible rows by reason)."""
    chosen, ineligible = [], Counter[str]()
    for row in rows:
        protected = protect(row.prompt.question)
        reason = _ineligible(row, options) or ("" if protected else "has_placeholders")
        if reason or protected is None:
            ineligible[reason] += 1
            continue
        name = row.prompt.normalized_question
        if place_of(options.seed, "translate", name) < options.share:
            place = int(place_of(options.seed, "language", name) * len(options.languages))
            chosen.append(Chosen(row, options.languages[place], protected))
    return chosen, ineligible


def translate(rows: Sequence[Row], translator: Translator, options: TranslateOptions) -> Outcome:
    """The rows, with translations in place of the chosen rows, or after them (keep_source)."""
    chosen, ineligible = choose(rows, options)
    report = Report("translate", asdict(options), read=len(rows))
    translated: dict[str, Row] = {}
    refused: list[dict[str, str]] = []
    languages: Counter[str] = Counter()
    for item in chosen:
        name = item.row.prompt.id
        question, refusal = check_translation(item, translator(item.request))
        if refusal:
            refused.append({"id": name, "language": item.language, "reason": refusal})
            continue
        languages[item.language] += 1
        row = item.row.with_question(question)
        translated[name] = row.replace(language=item.language, id=f"{name}/{item.language}")
    written: list[Row] = []
    for row in rows:
        other = translated.get(row.prompt.id)
        if other is None or options.keep_source:
            written.append(row)
        if other is not None:
            written.append(other)
    counts = report.added if options.keep_source else report.changed
    counts["translated"] += len(translated)
    report.figures = {
        "chosen": len(chosen),
        "languages": dict(sorted(languages.items())),
        "not_eligible": dict(ineligible.most_common()),
        "refused": dict(Counter(one["reason"] for one in refused).most_common()),
        "refused_rows": refused,
    }
    return report.outcome(written)


def check_translation(item: Chosen, text: str) -> tuple[str, str]:
    """(question with its pieces, ""), or ("", reason of the refusal)."""
    if not text.strip():
        return "", "no_translation"
    if len(text) > GROWTH * len(item.protected.text) + GROWTH_CHARS:
        return "", "too_long"
    restored, refusal = restore(item.row.prompt.question, item.protected, text)
    if refusal:
        return "", refusal
    code = detect(restored).code
    if not code:
        return "", "language_unknown"
    return (restored, "") if code == canonical_code(item.language) else ("", "other_language")


def _ineligible(row: Row, options: TranslateOptions) -> str:
    """Reason why a row is never translated; empty: eligible."""
    prompt = row.prompt
    if prompt.task not in options.tasks:
        return "other_task"
    if prompt.split == "held_out":
        return "held_out"
    if len(prompt.messages) > 1:
        return "several_messages"
    if prompt.language:
        return "language_given"
    # An answer "Tuesday" would be wrong in another language.
    if _LONG_WORD.search(_COMMAND.sub(" ", prompt.answer)):
        return "answer_in_words"
    return "" if detect(prompt.question).code == "en" else "not_english"


def read_translations(path: Path) -> dict[tuple[str, str], str]:
    """Translations by id and language of the request. Raises InputError."""
    found: dict[tuple[str, str], str] = {}
    for number, line in decode_texts(path, Request, expected=_EXPECTED):
        if (line.id, line.language) in found:
            raise InputError(f"{path}:{number}: {line.id!r} in {line.language!r} is there twice")
        found[line.id, line.language] = line.text
    return found


# --- placeholders ---------------------------------------------------------------------------------


def protect(text: str) -> Protected | None:
    """The text with placeholders for its pieces; None if it already contains placeholders."""
    if OPEN in text or CLOSE in text:
        return None
    pieces: list[str] = []

    def take(found: re.Match[str]) -> str:
        pieces.append(found[0])
        return f"{OPEN}{len(pieces) - 1}{CLOSE}"

    return Protected(_PIECE.sub(take, text), tuple(pieces))


def restore(source: str, protected: Protected, translated: str) -> tuple[str, str]:
    """(translation of `source` with its pieces, ""), or ("", reason of the refusal)."""
    numbers = Counter(int(number) for number in _SIGN.findall(translated))
    expected = Counter(range(len(protected.pieces)))
    if expected - numbers:
        return "", "placeholder_lost"
    if numbers - expected:
        return "", "placeholder_added"
    rest = _SIGN.sub(" ", translated)
    if OPEN in rest or CLOSE in rest:
        return "", "placeholder_broken"
    if any(sign.isnumeric() and not sign.isalpha() for sign in rest):
        return "", "number_added"
    plain = _SIGN.sub(" ", protected.text)
    is_braced_alike = sorted(_BRACES.findall(rest)) == sorted(_BRACES.findall(plain))
    if _PIECE.search(rest) or "\\" in rest or "`" in rest or not is_braced_alike:
        return "", "formula_added"
    # One pass by number: a piece may look like a placeholder.
    text = _SIGN.sub(lambda found: protected.pieces[int(found[1])], translated)
    return (text, "") if _pieces_of(text) == _pieces_of(source) else ("", "pieces_run_together")


def _pieces_of(text: str) -> Counter[str]:
    """Counts of a text's numbers, formulas and pieces of code."""
    return Counter(found[0] for found in _PIECE.finditer(text))
