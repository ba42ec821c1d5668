"""Inequalities against the intervals where they hold, found by hand."""

import time

import pytest

from tests.verification.math.trees import parsed, region_of
from verification.math.inequalities import is_positive_multiple, solution
from verification.math.regions import same_region


@pytest.mark.parametrize(
    ("text", "intervals"),
    [
        ("x^2<1", "(-1,1)"),
        ("x^2\\le2", "[-\\sqrt{2},\\sqrt{2}]"),
        ("2x+1>5", "(2,\\infty)"),
        ("(x-1)^2(x-3)\\ge0", "\\{1\\}\\cup[3,\\infty)"),
        ("(x-1)^2>0", "x\\ne1"),
        ("x^2+1<0", "\\emptyset"),
        ("\\frac{x+2}{x-2}\\le0", "[-2,2)"),
        ("\\frac{1}{x}<1", "(-\\infty,0)\\cup(1,\\infty)"),
        ("\\frac{x^2-1}{x-1}>0", "(-1,1)\\cup(1,\\infty)"),
        ("|2x-1|<3", "(-1,2)"),
        ("|x-1|+|x+1|\\le4", "[-2,2]"),
        ("|x|>|x-2|", "(1,\\infty)"),
        ("x>x^2", "(0,1)"),
        ("1<2x+1\\le5", "(0,2]"),
        ("x^3-x\\ge0", "[-1,0]\\cup[1,\\infty)"),
        ("\\pi x<\\pi^2", "(-\\infty,\\pi)"),
        ("x^2-2x-1\\le0", "[1-\\sqrt{2},1+\\sqrt{2}]"),
        ("x^{-2}\\ge0", "x\\ne0"),
        ("4>x^2", "(-2,2)"),
    ],
)
def test_inequalities_hold_where_algebra_says(text: str, intervals: str) -> None:
    assert same_region(region_of(text), region_of(intervals)) is True


@pytest.mark.parametrize(
    ("text", "intervals"),
    [
        ("x^2<1", "[-1,1]"),
        ("x^2>1", "(-1,1)"),
        ("\\frac{x+2}{x-2}\\le0", "[-2,2]"),
        ("x^2<1", "-1<y<1"),
        ("x^2<1.0001", "(-1,1)"),
        ("(x-1)^2\\ge0", "x\\ne1"),
    ],
)
def test_near_misses_of_inequalities_differ(text: str, intervals: str) -> None:
    assert same_region(region_of(text), region_of(intervals)) is False


@pytest.mark.parametrize(
    "text", ["\\sin x", "2x-10^{400}", "x^{11}", "x+y", "\\sqrt{x}-2", "2^x-8", "7"]
)
def test_other_functions_are_left_open(text: str) -> None:
    assert solution(parsed(text), "<") is None


def test_high_degrees_take_little_time() -> None:
    tree = parsed("(x-1)(x-2)^3(x-\\frac{1}{3})^2(x^2-3)(x+\\frac{7}{11})^2")
    start = time.process_time()
    pieces = solution(tree, ">=")
    assert time.process_time() - start < 1
    assert pieces is not None
    # [-inf,-sqrt3], -7/11, 1/3, [1,sqrt3], [2,inf]: four ends and two lone points
    assert len([piece for piece in pieces if piece[2]]) == 6


def test_inequalities_in_two_variables_keep_their_direction() -> None:
    first, second, third = map(parsed, ("1-x-y", "2-2x-2y", "x+y-1"))
    assert is_positive_multiple(first, second) is True
    assert is_positive_multiple(first, third) is False
