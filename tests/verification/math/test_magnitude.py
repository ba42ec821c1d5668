"""Which texts ask for numbers too long to write out; each judged by hand from its size."""

import pytest

from verification.math.magnitude import is_explosive
from verification.math.text import normalise


@pytest.mark.parametrize(
    "text",
    [
        "(x^2+1)^2", "\\sqrt{a^2+b^2}", "(a^2+b^2)^{1/2}", "(2^{10})^2", "(1+x^2)^{-1/2}",
        "x^{2^3}", "((x^2)^2)^2", "10^{10^2}", "2^{2^{2^2}}", "(-1)^{100001}", "1^{999999}",
        "7^{12345}", "\\binom{1000000}{2}", "\\frac{2024!}{2022!}", "(2n)!!", "n!!", "5!!",
        "2^{2^n}", "e^{-0.00012t}", "2^{\\log_2 100000}", "x_{100000}", "2^{-0.00001}",
        "(10^{-6})^{100}", "x^{n^2}", "e^{e^{e}}", "(x^{100})^{100}", "2^{100000-99990+x}",
        "10^{(10^6)/(10^5)}", "1011_{10000}", "(3!)!", "123456789", "3e8", "\\sin^{100000}x",
        "i^{100002}", "(x+y)^{2^{10}}", "1,000,000^{10}",
    ],
)  # fmt: skip
def test_ordinary_powers_are_not_explosive(text: str) -> None:
    assert not is_explosive(normalise(text))


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^9}", "9^9^9^9", "((9^{99})^{99})^{99}", "2^{100000}", "3^{10^5}", "1e400000",
        "100000!", "9!!", "(9!)!", "10!^{10!}", "2^{-100000}", "(2^{1000})^{1000}",
        "\\left(\\frac{1}{2}\\right)^{100000}", "\\binom{10^{9}}{10^{6}}", "((10!)!)!",
        "e^{10^{10}}", "3**3**3**3", "9^{9!}", "(3/2)^{200000}", "(1+10^{-9})^{10^9}",
        "(x+1)^{99999}", "x^{x^{9}}+9^{9^{9}}", "\\{9^{9^9}, 1\\}", "(9^{9^9}", "9^{{{9^{9}}}}",
        "100^{99999.5}", "2^{1e6}", "\\sqrt{2^{300000}}", "2^{(100000)}", "\\frac{9^{99999}}{7}",
    ],
)  # fmt: skip
def test_towers_and_huge_exponents_are_explosive(text: str) -> None:
    assert is_explosive(normalise(text))
