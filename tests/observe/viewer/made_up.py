"""Rollouts on disk, made up, with arrays that belong to them."""

import json
from pathlib import Path
from typing import Any

import numpy as np


def record(group: int, index: int, **values: Any) -> dict[str, Any]:
    """A line of rollouts/*.jsonl."""
    tokens = values.get("tokens", 3)
    return {
        "prompt_id": f"p{group}", "group": group, "index": index, "task": "math",
        "problem": "one and one?", "language": "en", "text": "two", "answer": "2", "reward": 1.0,
        "parts": {"correct": 0.9}, "reason": "correct", "tokens": tokens, "versions": [0],
        "finish_reason": "stop", "seed": 0, "prompt_tail": "", "prompt_tokens": 2,
        "spans": [[0, 0, tokens]], "generator": "generator-0", **values,
    }  # fmt: skip


def write(path: Path, records: list[dict[str, Any]], end: str = "") -> None:
    """Append lines, and the beginning of one more."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("".join(json.dumps(one) + "\n" for one in records) + end)


def write_words(path: Path, prompt: list[int], tokens: list[int], logprobs: list[float]) -> None:
    """The arrays of one rollout, at the start of a file."""
    ids = np.array([*prompt, *tokens], "<i4").tobytes()
    path.write_bytes(ids + np.array(logprobs, "<f4").tobytes())
