"""The golden pairs: answer, reference, whether they are equal, and the class they stand for."""

import json
from pathlib import Path
from typing import TypedDict


class GoldenPair(TypedDict):
    """One line of a file in `golden/`."""

    reference: str
    answer: str
    verdict: bool
    note: str


def load_golden_pairs() -> list[GoldenPair]:
    """All pairs of all files, in the order of the files' names."""
    files = sorted((Path(__file__).parent / "golden").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]
