"""The modules behind math_answer, each against values known independently."""

from fractions import Fraction

import pytest

from tests.verification.math.trees import is_same, parsed, region_of
from verification.math.applications import settled_pairs, with_names_for_applications
from verification.math.expression import parse_expression
from verification.math.library import same_by_library
from verification.math.numbers import parse_number
from verification.math.readings import Collection, read
from verification.math.regions import parse_region, same_region
from verification.math.split import enclosed, split_at
from verification.math.text import normalise
from verification.math.units import split_unit
from verification.math.values import is_constant_ratio, real_value


@pytest.mark.parametrize(
    ("text", "spelling"),
    [
        ("$\\dfrac12$", "\\frac{1}{2}"), ("\\left( 1,\\,2 \\right)", "(1, 2)"), ("10⁻³", "10^{-3}"),
        ("x^{2}", "x^2"), ("2 1/2", "2 1/2"), ("−５", "-5"), ("1{,}000", "1000"), ("3{,}5", "3.5"),
        ("\\mathbb R", "\\reals"), ("No solution.", "\\emptyset"), ("30^{\\circ}", "30\\deg"),
    ],
)  # fmt: skip
def test_texts_get_one_spelling(text: str, spelling: str) -> None:
    assert normalise(text) == spelling
    assert normalise(spelling) == spelling


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-007", Fraction(-7)), ("1,234.5", Fraction(2469, 2)), ("-3 1/2", Fraction(-7, 2)),
        ("1.5e-3", Fraction(3, 2000)), ("2*10^3", Fraction(2000)),
        ("0.1\\overline{6}", Fraction(1, 6)),
        ("101_2", Fraction(5)), ("1A_{16}", Fraction(26)), ("\\frac{3}{-4}", Fraction(-3, 4)),
        ("1e9999", None), ("12,34", None), ("102_2", None), ("\\frac{1}{0}", None), ("1 2", None),
        ("A_{12}", None),
    ],
)  # fmt: skip
def test_numbers_are_exact(text: str, value: Fraction | None) -> None:
    assert parse_number(text) == value


@pytest.mark.parametrize(
    ("text", "rest", "dimension", "factor"),
    [
        ("5\\text{cm}^2", "5", "m^2", Fraction(1, 10_000)),
        ("60\\text{km/h}", "60", "m^1*s^-1", Fraction(5, 18)),
        ("60 miles per hour", "60", "m^1*s^-1", Fraction(44704, 100_000)),
        ("50%", "50", "", Fraction(1, 100)),
        ("\\$5", "5", "dollar^1", Fraction(1)),
        ("5 m", "5", "m^1", Fraction(1)),
    ],
)
def test_units_are_split_off(text: str, rest: str, dimension: str, factor: Fraction) -> None:
    left, unit = split_unit(text)
    assert (left, unit) == (rest, (dimension, factor))


@pytest.mark.parametrize("text", ["5m", "2x", "5\\text{or}6", "x+1", "\\sin30\\deg", "\\text{cm}"])
def test_factors_and_words_are_no_units(text: str) -> None:
    assert split_unit(text) == (text, None)


@pytest.mark.parametrize(
    ("text", "digits"),
    [
        ("\\sqrt2", "1.4142135623730950488"), ("\\ln2", "0.6931471805599453094"),
        ("\\sin\\frac{\\pi}{6}", "0.5"), ("-2^2", "-4"), ("2^{3!}", "64"),
        ("1/2\\pi", "1.570796326794896"),
        ("\\log_2 8", "3"), ("\\binom{5}{2}", "10"), ("|3-5|", "2"), ("2\\frac{1}{2}", "2.5"),
        ("\\tan^{-1}1", "0.785398163397448"), ("\\sin^2 2", "0.826821810431806"),
        ("(-8)^{1/3}", "-2"),
    ],
)  # fmt: skip
def test_expressions_have_their_values(text: str, digits: str) -> None:
    value = real_value(parsed(text))
    assert value is not None
    assert abs(float(value) - float(digits)) < 1e-14


@pytest.mark.parametrize(
    ("name", "arguments", "value"),
    [
        ("gcd", (84, -36), 12), ("lcm", (4, 6, 10), 60), ("max", (3, -5), 3), ("min", (3, -5), -5),
        ("mod", (-7, 5), 3), ("mod", (7, -5), -3), ("sign", (-9,), -1), ("sign", (0,), 0),
        ("perm", (7, 3), 210), ("perm", (3, 7), 0), ("floor", (-2.5,), -3), ("ceil", (-2.5,), -2),
        ("mod", (7.5, 2), 1.5),
    ],
)  # fmt: skip
def test_calls_on_numbers_have_their_values(
    name: str, arguments: tuple[float, ...], value: float
) -> None:
    numbers = [("num", Fraction(argument)) for argument in arguments]
    assert real_value(("call", name, *numbers)) == value


@pytest.mark.parametrize("text", ["(-1)", "\\frac12", "\\pi"])
def test_counts_of_other_than_whole_numbers_have_no_value(text: str) -> None:
    for name in ("gcd", "perm"):
        assert real_value(("call", name, parse_expression(text), ("num", Fraction(1, 3)))) is None


