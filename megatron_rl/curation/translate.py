"""`data translate`: a share of the English problems in six other languages.

What translates is not ours: a served model (`asking.py`), a file that somebody has filled in, or
another function from a text and a language to a text. What it says is checked: numbers and
formulas are those of the source (`placeholders.py`), and the language is the one asked for, by the
classifier that also judges completions. It is run on texts of bounded length; its time is linear
in them. A translation that is refused leaves the problem as it was.

Source: Magistral (arXiv 2506.10910), section 2.2.4: 10 % of the English problems are translated
into French, Spanish, Italian, German, Chinese and Russian.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from megatron_rl.config.errors import InputError
from megatron_rl.curation.draw import place_of
from megatron_rl.curation.options import check_share
from megatron_rl.curation.placeholders import Protected, protect, restore
from megatron_rl.curation.report import Report, Tally
from megatron_rl.curation.rows import Row, read_jsonl
from verification.language import LanguageRules, canonical_code, detect

LANGUAGES = ("fr", "es", "it", "de", "zh", "ru")
GROWTH, GROWTH_CHARS = 3, 200
"""A translation may have so many times the characters of the source, and so many more."""
_RULES = LanguageRules()
_COMMAND = re.compile(r"\\[A-Za-z]+")
_LONG_WORD = re.compile(r"[^\W\d_]{4,}")
_EXPECTED = '{"id": "...", "language": "fr", "text": "... with the placeholders of --requests ..."}'


@dataclass(frozen=True)
class TranslateOptions:
    """Which problems are translated, and into what."""

    share: float = 0.1
    """Of the problems that can be: which ones depends on seed and question alone."""
    languages: tuple[str, ...] = LANGUAGES
    tasks: tuple[str, ...] = ("math",)
    keep_source: bool = False
    """The English problem stays beside its translation."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_share("--share", self.share)
        unknown = [code for code in self.languages if code not in LANGUAGES]
        if unknown or not self.languages:
            raise InputError(f"--languages {unknown}: expected some of {', '.join(LANGUAGES)}")


class Request(msgspec.Struct, frozen=True):
    """What is to be translated; also a line of the files of requests and of translations."""

    id: str
    language: str
    text: str
    """With placeholders."""


Translator = Callable[[Request], str]
"""Text of the request in its language, with the placeholders; empty: no translation."""


class Chosen(NamedTuple):
    """A row, and what is to be translated of it."""

    row: Row
    language: str
    protected: Protected


class Outcome(NamedTuple):
    """What the tool makes of rows."""

    rows: list[Row]
    report: Report


class Refused(msgspec.Struct, frozen=True):
    """A translation that was not taken."""

    id: str
    language: str
    reason: str


def choose(rows: Sequence[Row], options: TranslateOptions) -> tuple[list[Chosen], Counter[str]]:
    """The rows to be translated, and how many cannot be, by reason."""
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


def request_of(item: Chosen) -> Request:
    """What a translator is asked."""
    return Request(item.row.prompt.id, item.language, item.protected.text)


def translate(rows: Sequence[Row], translator: Translator, options: TranslateOptions) -> Outcome:
    """The rows, with translations in the places of those that were chosen, or behind them."""
    chosen, ineligible = choose(rows, options)
    tally = Tally("translate", asdict(options), read=len(rows))
    translated: dict[str, Row] = {}
    refused: list[Refused] = []
    languages: Counter[str] = Counter()
    for item in chosen:
        text = translator(request_of(item))
        name = item.row.prompt.id
        question, refusal = check_translation(item, text)
        if refusal:
            refused.append(Refused(name, item.language, refusal))
            continue
        languages[item.language] += 1
        translated[name] = (
            item.row.with_question(question)
            .with_language(item.language)
            .with_id(f"{name}/{item.language}")
        )
    written: list[Row] = []
    for row in rows:
        other = translated.get(row.prompt.id)
        if other is None or options.keep_source:
            written.append(row)
        if other is not None:
            written.append(other)
    counts = tally.added if options.keep_source else tally.changed
    counts["translated"] += len(translated)
    tally.figures = {
        "chosen": len(chosen),
        "languages": dict(sorted(languages.items())),
        "not_eligible": dict(ineligible.most_common()),
        "refused": dict(Counter(item.reason for item in refused).most_common()),
        "refused_rows": msgspec.to_builtins(refused),
    }
    return Outcome(written, tally.report(written=len(written)))


def check_translation(item: Chosen, text: str) -> tuple[str, str]:
    """(question with its pieces, empty), or (empty, why the translation is refused)."""
    source = item.row.prompt.question
    if not text.strip():
        return "", "no_translation"
    if len(text) > GROWTH * len(item.protected.text) + GROWTH_CHARS:
        return "", "too_long"
    restored = restore(source, item.protected, text)
    if restored.refusal:
        return "", restored.refusal
    code = detect(restored.text, _RULES).code
    if not code:
        return "", "language_unknown"
    if code != canonical_code(item.language):
        return "", "other_language"
    return restored.text, ""


def _ineligible(row: Row, options: TranslateOptions) -> str:
    """Why a row is not translated whatever the draw; empty if it can be."""
    prompt = row.prompt
    if prompt.task not in options.tasks:
        return "other_task"
    if prompt.split == "held_out":
        return "held_out"
    if len(prompt.messages) > 1:
        return "several_messages"
    if prompt.language:
        return "language_given"
    # "Tuesday" would be wrong in any other language.
    if _LONG_WORD.search(_COMMAND.sub(" ", prompt.answer)):
        return "answer_in_words"
    return "" if detect(prompt.question, _RULES).code == "en" else "not_english"


def read_translations(path: Path) -> dict[tuple[str, str], str]:
    """Translations by id and language of the request. Raises InputError."""
    found: dict[tuple[str, str], str] = {}
    for number, line in read_jsonl(path, Request, expected=_EXPECTED):
        if (line.id, line.language) in found:
            raise InputError(f"{path}:{number}: {line.id!r} in {line.language!r} is there twice")
        found[line.id, line.language] = line.text
    return found
