"""What is a unit and what a factor, and what units are worth."""

from fractions import Fraction

import pytest

from verification.math.answer import compare
from verification.math.units import read_compound, settle_units, split_unit
from verification.verdict import Verdict


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


@pytest.mark.parametrize(
    ("text", "rest", "factor"),
    [
        ("2\\text{h}30\\text{min}", "5/2", 3600), ("2 h 30 min", "5/2", 3600),
        ("2\\text{hours and}30\\text{minutes}", "5/2", 3600), ("2h30m", "5/2", 3600),
        ("\\text{1 hr. 20 mins}", "4/3", 3600), ("3\\deg 30'", "7/2", 1),
        ("3\\deg 30'36''", "351/100", 1), ("5'6''", "11/2", Fraction(3048, 10_000)),
        ("5 ft 6 in", "11/2", Fraction(3048, 10_000)), ("-1 m 50 cm", "-3/2", 1),
        ("2\\text{days},3\\text{hours and}36\\text{minutes}", "43/20", 86_400),
    ],
)  # fmt: skip
def test_compound_quantities_are_sums(text: str, rest: str, factor: Fraction | int) -> None:
    compound = read_compound(text)
    assert compound is not None
    assert (compound[0], compound[1].factor) == (rest, factor)


@pytest.mark.parametrize(
    "text",
    ["2 h", "2 h 30", "30 min 2 h", "2 h 30 kg", "2 h 3 h", "x h 30 min", "2 m^2 3 cm^2", "5''6'",
     "1 h 2 min 3 s 4 ms 5 ms", "2.5"],
)  # fmt: skip
def test_other_texts_are_no_compound_quantities(text: str) -> None:
    assert read_compound(text) is None


@pytest.mark.parametrize(
    ("first", "second"),
    [("£5", "5\\text{ pounds}"), ("€5", "5€"), ("500¢", "\\$5"), ("5\\text{ GBP}", "\\pounds 5"),
     ("USD 5", "5\\text{ dollars}"), ("\\text{EUR }5", "5\\text{ euros}")],
)  # fmt: skip
def test_currencies_have_many_spellings(first: str, second: str) -> None:
    for pair in ((first, second), (second, first)):
        assert compare(*pair, accept_missing_unit=False).is_correct
    assert not compare(first, "5\\text{ yen}").is_correct


def test_a_ratio_of_units_of_one_kind_is_no_pure_number() -> None:
    assert compare("60\\text{ mi/m}", "60\\text{ mph}") == Verdict(False, "wrong_unit")
