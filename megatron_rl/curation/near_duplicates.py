"""Finds near duplicates among many questions: MinHash LSH proposes, `similarity.py` confirms.

The index is datasketch's. With b bands of r hashes two texts of Jaccard index J become a candidate
with probability 1 - (1 - J^r)^b. `bands` takes the largest r with which a pair at the threshold is
missed at most once in a thousand times: r = 4, b = 32 for 0.7, 1.5 in 10,000.

What must be equal is mixed into every hash, so that only questions with the same numbers and
decisive tokens are proposed. Else each question of a template, with numbers of its own, would be
compared with all others of it.
"""

from typing import Any, NamedTuple

from megatron_rl.config.errors import InputError
from megatron_rl.curation.options import check_share
from megatron_rl.curation.similarity import Fingerprint, decides_alike, fingerprint, jaccard, key_of

HASHES = 128
SCHEME = "affine32"
"""datasketch's default since 2.0; named, because permutations are handed from one to the next."""
MAX_MISSED = 1e-3
LOWEST_THRESHOLD = 0.3
"""Below, nearly all pairs would be candidates."""
DEFAULT_THRESHOLD = 0.7


class Match(NamedTuple):
    """A question that is nearly the one asked about."""

    key: str
    similarity: float
    """Jaccard index of the shingles."""


class Question(NamedTuple):
    """A question ready to be looked up."""

    fingerprint: Fingerprint
    hashes: Any
    """datasketch's MinHash of the shingles."""


def bands(threshold: float) -> tuple[int, int]:
    """(bands, hashes of a band) that miss at most MAX_MISSED of the pairs at the threshold."""
    rows = max(
        r for r in range(1, HASHES) if (1 - threshold**r) ** (HASHES // r) <= MAX_MISSED or r == 1
    )
    return HASHES // rows, rows


class NearDuplicates:
    """An index of questions."""

    def __init__(self, threshold: float, *, ordered: bool) -> None:
        """ordered: numbers in another order make another problem. Raises InputError."""
        check_share("--threshold", threshold, low=LOWEST_THRESHOLD)
        self._library = load_datasketch()
        self._threshold = threshold
        self._ordered = ordered
        self._index = self._library.MinHashLSH(num_perm=HASHES, params=bands(threshold))
        # Drawn once: to draw them for each question takes longer than to hash it.
        self._permutations = self._library.MinHash(
            num_perm=HASHES, seed=1, scheme=SCHEME
        ).permutations
        self._known: dict[str, Fingerprint] = {}
        self._number_of: dict[str, int] = {}
        """Of each key, in the order in which they were added."""
        self.candidates = 0
        """Pairs that were compared."""

    def prepare(self, text: str) -> Question:
        """What `find` and `add` take."""
        known = fingerprint(text)
        return Question(known, self._hashes(known))

    def find(self, question: Question) -> Match | None:
        """The most similar known question that is nearly this one; of equals the first added."""
        asked = question.fingerprint
        best: Match | None = None
        found = set(self._index.query(question.hashes))
        self.candidates += len(found)
        for key in sorted(found, key=self._number_of.__getitem__):
            known = self._known[key]
            similarity = jaccard(asked, known)
            if similarity < self._threshold or (best and similarity <= best.similarity):
                continue
            if decides_alike(asked, known, ordered=self._ordered):
                best = Match(key, similarity)
        return best

    def add(self, key: str, question: Question) -> None:
        """Make a question known; keys are unique."""
        self._number_of[key] = len(self._known)
        self._known[key] = question.fingerprint
        self._index.insert(key, question.hashes)

    def _hashes(self, known: Fingerprint) -> Any:
        hashed = self._library.MinHash(
            num_perm=HASHES, permutations=self._permutations, scheme=SCHEME, hashfunc=_low_bits
        )
        key = key_of(known, ordered=self._ordered)
        hashed.update_batch((known.shingles ^ key).tolist())
        return hashed


def _low_bits(digest: int) -> int:
    """The hash of a shingle, which is a digest already: MinHash takes 32 bits."""
    return digest & 0xFFFFFFFF


def load_datasketch() -> Any:
    """The library; InputError where it is not installed."""
    try:
        import datasketch
    except ImportError as error:
        raise InputError(
            "dedupe and decontaminate need datasketch, which is not installed "
            f"({error}): .venv/bin/python -m pip install datasketch==2.0.0"
        ) from error
    return datasketch
