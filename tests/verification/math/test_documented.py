"""The table of docs/verification.md says what the verifier does."""

import re
from pathlib import Path

import pytest

from verification.math.answer import compare

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "verification.md").read_text()
ROWS = [
    [re.findall(r"`([^`]+)`", cell) for cell in line.split(" | ")[:3]]
    for line in PAGE.partition("### Accepted and refused")[2].partition("\n### ")[0].splitlines()
    if line.startswith("| `")
]


def test_the_table_is_read() -> None:
    assert len(ROWS) >= 20
    assert all(len(reference) == 1 and paid and unpaid for reference, paid, unpaid in ROWS)


@pytest.mark.parametrize(("reference", "paid", "unpaid"), ROWS, ids=[row[0][0] for row in ROWS])
def test_documented_answers_get_their_verdict(
    reference: list[str], paid: list[str], unpaid: list[str]
) -> None:
    answers = [*paid, *unpaid]
    right = [answer for answer in answers if compare(answer, *reference).is_correct]
    assert right == paid
