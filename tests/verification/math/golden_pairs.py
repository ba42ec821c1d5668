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


def load_golden_pairs(names: str = "*.jsonl") -> list[GoldenPair]:
    """All pairs of the files with such names, in the order of the names."""
    files = sorted((Path(__file__).parent / "golden").glob(names))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]
