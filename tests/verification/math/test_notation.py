"""Notations, residue classes and bound names, each against what mathematics says."""

from fractions import Fraction

import pytest

from tests.verification.math.trees import parsed
from verification.math.bound_names import (
    is_class,
    same_but_for_constants,
    same_progression,
    with_bound_names,
)
from verification.math.notation import (
    read_congruence,
    respell,
    rows_of_cases,
    same_congruence,
    vector_components,
)
from verification.math.text import normalise


@pytest.mark.parametrize(
    ("text", "spelling"),
    [
        ("{}_5C_2", "\\binom{5}{2}"), ("^5C_2", "\\binom{5}{2}"), ("5 C 2", "\\binom{5}{2}"),
        ("C_5^2", "\\binom{5}{2}"), ("C^2_5", "\\binom{5}{2}"), ("C(n,k)", "\\binom{n}{k}"),
        ("C_1^2", "C_1^2"), ("x^5C_2", "x^5C_2"), ("C_1e^x", "C_1e^x"), ("C(x,y)", "C(x,y)"),
        ("A_5^2", "\\frac{(5)!}{(5-(2))!}"), ("{}_{10}P_3", "\\frac{(10)!}{(10-(3))!}"),
        ("\\begin{cases}x=1,\\\\y=2\\end{cases}", "x=1, y=2"),
        ("\\{\\begin{array}{l}x=1\\\\[4pt]y=2\\end{array}", "x=1, y=2"),
        ("\\begin{cases}1&x>0\\\\0&x<0\\end{cases}", "\\begin{cases}1&x>0\\\\0&x<0\\end{cases}"),
    ],
)  # fmt: skip
def test_notations_get_one_spelling(text: str, spelling: str) -> None:
    assert respell(text, "7") == spelling


def test_a_named_point_is_no_combination_beside_a_pair() -> None:
    assert respell("C(5,2)", "(5,2)") == "C(5,2)"


def test_vectors_have_components() -> None:
    assert vector_components("2 i-3 j") == ("2", "-3")
    assert vector_components("-\\hat{i}+\\frac{1}{2}\\hat{k}") == ("-1", "0", "\\frac{1}{2}")
    assert vector_components("2i") is None
    assert vector_components("ij+k") is None
    assert vector_components("x+1") is None


def test_cases_have_rows_of_columns() -> None:
    text = "\\begin{cases}x,&x>0\\\\[4pt]-x,&\\text{otherwise}\\end{cases}"
    assert rows_of_cases(text) == [["x", "x>0"], ["-x", "\\text{otherwise}"]]
    assert rows_of_cases("\\begin{matrix}1&2\\end{matrix}") is None


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        ("x\\equiv7\\pmod{11}", "18(\\text{mod}11)", True), ("7\\pmod{11}", "7\\pmod{13}", False),
        ("x\\equiv1, 3\\pmod8", "x\\equiv3\\text{or}9\\mod 8", True),
        ("x\\equiv1\\pmod8", "y\\equiv1\\pmod8", False), ("1, 1\\pmod8", "1\\pmod8", False),
        ("\\pm1\\pmod5", "1, 4\\pmod5", True), ("-4(mod 11)", "7\\pmod{11}", True),
    ],
)  # fmt: skip
def test_congruences_are_equal_by_their_classes(first: str, second: str, is_same: bool) -> None:
    one, other = read_congruence(first), read_congruence(second)
    assert one is not None and other is not None
    assert same_congruence(one, other) is is_same
    assert same_congruence(other, one) is is_same


@pytest.mark.parametrize(
    ("text", "residue", "modulus", "is_same"),
    [("11k+7", 7, 11, True), ("11n-4", 7, 11, True), ("7k+11", 7, 11, False),
     ("7-11m", 7, 11, True), ("22k+7", 7, 11, False), ("11k^2+7", 7, 11, False)],
)  # fmt: skip
def test_a_class_may_be_written_as_its_numbers(
    text: str, residue: int, modulus: int, is_same: bool
) -> None:
    assert is_class(parsed(text), Fraction(residue), modulus) is is_same


def test_whole_numbers_are_bound_by_a_condition_or_by_periods() -> None:
    bound = with_bound_names("2k\\pi, k\\in\\integers", "2n\\pi")
    assert bound[0] == bound[1]
    bound = with_bound_names("\\frac{\\pi}{2}+k\\pi", "\\frac{\\pi}{2}+m\\pi")
    assert bound[0] == bound[1]
    bound = with_bound_names("3n+1, n\\in\\naturals", "3k+1, k\\in\\naturals")
    assert bound[0] == bound[1]
    for pair in (("2k", "2n"), ("n\\pi r^2", "k\\pi r^2"), ("\\frac{\\pi}{n}", "\\frac{\\pi}{k}"),
                 ("2k\\pi, k\\in\\integers", "2n\\pi, n\\in\\naturals")):  # fmt: skip
        assert with_bound_names(*pair) == pair


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [("2k\\pi", "-2k\\pi", True), ("k\\pi", "2k\\pi", False), ("k^2\\pi", "k\\pi", None),
     ("\\pi/2+k\\pi", "-\\pi/2+k\\pi", True), ("\\pi/3+2k\\pi", "-\\pi/3+2k\\pi", False)],
)  # fmt: skip
def test_progressions_are_compared_as_sets(first: str, second: str, is_same: bool | None) -> None:
    one, other = (parsed(text.replace("k", "k_\\integers ")) for text in (first, second))
    assert same_progression(one, other) is is_same
    assert same_progression(other, one) is is_same


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [("x^2+C", "x^2+c", True), ("C_1e^x+C_2e^{-x}", "Be^x+Ae^{-x}", True), ("a+b+C", "a+b+c", None),
     ("2C", "2c", None), ("x+2C", "x+2c", None), ("Ce^{2x}", "ce^{2x}", True),
     ("C_1x+C_2x^2", "C_1x+C_2x^3", False), ("\\cos C+x", "\\cos c+x", None)],
)  # fmt: skip
def test_free_constants_may_have_other_names(first: str, second: str, is_same: bool | None) -> None:
    one, other = parsed(first), parsed(second)
    assert same_but_for_constants(one, other) is is_same
    assert same_but_for_constants(other, one) is is_same


@pytest.mark.parametrize(
    ("text", "spelling"),
    [
        ("007", "007"),
        ("-12.50", "-12.50"),
        ("3/4", "3/4"),
        ("-\\frac{10}{4}", "-\\frac{10}{4}"),
        ("4.", "4"),
        ("1/2/3.", "1/2/3"),
        ("\\frac12", "\\frac{1}{2}"),
        ("\uff11\uff12", "12"),
        ("{5}", "5"),
        ("5\n", "5"),
        ("3/4\n", "3/4"),
    ],
)
def test_plain_numbers_are_spelled_already_and_neighbours_are_not(text: str, spelling: str) -> None:
    assert normalise(text) == spelling
