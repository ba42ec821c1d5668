"""What is a unit and what a factor, and what units are worth."""

import pytest

from verification.math.answer import compare
from verification.math.units import settle_units, split_unit


@pytest.mark.parametrize(
    "text",
    [
        "\\pi r^2 h", "2x^2 m", "\\frac{1}{2}m v^2", "5 L^2 h", "2 m g", "2mg", "2nm", "mgh", "3xh",
        "6\\pi h", "(a+b) h", "2^n m", "v_0 t", "5m", "\\sqrt{2 g h}", "a m", "x^2 cm", "\\reals",
        "n! m", "\\frac{5 m}{2}",
    ],
)  # fmt: skip
def test_letters_behind_symbols_are_factors(text: str) -> None:
    assert split_unit(text) == (text, None)


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("5 m", "5"), ("-2.5 h", "-2.5"), ("9.8 m/s^2", "9.8"), ("10^3 m", "10^3"),
        ("6\\pi cm", "6\\pi"), ("12cm^2", "12"), ("2\\sqrt{3}cm", "2\\sqrt{3}"),
        ("x\\text{m}", "x"), ("\\frac{5}{2}\\text{m}", "\\frac{5}{2}"),
    ],
)  # fmt: skip
def test_units_behind_numbers_are_units(text: str, rest: str) -> None:
    assert split_unit(text)[0] == rest
    assert split_unit(text)[1] is not None


def test_the_other_text_tells_a_unit_from_a_factor() -> None:
    assert settle_units("5m", "300\\text{cm}") == ("5\\text{m}", "300\\text{cm}")
    assert settle_units("5 m", "2m+3m") == ("5*m", "2m+3m")
    assert settle_units("5m", "5") == ("5m", "5")
    assert settle_units("\\pi r^2 h", "\\pi r^2") == ("\\pi r^2 h", "\\pi r^2")


@pytest.mark.parametrize(
    ("first", "second"),
    [("12\\text{ kg m/s}^2", "12\\text{ N}"), ("6\\text{ N m}", "6\\text{ J}"),
     ("3\\text{ W}", "3\\text{ J/s}"), ("2\\text{ kPa}", "2000\\text{ N/m}^2")],
)  # fmt: skip
def test_derived_units_convert(first: str, second: str) -> None:
    assert compare(first, second).is_correct
    assert compare(second, first).is_correct
