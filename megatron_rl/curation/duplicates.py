"""`data dedupe` and `data decontaminate`: drop near duplicates of questions.

Two questions are near duplicates if both hold:

- The Jaccard index of their shingles (tokens, and pairs of neighbours) reaches a threshold. One
  changed word of n different words leaves about (2n - 4) / (2n + 2), so 0.73 for n = 10.
- Tokens that decide about the answer are equal: numbers (as digits or words), operators, LaTeX
  functions and relations, and DIRECTIONS. Problems that differ only in numbers are never
  duplicates.

`dedupe` also wants the same turns before the question, and the same system message where both
problems have one. It compares these messages as a run does: only case and spacing do not count.

Layout does not count: case, spacing, dollars, braces, LaTeX's spaces and sizes, punctuation, and
synonyms of instructions.

datasketch's MinHash LSH proposes pairs, and the exact index confirms them. With b bands of r
hashes, texts of Jaccard index J become candidates with probability 1 - (1 - J^r)^b. Every hash
includes the deciding tokens and the turns before, so that questions of one template are not all
compared.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from megatron_rl.config.errors import InputError
from megatron_rl.curation.rows import Row
from megatron_rl.curation.tool import Outcome, Progress, Report, check_share, no_progress
from megatron_rl.protocol.prompt import normalized
from megatron_rl.protocol.types import Prompt

HASHES = 128
SCHEME = "affine32"
"""datasketch's default since 2.0, explicit because all MinHashes share permutations."""
MAX_MISSED = 1e-3
LOWEST_THRESHOLD = 0.3
"""A lower threshold would make nearly all pairs candidates."""
DEFAULT_THRESHOLD = 0.7

_LAYOUT = re.compile(
    r"\\(?:q?quad|left|right|displaystyle|limits|[bB]igg?[lr]?|text|textbf|textit|mathrm|mbox"
    r"|mathbf|mathbb|operatorname|[lc]?dots"
    r"|hspace\{[^{}]*\}|[ ,;:!()\[\]])(?![a-z])|\\\\|[~${}]"
)
_GROUPS = re.compile(r"(?<=\d)(?:\{,\}|,|\\,)(?=\d{3}(?!\d))")
_TOKEN = re.compile(
    r"\d+(?:\.\d+)?|\\[a-z]+|[^\W\d_]+(?:'[a-z]+)?|(?<=[\d)])!|(?<=\b[a-z])!|[-+*/^=<>%|_&]"
)
_SAME = {
    "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\times": "*", "\\cdot": "*", "\\ast": "*",
    "\\div": "/", "\\le": "\\leq", "\\ge": "\\geq", "\\leqslant": "\\leq", "\\geqslant": "\\geq",
    "\\ne": "\\neq", "\\lt": "<", "\\gt": ">", "\\%": "%", "\\to": "\\rightarrow",
    "compute": "find", "calculate": "find", "evaluate": "find", "determine": "find",
    "greatest": "maximum", "largest": "maximum", "max": "maximum", "maximal": "maximum",
    "highest": "maximum", "biggest": "maximum", "smallest": "minimum", "least": "minimum",
    "min": "minimum", "minimal": "minimum", "lowest": "minimum", "fewest": "minimum",
    "zero": "0", "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7",
    "eight": "8", "nine": "9", "ten": "10", "eleven": "11", "twelve": "12", "twenty": "20",
    "thirty": "30", "forty": "40", "fifty": "50", "sixty": "60", "hundred": "100",
    "thousand": "1000",
}  # fmt: skip
_SIGNS = str.maketrans(
    {"−": "-", "–": "-", "—": " ", "×": "*", "·": "*", "÷": "/", "≤": "<=", "≥": ">="}
)
DIRECTIONS = frozenset(
    "maximum minimum even odd positive negative sum difference product quotient more less fewer "
    "not without before after increasing decreasing inside outside except half twice double triple "
    "most median mean mode mod modulo perimeter area volume".split()
)
"""Words that decide about the answer."""


