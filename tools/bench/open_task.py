"""The open task of the workload `real` of tools.bench.end_to_end: its prompts and its reward. Pure.

The prompts' natural answers differ much in length, from some words to a page. Our verifiers
(`reward.extra`) and tools.bench.trl_worker import the reward, so that both grade alike; standard
library only.
"""

import json
from typing import Any

TEMPLATES = (
    "Give one title for a story about {}.",
    "Describe {} in five words.",
    "Ask me one short question about {}.",
    "Write one sentence about {}.",
    "Name three things that belong to {}.",
    "Explain {} to a child.",
    "Write a long story about {}.",
    "Describe the history of {} in detail.",
)
SUBJECTS = (
    "rivers", "bread", "a lighthouse", "bees", "the moon", "old trains", "mountains", "a market",
    "violins", "winter", "maps", "a small village", "clouds", "bicycles", "the sea", "gardens",
)  # fmt: skip
VOWELS = frozenset("aeiou")


def lines() -> list[str]:
    """JSONL lines of all prompts, for `kind = "jsonl"`."""
    questions = [template.format(subject) for subject in SUBJECTS for template in TEMPLATES]
    return [
        json.dumps({"question": text, "answer": "none", "task": "open", "split": "train"})
        for text in questions
    ]


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
