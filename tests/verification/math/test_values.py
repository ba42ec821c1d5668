"""Values of expressions: numbers that are huge, tiny or close, and what cannot be decided."""

import time

import pytest

from tests.verification.math.trees import is_same, parsed
from verification.math.answer import compare
from verification.math.values import real_value
from verification.verdict import CORRECT


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("10^{2024}-1", "10^{2024}"), ("2^{1000}+1", "2^{1000}"), ("2^{9999}+1", "2^{9999}"),
        ("5^{-2024}", "0"), ("e^{-9999}", "0"), ("1-7^{-3000}", "1"), ("(\\sqrt2-1)^{900}", "0"),
        ("100!+1", "100!"), ("1000!", "1000!-1"), ("\\binom{300}{150}", "\\binom{300}{150}+1"),
        ("\\sqrt{10^{40}+1}", "10^{20}"), ("\\sqrt{10^{600}+1}", "10^{300}"),
        ("\\sqrt[3]{10^{900}+1}", "10^{300}"), ("e^{\\pi\\sqrt{163}}", "262537412640768744"),
        # Agree in 30, 52 and 500 digits.
        ("\\frac{\\ln(640320^3+744)}{\\sqrt{163}}", "\\pi"),
        ("\\frac{\\ln(5280^3(236674+30303\\sqrt{61})^3+744)}{\\sqrt{427}}", "\\pi"),
        ("(\\sqrt2+1)^{1306}+(\\sqrt2-1)^{1306}", "(\\sqrt2+1)^{1306}"),
        ("\\cos(10^{-500})", "1"), ("\\cos(10^{-500})", "1-\\frac{10^{-1000}}{2}"),
        ("\\ln(1+10^{-300})", "10^{-300}"), ("\\sin(10^{-200})", "10^{-200}"),
        ("\\tan(\\sin 10^{-99})", "\\sin(\\tan 10^{-99})"), ("\\log_{10}(10^{300}+1)", "300"),
        ("1+e^{-10000}", "1"),
        ("\\cos(10^{-300})\\cosh(10^{-300})", "1"), ("\\tanh500", "1"), ("\\coth5000", "1"),
        ("\\sinh900", "\\cosh900"),
        ("\\pi+10^{-999}", "\\pi"), ("10^{2024}\\pi-\\pi", "10^{2024}\\pi"),
        ("0." + "9" * 390, "1"), ("\\sin(10^{390})", "\\sin(10^{390}+1)"),
        # Sums of roots that agree in 16 and 20 digits.
        ("\\sqrt{10}+\\sqrt{11}", "\\sqrt{5}+\\sqrt{18}"),
        ("\\sqrt{1000001}+\\sqrt{1000025}+\\sqrt{1000031}+\\sqrt{1000084}+\\sqrt{1000087}"
         "+\\sqrt{1000134}+\\sqrt{1000158}+\\sqrt{1000182}+\\sqrt{1000198}",
         "\\sqrt{1000002}+\\sqrt{1000018}+\\sqrt{1000042}+\\sqrt{1000066}+\\sqrt{1000113}"
         "+\\sqrt{1000116}+\\sqrt{1000169}+\\sqrt{1000175}+\\sqrt{1000199}"),
        ("\\lfloor e^{\\pi\\sqrt{163}}\\rfloor", "262537412640768744"),
        ("\\lfloor\\sqrt{10^{40}-1}\\rfloor", "10^{20}"), ("\\lceil 1+5^{-900}\\rceil", "1"),
    ],
)  # fmt: skip
def test_close_numbers_are_different(first: str, second: str) -> None:
    assert is_same(first, second) is False


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("2^{9999}*2^{-9999}", "1"), ("\\frac{10^{2024}-1}{9}*9+1", "10^{2024}"),
        ("\\frac{100!}{98!}", "9900"), ("1000!", "1000*999!"),
        ("0." + "9" * 50 + "+10^{-50}", "1"),
        ("\\sqrt{2}+\\sqrt{3}", "\\sqrt{5+2\\sqrt{6}}"), ("\\sqrt{10^{2000}}", "10^{1000}"),
        ("\\sqrt[3]{2+\\sqrt5}+\\sqrt[3]{2-\\sqrt5}", "1"),
        ("(1+\\sqrt2)^{20}(\\sqrt2-1)^{20}", "1"),
        ("\\sqrt{2+\\sqrt{2+\\sqrt2}}", "2\\cos\\frac{\\pi}{16}"),
        ("\\cos\\frac{\\pi}{7}-\\cos\\frac{2\\pi}{7}+\\cos\\frac{3\\pi}{7}", "\\frac12"),
        ("\\frac{\\sqrt5-1}{4}", "\\sin\\frac{\\pi}{10}"), ("\\sin(10^{99}\\pi)", "0"),
        ("4\\arctan\\frac15-\\arctan\\frac1{239}", "\\frac\\pi4"), ("\\ln 8", "3\\ln 2"),
        ("\\log_4 8", "\\frac32"), ("\\frac{\\ln10^{500}}{\\ln10}", "500"), ("e^{3\\ln2}", "8"),
        ("e^{-9999}", "\\frac{1}{e^{9999}}"), ("\\tanh(\\ln3)", "\\frac45"),
        ("\\cosh(\\ln 2)", "\\frac54"), ("e^{i\\pi}", "-1"),
        ("\\sqrt{-4}", "2i"), ("(1+i)^8", "16"),
        ("\\sqrt i", "\\frac{1+i}{\\sqrt2}"), ("\\ln(-1)", "i\\pi"),
        ("\\arcsin(2\\sin\\frac\\pi6)", "\\frac\\pi2"),
        # The jump of floor lies exactly there.
        ("\\lfloor\\sqrt2\\sqrt2\\rfloor", "2"), ("\\lfloor\\frac{\\ln8}{\\ln2}\\rfloor", "3"),
        ("\\lceil 2\\sin\\frac\\pi6\\rceil", "1"), ("\\lfloor\\log_{10}10^{300}\\rfloor", "300"),
        ("\\lfloor\\sqrt{10^{40}-1}\\rfloor", "10^{20}-1"),
        # Too large to compute, and the same but for the order.
        ("9^{9^{9^9}}+1", "1+9^{9^{9^9}}"),
    ],
)  # fmt: skip
def test_equal_numbers_are_equal(first: str, second: str) -> None:
    assert is_same(first, second) is True


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("1+e^{-1000000}", "1"), ("10^{-9999}+\\pi-10^{-9999}\\pi^{10^{-5}}", "\\pi"),
        ("e^{e^{e^{5}}}+1", "e^{e^{e^{5}}}"), ("9^{9^{9^9}}", "9^{9^{9^9}}+1"),
    ],
)  # fmt: skip
def test_numbers_that_agree_as_far_as_they_can_be_computed_are_never_equal(
    first: str, second: str
) -> None:
    assert is_same(first, second) is not True


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("(0,10^{-40})", "(0,10^{-50})"), ("(0,10^{50})", "(0,10^{50}+1)"),
        ("\\{10^{2024}\\}", "\\{10^{2024}-1\\}"), ("x<\\sqrt{10^{80}+1}", "x<10^{40}"),
        ("x=10^{2024}", "10^{2024}+1"), ("(5^{-2024},1)", "(0,1)"),
        ("|x|<10^{-60}", "|x|<10^{-61}"),
        ("\\begin{pmatrix}10^{2024}&1\\end{pmatrix}",
         "\\begin{pmatrix}10^{2024}+1&1\\end{pmatrix}"),
        ("x+10^{-50}=y", "x=y"), ("10^{60}x+y=1", "10^{60}x+y=2"),
    ],
)  # fmt: skip
def test_close_numbers_within_structures_are_different(answer: str, reference: str) -> None:
    assert not compare(answer, reference).is_correct
    assert not compare(reference, answer).is_correct
    assert compare(answer, answer) == CORRECT