def dedupe(rows: Sequence[Row], *, threshold: float, progress: Progress = no_progress) -> Outcome:
    """The rows without near duplicates of an earlier kept row.

    Held-out rows come first, so that no copy of a held-out row is trained on.
    """
    report = Report("dedupe", {"threshold": threshold}, read=len(rows))
    known = NearDuplicates(threshold, ordered=True)
    row_of = {row.prompt.id: row for row in rows}
    dropped: set[str] = set()
    held_out_first = sorted(rows, key=lambda row: row.prompt.split != "held_out")
    for row, question, match in _matched(held_out_first, known, progress, earlier=earlier_of):
        if match is None:
            known.add(row.prompt.id, question)
            continue
        first = row_of[match.key].prompt
        is_same = normalized(first.answer) == normalized(row.prompt.answer)
        reason = "duplicate" if is_same else "duplicate_with_other_answer"
        report.drop(row.prompt, reason, f"{match.similarity:.2f} like {first.place}")
        dropped.add(row.prompt.id)
    report.figures = {"pairs_compared": known.candidates}
    return report.outcome([row for row in rows if row.prompt.id not in dropped])


def decontaminate(
    rows: Sequence[Row],
    evaluations: Sequence[Row],
    *,
    threshold: float,
    progress: Progress = no_progress,
) -> Outcome:
    """The rows that are not near duplicates of an evaluation problem.

    The order of numbers and the messages before a question do not count, because a lost problem
    costs less than a leak.
    """
    options = {"threshold": threshold, "evaluation_problems": len(evaluations)}
    report = Report("decontaminate", options, read=len(rows))
    known = NearDuplicates(threshold, ordered=False)
    # By place: different files may use the same ids.
    for place, row in {row.prompt.place: row for row in evaluations}.items():
        known.add(place, known.prepare(row.prompt.question))
    kept, hit = [], set()
    for row, _, match in _matched(rows, known, progress):
        if match is None:
            kept.append(row)
            continue
        hit.add(match.key)
        detail = f"{match.similarity:.2f} like {match.key}"
        report.drop(row.prompt, "near_evaluation_problem", detail)
    report.figures = {"pairs_compared": known.candidates, "evaluation_problems_found": len(hit)}
    return report.outcome(kept)


class Fingerprint(NamedTuple):
    """The compared parts of a question."""

    shingles: np.ndarray
    """[shingles] uint64, sorted, distinct: digests of tokens and of pairs of neighbours."""
    numbers: tuple[str, ...]
    """In the order of the text."""
    decisive: frozenset[str]
    """Operators, LaTeX commands and DIRECTIONS."""


class Earlier(NamedTuple):
    """The messages of a prompt besides its question, normalized."""

    system: str = ""
    turns: str = ""

    def agrees(self, other: "Earlier") -> bool:
        """Whether equal questions behind these messages ask the same.

        One of two copies of a problem often has a general system message, and the other has none.
        """
        is_told_otherwise = self.system and other.system and self.system != other.system
        return self.turns == other.turns and not is_told_otherwise


NOTHING = Earlier()


class Question(NamedTuple):
    """A question, prepared for `find` and `add`."""

    earlier: Earlier
    fingerprint: Fingerprint
    hashes: Any
    """datasketch's MinHash of the shingles."""


class Match(NamedTuple):
    """A known near duplicate of a question."""

    key: str
    similarity: float
    """Jaccard index of the shingles."""


class NearDuplicates:
    """An index of questions."""

    def __init__(self, threshold: float, *, ordered: bool) -> None:
        """ordered: the order of numbers counts. Raises InputError."""
        check_share("--threshold", threshold, low=LOWEST_THRESHOLD)
        self._library = _load_datasketch()
        self._threshold = threshold
        self._ordered = ordered
        self._index = self._library.MinHashLSH(num_perm=HASHES, params=bands(threshold))
        # Drawn once: a draw per question would take longer than its hashes.
        self._permutations = self._library.MinHash(
            num_perm=HASHES, seed=1, scheme=SCHEME
        ).permutations
        self._known: dict[str, tuple[Earlier, Fingerprint]] = {}
        self._number_of: dict[str, int] = {}
        """Key -> position in the order of `add`."""
        self.candidates = 0
        """Number of compared pairs."""

    def prepare(self, text: str, earlier: Earlier = NOTHING) -> Question:
        """The argument of `find` and `add`."""
        known = fingerprint(text)
        numbers = known.numbers if self._ordered else sorted(known.numbers)
        deciding = "\0".join([*numbers, "", *sorted(known.decisive), "", earlier.turns])
        key = np.uint64(xxhash.xxh3_64_intdigest(deciding.encode()))
        # Shingles are digests already; MinHash takes 32 bits of each.
        hashed = self._library.MinHash(
            num_perm=HASHES,
            permutations=self._permutations,
            scheme=SCHEME,
            hashfunc=lambda digest: digest & 0xFFFFFFFF,
        )
        hashed.update_batch((known.shingles ^ key).tolist())
        return Question(earlier, known, hashed)

    def find(self, question: Question) -> Match | None:
        """The most similar known near duplicate; among equals the first added."""
        asked = question.fingerprint
        best: Match | None = None
        found = set(self._index.query(question.hashes))
        self.candidates += len(found)
        for key in sorted(found, key=self._number_of.__getitem__):
            earlier, known = self._known[key]
            similarity = jaccard(asked, known)
            if similarity < self._threshold or (best and similarity <= best.similarity):
                continue
            is_same = decides_alike(asked, known, ordered=self._ordered)
            if is_same and question.earlier.agrees(earlier):
                best = Match(key, similarity)
        return best

    def add(self, key: str, question: Question) -> None:
        """Make a question known; keys are unique."""
        self._number_of[key] = len(self._known)
        self._known[key] = question.earlier, question.fingerprint
        self._index.insert(key, question.hashes)


