"""The reward of the benchmark's workload `real`: smooth, so that groups are practically never
without variance.

Imported by our verifiers (`reward.extra`) and by tools.bench.trl_worker, so that both grade alike;
standard library only.
"""

from typing import Any

VOWELS = frozenset("aeiou")


def vowel_share(text: str) -> float:
    """Share of vowels among the letters of a text, in [0, 1]; 0 for a text without letters.

    A policy can learn it, and two different completions of some words seldom share it.
    """
    letters = [character for character in text.lower() if character.isalpha()]
    if not letters:
        return 0.0
    return sum(letter in VOWELS for letter in letters) / len(letters)


def reward(answer: str, request: Any) -> float:
    """As an extra reward of ours."""
    return vowel_share(request.text)
