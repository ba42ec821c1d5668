"""Expressions with symbols: where they are compared, and what tells them apart."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.verification.math.trees import is_same, parsed
from verification.math.points import points_of
from verification.math.trees import symbols_of
from verification.math.values import is_constant_ratio, same_value

ROOT = Path(__file__).resolve().parents[3]


def _call(name: str, *texts: str) -> tuple:
    return ("call", name, *map(parsed, texts))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("\\lfloor x\\rfloor", "\\lceil x\\rceil-1"), ("\\lfloor x\\rfloor", "x"),
        ("\\lfloor 2x\\rfloor", "2\\lfloor x\\rfloor"), ("\\lceil x\\rceil", "x+1"),
        ("\\lfloor x+\\frac12\\rfloor", "\\lceil x-\\frac12\\rceil"),
        ("\\lfloor x+y\\rfloor", "\\lfloor x\\rfloor+\\lfloor y\\rfloor"),
        ("\\lfloor\\frac{n}{2}\\rfloor", "\\frac{n}{2}"),
        ("\\lfloor\\frac{n}{2}\\rfloor", "\\frac{n-1}{2}"),
        ("\\lfloor\\frac{n}{7}\\rfloor", "\\frac{n}{7}"),
        ("\\lceil\\frac{n}{5}\\rceil", "\\frac{n+4}{5}"),
        ("\\lfloor\\frac{n}{11}\\rfloor", "\\lceil\\frac{n-9}{11}\\rceil"),
        ("|x|", "x"), ("|x|", "-x"), ("\\sqrt{x^2}", "x"), ("\\sqrt{x^2}", "-x"),
        ("\\sqrt[4]{x^4}", "x"),
        ("\\sqrt{x^2+2x+1}", "x+1"), ("\\sqrt{x^2y^2}", "xy"), ("|x|+|y|", "|x+y|"),
        ("|x-y|", "x-y"),
        ("|x-5|", "|x|-5"), ("|x-1|+|x+1|", "2|x|"), ("|x-2000|", "2000-x"), ("|3x-7|", "7-3x"),
        ("\\frac{|x|}{x}", "1"), ("|a-b|", "b-a"), ("\\sqrt{n^2}", "n"), ("|n-40|", "40-n"),
        ("(-1)^n", "1"), ("(-1)^n", "-1"), ("(-1)^n", "(-1)^{n+1}"), ("i^n", "1"), ("i^{2n}", "1"),
        ("\\cos(n\\pi)", "1"), ("\\sin\\frac{n\\pi}{2}", "0"), ("\\cos\\frac{2n\\pi}{3}", "1"),
        ("\\sin(\\pi k+x)", "\\sin x"), ("\\tan\\frac{\\pi k}{7}", "0"), ("2^{|n|}", "2^n"),
        ("\\frac{1-(-1)^n}{2}", "1"), ("\\binom{n}{2}", "\\frac{n(n+1)}{2}"),
        ("n!", "n(n-1)(n-2)!+1"),
        ("\\sqrt{x-1000}", "\\sqrt{x-1001}"), ("\\ln(x-50)", "\\ln(x-51)"), ("x+10^{-99}", "x"),
        ("\\arctan x+\\arctan\\frac1x", "\\frac\\pi2"), ("e^{x^2}", "e^{x^2}+10^{-300}"),
        ("x^y", "y^x"), ("\\sqrt{a^2+b^2}", "a+b"), ("\\log_x y", "\\log_y x"),
        ("x^{99}", "x^{98}"),
    ],
)  # fmt: skip
def test_expressions_that_differ_somewhere_are_different(first: str, second: str) -> None:
    assert is_same(first, second) is False


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("\\lfloor -x\\rfloor", "-\\lceil x\\rceil"),
        ("\\lfloor x+1\\rfloor", "\\lfloor x\\rfloor+1"),
        ("\\lfloor 2x\\rfloor", "\\lfloor x\\rfloor+\\lfloor x+\\frac12\\rfloor"),
        ("\\lfloor\\frac{n}{2}\\rfloor", "\\frac{2n-1+(-1)^n}{4}"),
        ("\\lfloor\\frac{n}{2}\\rfloor+\\lceil\\frac{n}{2}\\rceil", "n"),
        ("\\lfloor\\frac{n+2}{3}\\rfloor", "\\lceil\\frac{n}{3}\\rceil"),
        ("\\sqrt{x^2}", "|x|"), ("|x|^2", "x^2"), ("|xy|", "|x||y|"), ("|x-y|", "|y-x|"),
        ("\\sqrt{x^2+2x+1}", "|x+1|"), ("\\sqrt[3]{x^3}", "x"), ("x^{1/3}", "\\sqrt[3]{x}"),
        ("(-1)^n", "\\cos(n\\pi)"), ("(-1)^{n+1}", "(-1)^{n-1}"), ("i^{4n}", "1"),
        ("\\sin(n\\pi)", "0"),
        ("\\sin(2\\pi k+x)", "\\sin x"), ("\\cos\\frac{2n\\pi}{3}", "\\cos\\frac{4n\\pi}{3}"),
        ("n!", "n(n-1)!"), ("\\binom{n}{2}", "\\frac{n(n-1)}{2}"),
        ("\\binom{n}{k}", "\\binom{n}{n-k}"),
        ("4^n", "2^{2n}"), ("\\sqrt{x-1000}", "(x-1000)^{1/2}"),
        ("\\sqrt{x-10}+\\sqrt{12-x}", "\\sqrt{12-x}+(x-10)^{1/2}"),
        ("\\sqrt{5-x}\\sqrt{x-4}", "\\sqrt{(5-x)(x-4)}"),
        ("\\sqrt{s(s-a)(s-b)(s-c)}", "\\sqrt{(s-c)(s-b)(s-a)s}"), ("x^y", "e^{y\\ln x}"),
        ("a^{\\log_a b}", "b"), ("\\arcsin x+\\arccos x", "\\frac\\pi2"),
        ("\\cos(\\arcsin x)", "\\sqrt{1-x^2}"),
        ("(x+y+z)^{400}", "(x+y+z)^{399}(x+y+z)"), ("\\ln\\ln\\ln x", "\\ln(\\ln(\\ln x))"),
        # Equal wherever both have real values: a teacher accepts the one for the other.
        ("\\frac{x}{x}", "1"), ("\\frac{x^2-1}{x-1}", "x+1"), ("\\ln x^2", "2\\ln x"),
        ("e^{\\ln x}", "x"),
        ("\\sqrt x\\sqrt x", "x"), ("\\sqrt{x-1}\\sqrt{x+1}", "\\sqrt{x^2-1}"),
        ("\\ln|x|", "\\ln x"),
        # Real nowhere.
        ("\\sqrt{-x^2-1}", "i\\sqrt{x^2+1}"),
    ],
)  # fmt: skip
def test_expressions_that_agree_everywhere_are_equal(first: str, second: str) -> None:
    assert is_same(first, second) is True


@pytest.mark.parametrize(
    ("first", "second", "is_right"),
    [
        (_call("mod", "n", "2"), "\\frac{1-(-1)^n}{2}", True), (_call("mod", "n", "2"), "1", False),
        (_call("mod", "n", "6"), "n-6\\lfloor\\frac{n}{6}\\rfloor", True),
        (_call("mod", "n", "6"), "n-6\\lceil\\frac{n}{6}\\rceil", False),
        (_call("mod", "x", "1"), "x-\\lfloor x\\rfloor", True),
        (_call("mod", "x", "1"), "x", False),
        (_call("max", "x", "y"), "\\frac{x+y+|x-y|}{2}", True),
        (_call("max", "x", "y"), "x", False),
        (_call("max", "x", "y"), "\\frac{x+y-|x-y|}{2}", False),
        (_call("max", "x", "0"), "x", False),
        (_call("min", "x", "y"), "\\frac{x+y-|x-y|}{2}", True),
        (_call("min", "x", "y"), "y", False),
        (_call("sign", "x"), "\\frac{|x|}{x}", True), (_call("sign", "x"), "1", False),
        (_call("gcd", "n", "6"), "1", False), (_call("gcd", "n", "n+1"), "1", True),
        (_call("gcd", "n", "n+2"), "1", False), (_call("lcm", "n", "n+1"), "|n(n+1)|", True),
        (_call("lcm", "n", "n+2"), "|n(n+2)|", False), (_call("perm", "n", "2"), "n(n-1)", True),
        (_call("perm", "n", "2"), "n^2", False),
    ],
)  # fmt: skip
def test_steps_and_extremes_are_compared_on_both_sides(
    first: tuple, second: str, is_right: bool
) -> None:
    other = parsed(second)
    assert same_value(first, other) is is_right
    assert same_value(other, first) is is_right


def test_points_depend_on_both_expressions_and_on_nothing_else() -> None:
    first, second, third = map(parsed, ("\\sqrt{x}+y", "y+\\sqrt{x}", "y+\\sqrt{x}+0"))
    count, drawn = points_of(first, second, ["x", "y"])
    points = [*drawn]
    assert len(points) > count
    assert [*points_of(second, first, ["x", "y"])[1]] == points
    others = [*points_of(first, third, ["x", "y"])[1]]
    common = {point["x"] for point in points} & {point["x"] for point in others}
    assert len(common) < 0.1 * len(points)
    program = (
        "from verification.math.expression import parse_expression as p;"
        "from verification.math.points import points_of;"
        "print([*points_of(p('\\\\sqrt{x}+y'), p('y+\\\\sqrt{x}'), ['x', 'y'])[1]])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=200,
        env=os.environ | {"PYTHONHASHSEED": "7"},
    )  # fmt: skip
    assert done.stdout.strip() == str(points), done.stderr


def test_whole_names_take_every_small_number_and_large_ones_of_both_signs() -> None:
    tree = parsed("\\lfloor\\frac{n}{2}\\rfloor")
    count, points = points_of(tree, ("num", 0), ["n"])
    values = {point["n"] for point, _ in zip(points, range(count), strict=False)}
    assert {value.denominator for value in values} == {1}
    for modulus in range(2, 13):
        assert {value % modulus for value in values} == {*range(modulus)}
    assert min(values) < -(1 << 30) and max(values) > 1 << 30


def test_a_product_that_vanishes_at_points_of_another_pair_is_not_zero() -> None:
    count, points = points_of(parsed("x"), parsed("0"), ["x"])
    roots = [next(points)["x"] for _ in range(count)]
    factors = "".join(f"(x-({root.numerator}/{root.denominator}))" for root in roots)
    assert is_same(factors, "0") is False
    assert is_same(f"x+{factors}", "x") is False


def test_equations_need_one_factor_everywhere() -> None:
    def ratio(first: str, second: str) -> bool | None:
        return is_constant_ratio(parsed(first), parsed(second))

    assert ratio("2x-4y", "2y-x") is True
    assert ratio("x-y", "x^2-y^2") is False
    assert ratio("|x|-y", "x-y") is False
    assert ratio("x-y-10^{-90}", "x-y") is False
    assert ratio("\\lfloor x\\rfloor-y", "x-y") is False
    assert ratio("\\sqrt2x-2y", "x-\\sqrt2y") is True
    assert all(symbols_of(("sym", name)) for name in "xy")


def test_ordinary_expressions_are_compared_in_a_few_milliseconds() -> None:
    pairs = [
        ("\\frac{x^2-1}{x-1}", "x+1"), ("\\sqrt{x^2+y^2}", "\\sqrt{y^2+x^2}"),
        ("\\sin2x", "2\\sin x\\cos x"), ("\\lfloor\\frac n2\\rfloor", "\\frac{2n-1+(-1)^n}4"),
        ("\\ln\\frac{x}{y}", "\\ln x-\\ln y"), ("e^{x+y}", "e^xe^y"),
    ]  # fmt: skip
    for first, second in pairs:
        start = time.process_time()
        assert is_same(first, second) is True
        # Both ways round: about 10 ms for the slowest.
        assert time.process_time() - start < 0.15
