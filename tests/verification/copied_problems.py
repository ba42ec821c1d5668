"""Problems like those of MATH, made by templates: what may be copied of them, what answers them."""

import math
import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import NamedTuple


class Problem(NamedTuple):
    """A problem with its reference."""

    text: str
    reference: str
    copied: tuple[str, ...]
    """Expressions of the problem, as they stand there or in disguise."""
    honest: tuple[str, ...]
    """Right answers."""
    kind: str


Parts = tuple[str, str, list[str], list[str]]


def _fraction(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    sign = "-" if value < 0 else ""
    return f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _slash(value: Fraction) -> str:
    return str(value)


def _sum(draw: random.Random) -> Parts:
    a, b, c = (draw.randint(12, 99) for _ in range(3))
    total = a + b - c
    copies = [f"{a}+{b}-{c}", f"{b} + {a} - {c}", f"-{c}+{a}+{b}", f"({a}+{b})-{c}"]
    return f"Compute ${a} + {b} - {c}$.", str(total), copies, [str(total), f"{total}.0"]


def _product(draw: random.Random) -> Parts:
    a, b = draw.randint(12, 99), draw.randint(12, 99)
    copies = [f"{a}\\cdot {b}", f"{b}*{a}", f"{a}×{b}", f"({b})({a})", f"{a}\\cdot{b}+7-7"]
    value = a * b
    return (
        f"What is ${a} \\times {b}$?",
        str(value),
        copies,
        [str(value), f"{value:,}", f"{value}."],
    )


def _power(draw: random.Random) -> Parts:
    a, n = draw.randint(2, 9), draw.randint(2, 4)
    copies = [f"{a}^{n}", f"{a}^{{{n}}}", "\\cdot ".join([str(a)] * n), f"({a})^{n}", f"{a}**{n}"]
    return f"Evaluate ${a}^{n}$.", str(a**n), copies, [str(a**n), f"x={a**n}"]


def _cosine(draw: random.Random) -> Parts:
    name, degrees, value = draw.choice(
        [("cos", 60, "\\frac{1}{2}"), ("sin", 30, "\\frac{1}{2}"), ("tan", 45, "1"),
         ("sin", 60, "\\frac{\\sqrt{3}}{2}"), ("cos", 45, "\\frac{\\sqrt{2}}{2}"),
         ("cos", 120, "-\\frac{1}{2}"), ("tan", 60, "\\sqrt{3}")]
    )  # fmt: skip
    copies = [f"\\{name} {degrees}^\\circ", f"\\{name}({degrees}^\\circ)", f"{name}({degrees}°)",
              f"\\{name}\\left({degrees}^{{\\circ}}\\right)", f"\\text{{{name}}}({degrees}^\\circ)",
              f"\\{name} {degrees}^\\circ + 0",
              f"\\frac{{2\\{name} {degrees}^\\circ}}{{2}}"]  # fmt: skip
    return f"Find $\\{name} {degrees}^\\circ$.", value, copies, [value, f"\\boxed{{{value}}}"]


def _logarithm(draw: random.Random) -> Parts:
    base, n = draw.randint(2, 7), draw.randint(2, 4)
    argument = base**n
    copies = [
        f"\\log_{base} {argument}",
        f"\\log_{{{base}}}({argument})",
        f"\\log_{base}{argument}+0",
    ]
    return f"Evaluate $\\log_{base} {argument}$.", str(n), copies, [str(n), f"{n}.0"]


def _root(draw: random.Random) -> Parts:
    inner, outer = draw.choice([2, 3, 5, 6, 7]), draw.randint(2, 6)
    whole = inner * outer * outer
    copies = [f"\\sqrt{{{whole}}}", f"{whole}^{{1/2}}", f"{whole}^{{\\frac12}}", f"√{whole}"]
    honest = [
        f"{outer}\\sqrt{{{inner}}}",
        f"{outer}\\sqrt{inner}",
        f"\\sqrt{{{inner}}}\\cdot {outer}",
    ]
    return f"Simplify $\\sqrt{{{whole}}}$.", honest[0], copies, honest


def _rationalise(draw: random.Random) -> Parts:
    p = draw.choice([2, 3, 5, 7, 11])
    copies = [
        f"\\frac{{1}}{{\\sqrt{{{p}}}}}",
        f"1/\\sqrt{{{p}}}",
        f"\\dfrac1{{\\sqrt{p if p < 10 else {p}}}}",
    ]
    honest = [
        f"\\frac{{\\sqrt{{{p}}}}}{{{p}}}",
        f"\\sqrt{{{p}}}/{p}",
        f"\\frac1{{{p}}}\\sqrt{{{p}}}",
    ]
    return (
        f"Rationalize the denominator of $\\frac{{1}}{{\\sqrt{{{p}}}}}$.",
        honest[0],
        copies[:2],
        honest,
    )


def _expand(draw: random.Random) -> Parts:
    a, b = draw.randint(1, 9), draw.randint(1, 9)
    copies = [f"(x+{a})(x+{b})", f"(x + {b})(x + {a})", f"({a}+x)\\cdot(x+{b})",
              f"\\left(x+{a}\\right)\\left({b}+x\\right)"]  # fmt: skip
    reference = f"x^2+{a + b}x+{a * b}"
    honest = [reference, f"{a * b}+{a + b}x+x^2", f"x^{{2}} + {a + b}\\cdot x + {a * b}"]
    return f"Expand $(x+{a})(x+{b})$.", reference, copies, honest


def _square(draw: random.Random) -> Parts:
    a = draw.randint(2, 9)
    copies = [f"(x-{a})^2", f"(x-{a})(x-{a})", f"({a}-x)^2"]
    reference = f"x^2-{2 * a}x+{a * a}"
    return f"Expand $(x-{a})^2$.", reference, copies, [reference, f"{a * a}-{2 * a}x+x^2"]


def _factor(draw: random.Random) -> Parts:
    a, b = draw.sample(range(1, 9), 2)
    copies = [f"x^2+{a + b}x+{a * b}", f"{a * b}+{a + b}x+x^2", f"x\\cdot x+{a + b}x+{a * b}"]
    reference = f"(x+{a})(x+{b})"
    honest = [reference, f"(x+{b})(x+{a})", f"({a}+x)(x+{b})"]
    return f"Factor $x^2+{a + b}x+{a * b}$ completely.", reference, copies, honest


def _common_factor(draw: random.Random) -> Parts:
    a, b = draw.randint(2, 9), draw.randint(2, 9)
    copies = [f"{a}y+{a * b}", f"{a * b}+{a}y", f"{a}\\cdot y+{a * b}"]
    return f"Factor ${a}y+{a * b}$.", f"{a}(y+{b})", copies, [f"{a}({b}+y)", f"(y+{b})\\cdot {a}"]


def _lowest_terms(draw: random.Random) -> Parts:
    value = Fraction(draw.randint(1, 9), draw.choice([10, 11, 13]))
    times = draw.randint(2, 9)
    top, bottom = value.numerator * times, value.denominator * times
    copies = [f"\\frac{{{top}}}{{{bottom}}}", f"{top}/{bottom}", f"\\dfrac{{{top}}}{{{bottom}}}"]
    text = f"Simplify $\\frac{{{top}}}{{{bottom}}}$."
    return text, _fraction(value), copies, [_fraction(value), _slash(value)]


def _fractions(draw: random.Random) -> Parts:
    a, b = draw.sample([2, 3, 5, 7, 8], 2)
    value = Fraction(1, a) + Fraction(1, b)
    copies = [f"\\frac{{1}}{{{a}}}+\\frac{{1}}{{{b}}}", f"1/{b}+1/{a}", f"\\frac1{a} + \\frac1{b}"]
    text = f"Find $\\frac{{1}}{{{a}}} + \\frac{{1}}{{{b}}}$ as a common fraction."
    return text, _fraction(value), copies, [_fraction(value), _slash(value)]


def _series(draw: random.Random) -> Parts:
    n = draw.randint(5, 40)
    value = n * (n + 1) // 2
    copies = [
        f"\\sum_{{k=1}}^{{{n}}} k",
        f"\\sum\\limits_{{k=1}}^{{{n}}}k",
        f"\\sum_{{j=1}}^{{{n}}} j",
    ]
    return f"Compute $\\sum_{{k=1}}^{{{n}}} k$.", str(value), copies, [str(value), f"S={value}"]


def _integral(draw: random.Random) -> Parts:
    b, n = draw.randint(1, 4), draw.randint(2, 3)
    value = Fraction(b ** (n + 1), n + 1)
    copies = [
        f"\\int_0^{b} x^{n} \\, dx",
        f"\\int_{{0}}^{{{b}}} x^{n}dx",
        f"\\int_0^{b} t^{n}\\,dt",
    ]
    return f"Evaluate $\\int_0^{b} x^{n} \\, dx$.", _fraction(value), copies, [_slash(value)]


def _limit(draw: random.Random) -> Parts:
    a = draw.randint(2, 9)
    copies = [f"\\lim_{{x\\to {a}}} \\frac{{x^2-{a * a}}}{{x-{a}}}"]
    return f"Find ${copies[0]}$.", str(2 * a), copies, [str(2 * a), f"{2 * a}.0"]


def _divisor(draw: random.Random) -> Parts:
    common, a, b = draw.randint(2, 30), *draw.sample([2, 3, 5, 7, 11], 2)
    a, b = a * common, b * common
    copies = [f"\\gcd({a},{b})", f"\\gcd({b}, {a})", f"\\text{{gcd}}({a},{b})", f"gcd({a},{b})"]
    text = draw.choice(
        [f"Find $\\gcd({a}, {b})$.", f"What is the greatest common divisor of {a} and {b}?"]
    )
    return text, str(common), copies, [str(common)]


def _multiple(draw: random.Random) -> Parts:
    a, b = draw.sample([4, 6, 9, 10, 14, 15], 2)
    copies = [f"\\text{{lcm}}({a},{b})", f"\\operatorname{{lcm}}({b},{a})"]
    return f"Find the least common multiple of {a} and {b}.", str(math.lcm(a, b)), copies, []


def _factorial(draw: random.Random) -> Parts:
    n = draw.randint(3, 9)
    value = math.factorial(n)
    return f"What is ${n}!$?", str(value), [f"{n}!", f"({n})!", f"{n}!+0"], [f"{value:,}"]


def _binomial(draw: random.Random) -> Parts:
    n, k = draw.randint(5, 12), draw.randint(2, 4)
    copies = [f"\\binom{{{n}}}{{{k}}}", f"\\dbinom{{{n}}}{{{k}}}", f"{{{n} \\choose {k}}}"]
    return f"Compute $\\dbinom{{{n}}}{{{k}}}$.", str(math.comb(n, k)), copies, []


def _floor(draw: random.Random) -> Parts:
    a, b = draw.randint(1, 20), draw.randint(1, 9)
    copies = [f"\\lfloor {a}.{b}\\rfloor", f"\\left\\lfloor {a}.{b} \\right\\rfloor"]
    return f"Find $\\lfloor {a}.{b} \\rfloor$.", str(a), copies, [str(a)]


def _absolute(draw: random.Random) -> Parts:
    a, b = draw.randint(1, 20), draw.randint(21, 50)
    copies = [f"|{a}-{b}|", f"\\left|{a}-{b}\\right|", f"\\lvert {a} - {b}\\rvert"]
    return f"What is $|{a} - {b}|$?", str(b - a), copies, [str(b - a)]


def _modulus(draw: random.Random) -> Parts:
    a, b, c = draw.choice([(3, 4, 5), (5, 12, 13), (8, 15, 17), (7, 24, 25)])
    return f"Compute $|{a}+{b}i|$.", str(c), [f"|{a}+{b}i|", f"|{b}i+{a}|"], [str(c)]


def _complex(draw: random.Random) -> Parts:
    a, b, c, d = (draw.randint(1, 6) for _ in range(4))
    b += a * d == -b * c
    real, imaginary = a * c - b * d, a * d + b * c
    copies = [f"({a}+{b}i)({c}+{d}i)", f"({c}+{d}i)({a}+{b}i)"]
    honest = [
        f"{real}+{imaginary}i",
        f"{imaginary}i+{real}" if real >= 0 else f"{imaginary}i{real}",
    ]
    return f"Simplify $({a}+{b}i)({c}+{d}i)$.", honest[0], copies, honest


def _like_terms(draw: random.Random) -> Parts:
    a, b = draw.randint(2, 20), draw.randint(2, 20)
    copies = [f"{a}x+{b}x", f"{b}x + {a}x", f"x\\cdot {a}+x\\cdot {b}"]
    return f"Simplify ${a}x + {b}x$.", f"{a + b}x", copies, [f"{a + b}\\cdot x"]


def _equation(draw: random.Random) -> Parts:
    a, x = draw.randint(2, 20), draw.randint(1, 20)
    copies = [f"x+{a}={a + x}", f"{a}+x={a + x}", f"{a + x}=x+{a}"]
    return f"Solve $x+{a}={a + x}$.", f"x={x}", copies, [str(x), f"x = {x}", f"{x}=x"]


def _inequality(draw: random.Random) -> Parts:
    a, x = draw.randint(2, 20), draw.randint(1, 20)
    copies = [f"x+{a}<{a + x}", f"{a}+x<{a + x}"]
    return f"Solve $x+{a}<{a + x}$.", f"x<{x}", copies, [f"(-\\infty,{x})", f"{x}>x"]


def _decimal(draw: random.Random) -> Parts:
    value = Fraction(draw.choice([1, 3, 5, 7, 9, 11]), draw.choice([8, 16]))
    text = f"Write $\\frac{{{value.numerator}}}{{{value.denominator}}}$ as a decimal."
    return text, str(float(value)), [_fraction(value), _slash(value)], [f"{float(value)}0"]


def _common_fraction(draw: random.Random) -> Parts:
    value = Fraction(draw.choice([1, 3, 7, 9, 11, 13]), 20)
    text = f"Express {float(value)} as a common fraction."
    return text, _fraction(value), [str(float(value)), f"{float(value)}0"], [_slash(value)]


def _metres(draw: random.Random) -> Parts:
    metres = draw.randint(2, 40)
    copies = [
        f"{metres * 100} cm",
        f"{metres * 100}\\text{{ cm}}",
        f"{metres * 100}\\,\\mathrm{{cm}}",
    ]
    text = f"How many metres are {metres * 100} cm?"
    return (
        text,
        f"{metres}\\text{{ m}}",
        copies,
        [f"{metres}", f"{metres} m"],
    )


def _ratio(draw: random.Random) -> Parts:
    a, b = draw.choice([(7, 5), (3, 8), (9, 4), (11, 7)])
    n = draw.randint(2, 9)
    text = f"Write the ratio ${a * n}:{b * n}$ in lowest terms."
    return text, f"{a}:{b}", [f"{a * n}:{b * n}", f"{a * n} : {b * n}"], [f"{a} : {b}"]


def _quotient(draw: random.Random) -> Parts:
    a = draw.randint(2, 12)
    copies = [f"\\frac{{x^2-{a * a}}}{{x-{a}}}", f"(x^2-{a * a})/(x-{a})"]
    return f"Simplify $\\frac{{x^2-{a * a}}}{{x-{a}}}$.", f"x+{a}", copies, [f"{a}+x"]


TEMPLATES: list[Callable[[random.Random], Parts]] = [
    _sum, _product, _power, _cosine, _logarithm, _root, _rationalise, _expand, _square, _factor,
    _common_factor, _lowest_terms, _fractions, _series, _integral, _limit, _divisor, _multiple,
    _factorial, _binomial, _floor, _absolute, _modulus, _complex, _like_terms, _equation,
    _inequality, _decimal, _common_fraction, _metres, _ratio, _quotient,
]  # fmt: skip


def make_problems(count: int, seed: int) -> Iterator[Problem]:
    """`count` problems, each template in turn."""
    for number in range(count):
        template = TEMPLATES[number % len(TEMPLATES)]
        text, reference, copied, honest = template(random.Random(f"{seed} {number}"))
        kind = template.__name__.removeprefix("_")
        yield Problem(text, reference, tuple(copied), (reference, *honest), kind)