@pytest.mark.parametrize(
    "text", ["1 2", "1+", "f(x)", "\\int x", "(1", "x|", "", "\\frac{1}", "a;b"]
)
def test_text_outside_the_grammar_is_no_expression(text: str) -> None:
    assert parse_expression(text) is None


def test_values_beyond_bounds_are_left_open() -> None:
    assert is_same("9^{9^{9^9}}", "7") is None


def test_equations_are_equal_up_to_a_factor() -> None:
    first, second, third = map(parsed, ("2x+4y-6", "x+2y-3", "x+2y-4"))
    assert is_constant_ratio(first, second) is True
    assert is_constant_ratio(first, third) is False


@pytest.mark.parametrize(
    ("first", "second", "is_right"),
    [
        ("[0,3]", "[0,2]\\cup(1,3]", True), ("[0,3]", "[0,1)\\cup(1,3]", False),
        ("x\\ne2", "\\reals\\setminus\\{2\\}", True), ("(0,2)\\cap(1,3)", "1<x<2", True),
        ("0<x<1", "0<y<1", False), ("(3,\\infty)", "(3,\\infty]", False), ("(0,a)", "(0,a)", None),
    ],
)  # fmt: skip
def test_regions_are_compared_by_membership(first: str, second: str, is_right: bool | None) -> None:
    region, other = region_of(first), region_of(second)
    assert same_region(region, other) is is_right
    assert same_region(other, region) is is_right


@pytest.mark.parametrize(
    "text",
    ["x=1\\text{and}x=2", "x<1\\text{and}x>3", "x>1\\text{or}x>3", "(1,5)\\text{and}(2,3)",
     "[1,5]\\text{or}[2,3]", "\\{1,3\\}\\text{and}\\{3,5\\}", "x>0\\text{and}(1,2)",
     "x>1,x>3", "x=1\\text{and}x>0", "x<1\\text{or}y>3"],
)  # fmt: skip
def test_words_between_answers_make_no_set_of_them(text: str) -> None:
    assert parse_region(text) is None


@pytest.mark.parametrize(
    ("text", "same"),
    [("x>1\\text{and}x<3", "(1,3)"), ("x<1,x>3", "(-\\infty,1)\\cup(3,\\infty)"),
     ("(-\\infty,1)\\text{and}(3,4]", "(-\\infty,1)\\cup(3,4]"), ("x>0,x\\ne1,2", "(0,1)\\cup(1,2)"
     "\\cup(2,\\infty)"), ("[0,1]\\text{or}[1,2]", "[0,2]")],
)  # fmt: skip
def test_words_between_conditions_are_set_operations(text: str, same: str) -> None:
    assert same_region(region_of(text), region_of(same)) is True


def test_a_pair_is_read_as_tuple_and_as_interval() -> None:
    kinds = {type(reading).__name__ for reading in read("(1,2)")}
    assert kinds == {"Region", "Collection"}
    assert read("(2,1)") == (Collection("tuple", ("2", "1")),)


@pytest.mark.parametrize(
    ("first", "second", "marked"),
    [
        ("P(2)", "2P", [("P\\by(2)", "2P"), ("P\\of(2)", "2P")]),
        ("a(b+c)", "ab+ac", [("a\\by(b+c)", "ab+ac")]),
        ("f(2)", "2f", [("f\\of(2)", "2f")]),
        ("n(n+1)T(n-1)", "7", [("n\\by(n+1)T\\by(n-1)", "7"), ("n\\by(n+1)T\\of(n-1)", "7")]),
        ("T(n-1)", "Tn-T", [("T\\by(n-1)", "Tn-T"), ("T\\of(n-1)", "Tn-T")]),
        ("y'(x)+x^2(1-x)", "", [("y'\\of(x)+x^2(1-x)", "")]),
        ("\\sin(x)+x^n(2)", "", [("\\sin(x)+x^n(2)", "")]),
    ],
)  # fmt: skip
def test_a_letter_before_parentheses_has_the_meanings_that_both_texts_leave_open(
    first: str, second: str, marked: list[tuple[str, str]]
) -> None:
    assert settled_pairs(first, second) == marked
    assert settled_pairs(second, first) == [pair[::-1] for pair in marked]


def test_values_of_named_functions_are_symbols_of_their_arguments() -> None:
    first, second, other = (parsed(f"f\\of({inside})") for inside in ("x+1", "1+x", "x"))
    one, two = with_names_for_applications(first, second) or (first, other)
    assert one == two
    one, two = with_names_for_applications(first, other) or (first, first)
    assert one != two


def test_splitting_respects_brackets() -> None:
    assert split_at("(1,2),3,\\{4,5\\}", ",") == ["(1,2)", "3", "\\{4,5\\}"]
    assert enclosed("(1)+(2)") is None
    assert enclosed("((1)+(2))") == "(1)+(2)"


def test_library_is_asked_both_ways_round_with_exact_decimals() -> None:
    assert same_by_library("\\int_0^1 x dx", "0.5") is True
    assert same_by_library("\\frac{1}{3}", "0.333333") is False
    assert same_by_library("X+1", "x+1") is False
    assert same_by_library("))", "7") is None
