"""What stands beside a value: names, left-hand sides, chains, roundings."""

import pytest

from verification.math.labels import (
    Assignment,
    contradicts_itself,
    read_assignment,
    same_name,
    settle_approximation,
)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("x=5", "x", "5"), ("5=x", "x", "5"), ("n=2^{10}=1024", "n", "1024"), ("a+b=7", "a+b", "7"),
        ("7=a+b", "a+b", "7"), ("\\cos A=0.5", "\\cos A", "0.5"), ("2+5=7", "", "7"),
        ("f(2)=5", "f(2)", "5"), ("P(X=2)=0.5", "P(X=2)", "0.5"), ("f(x)=2x", "f(x)", "2x"),
        ("\\lim_{x\\to\\infty}f=1", "\\lim_{x\\to\\infty}f", "1"), ("A=B=5", "A=B", "5"),
    ],
)  # fmt: skip
def test_left_hand_sides_name_their_value(text: str, name: str, value: str) -> None:
    assert read_assignment(text) == Assignment(name, value)


@pytest.mark.parametrize(
    "text",
    ["x+y=7", "2x=7", "x^2+y^2=25", "|x|=3", "x(x+1)=6", "a+b=2c", "f(2x)=x+1", "x=6=5", "2+5=8",
     "x<5", "\\text{not }6=5", "6,x=5", "\\ln x=2"],
)  # fmt: skip
def test_equations_that_may_be_answers_themselves_name_no_value(text: str) -> None:
    assert read_assignment(text) is None


@pytest.mark.parametrize(
    "text",
    ["x=6=5", "2+5=8", "5\\approx6", "\\pi\\approx3.41", "x=5\\approx6", "n=2^{11}=1024", "5=x=6",
     "\\frac{2}{3}\\approx0.76", "A=bh=3*4=13=12", "7\\approx100", "f(x)=x+1=x+2", "1\\approx-1"],
)  # fmt: skip
def test_two_values_for_one_thing_contradict_each_other(text: str) -> None:
    assert contradicts_itself(text)


@pytest.mark.parametrize(
    "text",
    ["x=6=5+1", "\\pi\\approx3.14", "\\frac{2}{3}\\approx0.66", "\\frac{2}{3}\\approx66.7%",
     "1234567\\approx1.23*10^6", "99.6\\approx100", "y=2x", "x+y=3", "A=\\pi r^2=9\\pi", "x=1,y=2"],
)  # fmt: skip
def test_one_value_in_several_forms_is_no_contradiction(text: str) -> None:
    assert not contradicts_itself(text)


def test_the_exact_side_of_a_rounding_counts() -> None:
    assert settle_approximation("\\sqrt{2}\\approx1.41") == "\\sqrt{2}"
    assert settle_approximation("x=\\sqrt{2}\\approx1.41") == "x=\\sqrt{2}"
    assert settle_approximation("x\\approx1.41") == "x=1.41"


def test_names_are_compared_by_what_they_name() -> None:
    assert same_name("AB", "BA")
    assert same_name("m\\angle ABC", "\\angle CBA")
    assert same_name("\\text{The area}", "\\text{area}")
    assert same_name("\\text{Area}", "A")
    assert not same_name("AB", "AC")
    assert not same_name("\\text{area}", "\\text{perimeter}")
    assert not same_name("a_1", "a_2")
