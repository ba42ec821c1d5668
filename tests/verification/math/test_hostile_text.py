import random
import time

import pytest

from tests.verification.math.golden_pairs import load_golden_pairs
from verification.math.answer import compare_quickly
from verification.math.structure import same_structure
from verification.math.text import normalise
from verification.verdict import CORRECT

GOLDEN = load_golden_pairs()
# Starts, middles and unfinished ends of everything that a pattern of ours looks for.
FAMILIES = [
    "(", "\\", "\\\\", "{", "}", "\\{", "\\{1,", "\\text{", "\\text", "\\text{ or ", "$", "\\$",
    "^", "_", "^{", "2^", "^{ (", "-", "+", "1", "1,", "1,000", "1 ", "1.", "1 000 ", "a ", "ab ",
    "\\frac", "\\frac{", "\\frac1", "\\frac{1}", "\\sqrt", "\\left.", "{,}", "\\,", "~", "|", "|x",
    "\\lfloor ", "=", "x=", "x<", "\\le", "\\cup", "or ", ",", ":", "1:", "%", "\\deg", "^\\circ",
    "⁰", "₀", "√", "½", "π", "\x00", "\ud800", "۱", "!", "!)", "1!", "1e1", "x\\in", "(1,", "1,2)",
    "\\pm1", "\\sin", "\\log_", "\\overline{", "\\mathbb ", '"', "x'", "x_", "1/", "cm ", "5 cm ",
    "B. ", "(B)", "\\begin{matrix}", "&", "\\approx", "\\boxed{", "{1}", "option ", "**",
    "\\color{", "\\color{a}{", "\\SI{", "\\SI{1}{", "\\hspace{", "\\phantom{1}", "5 million ",
    "one ", "hundred ", "(C) or ", "(C)", "C, ", "not ", "5 h ", "5' ", "5\\deg ", "m ", "km/",
    "9!", "9^", "(9^", "9^{9", "\\binom{9}", "\\log_", "1011_{\\text{two", "the ", "\\kilo\\",
]  # fmt: skip
PIECES = [
    *"0123456789+-*/^_!%(){}[]\\|<>=.,:;$ abexXyiIkmn'\"\x00\ud800π√²₂½０٣∞",
    "\\frac", "\\sqrt", "\\text{", "\\infty", "\\cup", "\\le", "\\in", "\\{", "\\}", "^\\circ",
    "\\pm", "\\overline{", "\\log", "\\sin", "or", "and", "cm",
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_hostile_text_takes_linear_time(family: str) -> None:
    for end in ("", "}", "8"):
        megabyte = (family * 1_000_000)[:1_000_000] + end
        longest = (family * 1000)[:990] + end
        start = time.process_time()
        assert compare_quickly(megabyte, megabyte) == CORRECT
        for text in (megabyte, longest):
            for pair in ((text, "7"), ("7", text)):
                verdict = compare_quickly(*pair)
                assert verdict is None or not verdict.is_correct
        # A few milliseconds; one pattern that backtracks would need seconds for 990 characters.
        assert time.process_time() - start < 0.2


@pytest.mark.parametrize("family", FAMILIES)
def test_structure_of_hostile_text_is_bounded(family: str) -> None:
    text, other = (normalise((family * 1000)[:990] + end) for end in ("", "7"))
    start = time.process_time()
    same_structure(text, other)
    same_structure("x+1", text)
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    "text",
    ["9^{999}" * 80, "\\sin(" * 29 + "1" + ")" * 29, "e^{e^{e^{e^{e}}}}",
     "\\sqrt{" * 25 + "2" + "}" * 25, "\\lfloor 10^{399}\\pi\\rfloor",
     "500!" * 100, "\\binom{500}{250}" * 30, "\\tan(10^{400})", "((9^{99})^{99})^{99}",
     "(x+y+z)^{400}", "x^{999}y^{999}z^{999}", "\\ln(\\ln(\\ln(10^{300})))", "0^{-1}", "0^0",
     "\\log_1 5", "\\infty-\\infty", "\\infty^\\infty", "\\frac{0}{0}",
     "1^{99999}", "(-1)^{1/99}", "i^i", "\\arcsin 5", "\\cot 0", "\\sqrt[0]{5}", "\\sqrt[x]{5}"],
)  # fmt: skip
def test_bombs_do_not_explode(text: str) -> None:
    start = time.process_time()
    first = same_structure(normalise(text), normalise(text + "+1"))
    second = same_structure(normalise(text + "+1"), normalise(text))
    assert time.process_time() - start < 2
    assert first == second
    assert first is not True


def test_a_sign_behind_the_fraction_of_a_mixed_number_raises_nothing() -> None:
    for sign in ("%", "\\deg", "!"):
        text = f"(3\\frac{{1}}{{2}}{sign})+1"
        assert same_structure(text, "x+1") is not True
        assert same_structure("x+1", text) is not True


def _mutated(text: str, draw: random.Random) -> str:
    chars = list(text)
    for _ in range(draw.randint(1, 4)):
        place = draw.randint(0, len(chars))
        kind = draw.random()
        if kind < 0.5:
            chars.insert(place, draw.choice(PIECES))
        elif kind < 0.75:
            del chars[place : place + 1]
        else:
            chars[place:place] = draw.choice(GOLDEN)["answer"][: draw.randint(0, 10)]
    return "".join(chars)


def test_mutated_texts_raise_nothing_and_compare_symmetrically() -> None:
    draw = random.Random(20260)
    for _ in range(4000):
        pair = draw.choice(GOLDEN)
        first = _mutated(pair["answer"], draw)
        second = draw.choice([pair["reference"], _mutated(pair["reference"], draw)])
        assert compare_quickly(first, first) == CORRECT
        one, other = compare_quickly(first, second), compare_quickly(second, first)
        assert (one is None) == (other is None), (first, second)
        if one is not None and other is not None:
            assert one.is_correct == other.is_correct, (first, second)
            continue
        texts = normalise(first), normalise(second)
        assert same_structure(*texts) == same_structure(*texts[::-1]), (first, second)
