"""Open prompts whose natural answers differ much in length: from some words to a page. Pure.

Used by the workload `real` of tools.bench.end_to_end. How long the answers are, the benchmark
measures.
"""

import json

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


def lines() -> list[str]:
    """JSONL lines of all prompts, for `kind = "jsonl"`."""
    questions = [template.format(subject) for subject in SUBJECTS for template in TEMPLATES]
    return [
        json.dumps({"question": text, "answer": "none", "task": "open", "split": "train"})
        for text in questions
    ]