def test_real_values_are_ordered_exactly() -> None:
    spelled = ["-10^{400}", "0", "5^{-2024}", "4^{-2024}", "1-9^{-500}", "1", "e^{\\pi\\sqrt{163}}"]
    values = [real_value(parsed(text)) for text in spelled]
    assert sorted(values[::-1]) == values
    assert len(set(map(id, values))) == len(values)
    assert values[3] > values[2]
    assert not values[2] == values[1]


@pytest.mark.parametrize(
    "text",
    ["9^{999}*" * 80 + "2", "500!*" * 100 + "\\pi", "\\sqrt{7^{9999}}" * 50, "\\pi^{9999}" * 80,
     "(\\pi+10^{9999})" * 60, "\\sin(10^{390}\\pi)+" * 50 + "1", "\\ln(10^{9999})" * 60,
     "\\lfloor\\pi*10^{399}\\rfloor" * 30, "\\frac{1}{3^{9999}+" * 28 + "1" + "}" * 28,
     "\\sqrt{2+" * 28 + "2" + "}" * 28, "\\arctan(" * 28 + "2^{9999}" + ")" * 28,
     "\\binom{5000}{2500}" * 50, "\\tan(" * 28 + "10^{-9999}" + ")" * 28],
)  # fmt: skip
def test_large_numbers_take_bounded_time(text: str) -> None:
    start = time.process_time()
    result = is_same(text, text + "+1")
    assert time.process_time() - start < 4
    assert result is not True
