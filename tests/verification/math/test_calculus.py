"""Texts beyond the grammar of expressions: read to their last character, or not at all."""

import pytest

from verification.math.answer import compare, compute
from verification.math.calculus import same_calculus
from verification.math.text import normalise
from verification.verdict import CORRECT, WRONG, Verdict

UNDECIDED = Verdict(False, "undecided")
VECTOR = "\\begin{pmatrix}1\\\\2\\end{pmatrix}"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("\\int_0^1 x\\,dx", "\\frac12"), ("\\int_1^2\\frac{dx}{x}", "\\ln2"),
        ("\\int^1_0\\frac{x\\,dx}{1+x^2}", "\\frac{\\ln2}{2}"),
        ("\\int_0^\\infty e^{-x^2}dx", "\\frac{\\sqrt\\pi}{2}"),
        ("\\int_0^{\\pi}\\sin x\\,dx+1", "3"),
        ("2\\int_0^1(x+1)dx", "3"), ("\\int_0^1\\int_0^2xy\\,dx\\,dy", "1"),
        ("\\int_0^{2\\pi}\\cos^2\\theta\\,d\\theta", "\\pi"), ("\\int_0^1\\ln x\\,dx", "-1"),
        ("\\int_{-1}^{1}|x|\\,dx", "1"), ("\\int_0^a x^2dx", "\\frac{a^3}{3}"),
        ("\\int_0^\\infty e^{-ax}dx", "\\frac1a"), ("\\int_0^1\\sqrt{1-x^2}\\,dx", "\\frac\\pi4"),
        ("\\int_0^1 x\\,dx", "\\int_0^1 t\\,dt"), ("\\sum_{n=1}^3 n", "6"),
        ("\\sum_{k=1}^nk", "\\frac{n(n+1)}{2}"),
        ("\\sum_{i=1}^{n}i^2", "\\frac{n(n+1)(2n+1)}{6}"),
        ("\\sum_{k=1}^n k+1", "\\frac{n^2+n+2}{2}"),
        ("\\sum_{k=1}^{10}\\lfloor\\frac k3\\rfloor", "15"), ("\\sum_{k=1}^{1000}k", "500500"),
        ("\\sum_{k=1}^\\infty\\frac1{k^2}", "\\frac{\\pi^2}{6}"),
        ("\\sum_{k=0}^\\infty 2^{-k}", "2"),
        ("\\prod_{k=1}^5k", "120"), ("\\prod_{k=2}^{100}(1-\\frac1{k^2})", "\\frac{101}{200}"),
        ("\\lim_{x\\to0}\\frac{\\sin x}{x}", "1"), ("\\lim_{n\\to\\infty}(1+\\frac1n)^n", "e"),
        ("\\lim_{x\\to0^+}\\ln x", "-\\infty"), ("\\lim_{x\\to2}x^2+1", "5"),
        ("\\frac{d}{dx}x^3", "3x^2"), ("\\frac{d^2}{dx^2}\\sin x", "-\\sin x"),
        ("\\frac{\\partial}{\\partial x}(x^2y)", "2xy"), ("n2^{n-1}", "n\\cdot2^{n-1}"),
    ],
)  # fmt: skip
def test_operations_have_their_values(text: str, value: str) -> None:
    assert compare(text, value) == CORRECT
    assert compare(value, text) == CORRECT


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("\\int_0^1 x\\,dx", "\\frac13"), ("\\int_1^2\\frac{dx}{x}", "\\ln2+10^{-40}"),
        ("\\int_0^1x^2dx", "\\int_0^1y\\,dy"), ("\\int_0^2x\\,dx", "\\int_0^1x\\,dx"),
        ("\\sum_{k=1}^nk", "\\frac{n(n-1)}{2}"), ("\\sum_{k=0}^3 2^k", "16"),
        ("\\sum_{n=1}^3n", "7"),
        ("\\sum_{k=1}^\\infty\\frac1{k^2}", "\\frac{\\pi^2}{6}+10^{-40}"),
        ("\\sum_{k=1}^\\infty\\frac1{k^2}", "1.6449340668482264364724151666460251892"),
        ("\\prod_{k=1}^5k", "24"), ("\\lim_{x\\to0}\\frac{\\sin x}{x}", "0"),
        ("\\frac{d}{dx}x^3", "x^2"), ("\\frac{d}{dx}x^2", "x"), ("n2^{n-1}", "n2^{n+1}"),
    ],
)  # fmt: skip
def test_operations_have_no_other_value(text: str, value: str) -> None:
    assert compare(text, value) == WRONG
    assert compare(value, text) == WRONG


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("2" + VECTOR, VECTOR), ("\\sqrt2" + VECTOR, "\\sqrt2"), (VECTOR + "\\text{ m}", VECTOR),
        ("101_2+1_2", "102"), ("101_2+\\int_0^1dx", "102"), ("5\\boxed{6}", "6"),
        ("\\begin{cases}1&x>0\\\\2&x<0\\end{cases}", "1"), ("\\int x\\,dx", "\\frac{x^2}{2}"),
        ("\\int x\\,dx+7", "\\frac{x^2}{2}"),
        ("\\text{about }\\int_0^1dx", "1"),
        ("\\int_0^1dx\\text{ or so}", "1"), ("\\int_0^1dx,\\;2", "1"), ("\\int_0^1 dx=2", "1"),
        ("\\frac{d}{dx}x^2+1", "2x+1"), ("\\frac{d}{dx}x^2+1", "2x"), ("\\sum_{k=1}^3k;7", "6"),
        ("\\int_0^1dx\\begin{cases}1\\\\2\\end{cases}", "1"), ("\\int_0^1 x", "1"),
        ("\\oint_0^1dx", "1"),
        ("\\sum_{1\\le k\\le3}k", "6"), ("\\lim x", "x"), ("\\int_0^1dx\\,f(3)", "f(3)"),
        ("5\\bmod", "5"), ("\\max_x5", "5"), ("x^2|_0^1", "1"), ("1+\\sum_{k=1}^{2}", "1"),
    ],
)  # fmt: skip
def test_a_text_that_is_not_read_whole_is_never_compared_by_a_part(
    text: str, fragment: str
) -> None:
    assert not compare(text, fragment).is_correct
    assert not compare(fragment, text).is_correct


@pytest.mark.parametrize(
    "text",
    ["\\int_0^1e^{\\sin x}dx", "\\sum_{k=1}^\\infty\\frac{1}{k^3+k!}",
     "\\lim_{x\\to0}\\frac1x", "\\prod_{k=1}^{\\infty}k", "\\int_0^{", "\\int\\sum\\prod",
     "\\lim_{", "\\int_0^1" * 5 + "dx"],
)  # fmt: skip
def test_what_has_no_value_is_undecided(text: str) -> None:
    assert same_calculus(normalise(text), "1") is None
    assert compare(text, "1") == compare("1", text) == UNDECIDED


def test_numbers_that_agree_too_far_are_undecided() -> None:
    assert compute("1+e^{-9*999^2}", "1") == compute("1", "1+e^{-9*999^2}") == UNDECIDED
    assert compare("e^{-9999}", "0") == WRONG


def test_a_unit_behind_an_operation_counts() -> None:
    area = "\\int_0^1x\\,dx\\text{ cm}"
    assert compare(area, "0.5\\text{ cm}") == CORRECT
    assert compare(area, "0.5") == CORRECT
    assert not compare(area, "0.5", accept_missing_unit=False).is_correct
    assert not compare(area, "0.5\\text{ m}").is_correct
