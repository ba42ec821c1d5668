"""References with one small change are wrong answers, unless it is proved that they are equal."""

import functools
import json
import re
from pathlib import Path

import pytest
from math_verify import parse
from sympy import Expr, Matrix, simplify

from tests.verification.math.golden_pairs import load_golden_pairs
from tests.verification.math.mutations import MUTATIONS, Mutant, draw_mutants
from verification.math.answer import compare, prepare

COUNT = 3000
# No words, units, lists or relations, of which math-verify would read a part.
_PLAIN = re.compile(
    r"(?:[0-9.+*/^{}()! -]|(?<![A-Za-z])[a-z](?![a-z])|\\(?:d?frac|sqrt|pi|cdot)(?![a-z]))+"
)
_DETERMINANT = re.compile(
    r"(?:D=|\\det|\\operatorname\{det\}|\\left[|(])*\\begin\{([a-z]+)\}(?:\{c+\})?([^a-z{}]*"
    r"(?:\\frac[^a-z]*)*)\\end\{\1\}(?:\\right[|)])?"
)
PROVED = {
    (row["answer"], row["reference"])
    for row in map(
        json.loads, (Path(__file__).parent / "equal_mutants.jsonl").read_text().splitlines()
    )
}
"""Mutants that are equal to their references all the same, each with its proof beside it."""


@functools.cache
def _references() -> list[str]:
    pairs = load_golden_pairs()
    right = {pair["answer"] for pair in pairs if pair["verdict"]}
    return sorted({pair["reference"] for pair in pairs} | right)


def _is_proved(mutant: Mutant) -> bool:
    """Whether SymPy simplifies the difference to 0, or a person has proved it in the list."""
    if (mutant.answer, mutant.reference) in PROVED:
        return True
    sides = [_parse(text) for text in (mutant.answer, mutant.reference)]
    return all(isinstance(side, Expr) for side in sides) and simplify(sides[0] - sides[1]) == 0


def _parse(text: str) -> object:
    """The expression of a plain formula or determinant; None for what is more than one."""
    determinant = _DETERMINANT.fullmatch(text)
    if determinant:
        rows = [row.split("&") for row in determinant[2].split("\\\\")]
        return Matrix([[_parse(cell) for cell in row] for row in rows]).det()
    if not _PLAIN.fullmatch(text):
        return None
    found = parse(f"\\boxed{{{text}}}", parsing_timeout=None, fallback_mode="no_fallback")
    return found[0] if found else None


def test_mutants_are_wrong_or_proved_equal() -> None:
    prepare()
    mutants = draw_mutants(_references(), COUNT)
    assert len(mutants) == COUNT
    accepted = [one for one in mutants if compare(one.answer, one.reference).is_correct]
    unproved = [one for one in accepted if not _is_proved(one)]
    assert unproved == [], f"{len(unproved)} of {len(accepted)} accepted mutants are not proved"


@pytest.mark.parametrize("kind", MUTATIONS)
def test_every_kind_of_mutation_changes_many_references(kind: str) -> None:
    changed = [one for one in draw_mutants(_references(), 10**6) if one.kind == kind]
    assert len(changed) >= 50
    assert all(one.answer != one.reference for one in changed)