def _matched(
    rows: Sequence[Row],
    known: NearDuplicates,
    progress: Progress,
    *,
    earlier: Callable[[Prompt], Earlier] = lambda prompt: NOTHING,
) -> Iterator[tuple[Row, Question, Match | None]]:
    for number, row in enumerate(rows):
        progress(number, len(rows))
        question = known.prepare(row.prompt.question, earlier(row.prompt))
        yield row, question, known.find(question)


def earlier_of(prompt: Prompt) -> Earlier:
    """The messages of a prompt besides its question, the last one of the user."""
    users = [place for place, said in enumerate(prompt.messages) if said.role == "user"]
    others = [said for place, said in enumerate(prompt.messages) if place not in users[-1:]]
    system = " ".join(said.content for said in others if said.role == "system")
    turns = [f"{said.role} {normalized(said.content)}" for said in others if said.role != "system"]
    return Earlier(normalized(system), "\n".join(turns))


def bands(threshold: float) -> tuple[int, int]:
    """(bands, hashes per band) with most hashes that miss at most MAX_MISSED pairs at `threshold`.

    For 0.7: 32 bands of 4, which miss 1.5 in 10,000.
    """
    rows = max(
        r for r in range(1, HASHES) if (1 - threshold**r) ** (HASHES // r) <= MAX_MISSED or r == 1
    )
    return HASHES // rows, rows


def fingerprint(text: str) -> Fingerprint:
    """The compared parts of a question."""
    tokens = [_as_number(token) for token in _tokens_of(text)]
    pairs = {f"{first} {second}" for first, second in zip(tokens, tokens[1:], strict=False)}
    digests = {xxhash.xxh3_64_intdigest(shingle.encode()) for shingle in pairs | set(tokens)}
    return Fingerprint(
        np.array(sorted(digests), np.uint64),
        tuple(token for token in tokens if token[0].isdigit()),
        frozenset(t for t in tokens if t in DIRECTIONS or not (t[0].isalpha() or t[0].isdigit())),
    )


def _tokens_of(text: str) -> list[str]:
    """Words, numbers, operators and LaTeX commands, with one word for synonyms."""
    text = unicodedata.normalize("NFKC", text).translate(_SIGNS).casefold()
    # A space, because a layout command may touch the next word (\quad x).
    plain = _LAYOUT.sub(" ", _GROUPS.sub("", text))
    return [_SAME.get(token, token) for token in _TOKEN.findall(plain)]


def _as_number(token: str) -> str:
    """3 for 3.0 and 03; any other token unchanged."""
    if not token[0].isdigit():
        return token
    whole, _, part = token.partition(".")
    part = part.rstrip("0")
    return (whole.lstrip("0") or "0") + (f".{part}" if part else "")


def jaccard(one: Fingerprint, other: Fingerprint) -> float:
    """Common shingles over all shingles; 0 for two texts without any."""
    common = len(np.intersect1d(one.shingles, other.shingles, assume_unique=True))
    return common / max(1, len(one.shingles) + len(other.shingles) - common)


def decides_alike(one: Fingerprint, other: Fingerprint, *, ordered: bool) -> bool:
    """Whether numbers and decisive tokens are equal. ordered: the order of numbers counts."""
    if one.decisive != other.decisive:
        return False
    if ordered:
        return one.numbers == other.numbers
    return sorted(one.numbers) == sorted(other.numbers)


def _load_datasketch() -> Any:
    try:
        import datasketch
    except ImportError as error:
        raise InputError(
            "dedupe and decontaminate need datasketch, which is not installed "
            f"({error}): .venv/bin/python -m pip install datasketch==2.0.0"
        ) from error
    return datasketch
