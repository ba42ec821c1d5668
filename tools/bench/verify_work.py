"""What `tools.bench.verify` grades: answers, bombs and programs, drawn by a fixed seed."""

import json
import random

from megatron_rl.protocol.types import ScoreRequest
from verification.draft import Draft
from verification.library import Sample
from verification.rules import RewardRules
from verification.score import screen

# Answers that no screen refuses and that cost more than any limit of time or memory.
BOMBS = (
    "\\sum_{n=1}^{9998} \\frac{n}{n^4+3}",
    "\\sum_{n=1}^{9999} \\frac{1}{n^3+n+1}",
    "\\prod_{n=1}^{9999} (1+\\frac{1}{n^2})",
    "\\int \\sqrt{\\tan(x)} \\log(x) e^{x^2} dx",
)
THOUGHT = "First we simplify, then we compare both sides and look for mistakes. "
TESTS = 20


def boxed(answer: str) -> str:
    """A well-formed response of ordinary length."""
    return f"<think>{THOUGHT * 20}</think>The answer is $\\boxed{{{answer}}}$."


def make_answers(count: int, seed: int = 0) -> list[Sample]:
    """Answers as training meets them: numbers mostly, right and wrong, some expressions."""
    draw = random.Random(seed)
    makers = (_integer, _integer, _integer, _fraction, _decimal, _surd, _interval, _pair, _product)
    pairs = [draw.choice(makers)(draw) for _ in range(count)]
    return [Sample(text=boxed(answer), answer=reference) for answer, reference in pairs]


def make_expressions(count: int, seed: int = 0) -> list[Sample]:
    """Only answers that need a computation, so that a grading process sees each of them."""
    draw = random.Random(seed)
    pairs = [draw.choice((_surd, _product, _interval))(draw) for _ in range(count)]
    return [Sample(text=boxed(answer), answer=reference) for answer, reference in pairs]


def make_bombs(count: int) -> list[Sample]:
    """Bombs in turn."""
    return [Sample(text=boxed(BOMBS[i % len(BOMBS)]), answer="\\sqrt{2}+x") for i in range(count)]


def make_heavy(count: int, seed: int = 0) -> list[Sample]:
    """Right answers that take a twentieth to a third of a second of CPU time."""
    draw = random.Random(seed)
    pairs = [draw.choice((_sine_moment, _quarter_disc, _half_circle))(draw) for _ in range(count)]
    return [Sample(text=boxed(answer), answer=reference) for answer, reference in pairs]


def make_right(count: int, seed: int = 0) -> list[Sample]:
    """Right answers of all kinds that need computing, and programs far within their limits.

    One in ten is heavy, and four are programs that use 2.5 of their 4 s.
    """
    draw = random.Random(seed)
    heavy, programs = make_heavy(count // 10, seed), [make_slow_program(i) for i in range(4)]
    pairs = [_right_product(draw) for _ in range(count - len(heavy) - len(programs))]
    light = [Sample(text=boxed(answer), answer=reference) for answer, reference in pairs]
    samples = [*programs, *heavy, *light]
    draw.shuffle(samples)
    return samples


def _sine_moment(draw: random.Random) -> tuple[str, str]:
    """By parts, with c = cos(k pi): the integral of x^4 sin(kx) from 0 to pi."""
    k = draw.randint(1, 30)
    sign = 1 if k % 2 else -1
    reference = (
        f"{sign}\\cdot\\left(\\frac{{\\pi^4}}{{{k}}}-\\frac{{12\\pi^2}}{{{k**3}}}"
        f"+\\frac{{24}}{{{k**5}}}\\right)+\\frac{{24}}{{{k**5}}}"
    )
    return f"\\int_0^{{\\pi}} x^4 \\sin({k}x) dx", reference


def _quarter_disc(draw: random.Random) -> tuple[str, str]:
    radius = draw.randint(2, 60)
    integral = f"\\int_0^{{{radius}}} \\sqrt{{{radius**2}-x^2}} dx"
    return integral, f"\\frac{{{radius**2}\\pi}}{{4}}"


def _half_circle(draw: random.Random) -> tuple[str, str]:
    radius = draw.randint(2, 60)
    integral = f"\\int_0^{{{radius}}} \\frac{{dx}}{{\\sqrt{{{radius**2}-x^2}}}}"
    return integral, "\\frac{\\pi}{2}"


def _right_product(draw: random.Random) -> tuple[str, str]:
    first, second = draw.randint(1, 99), draw.randint(100, 199)
    return f"(x+{first})(x+{second})", f"x^2+{first + second}x+{first * second}"


def _integer(draw: random.Random) -> tuple[str, str]:
    number = draw.randint(-999, 9999)
    return str(number + draw.choice((0, 0, 1))), str(number)


def _fraction(draw: random.Random) -> tuple[str, str]:
    top, bottom, factor = draw.randint(1, 40), draw.randint(2, 40), draw.randint(1, 3)
    return f"\\frac{{{top * factor}}}{{{bottom * factor}}}", f"\\frac{{{top}}}{{{bottom}}}"


def _decimal(draw: random.Random) -> tuple[str, str]:
    hundredths = draw.randint(1, 9999)
    return f"{hundredths / 100:.2f}", f"\\frac{{{hundredths}}}{{100}}"


def _surd(draw: random.Random) -> tuple[str, str]:
    square, rest = draw.randint(2, 9), draw.choice((2, 3, 5, 6, 7))
    wrong = draw.choice((0, 1))
    return f"\\sqrt{{{square * square * rest}}}", f"{square + wrong}\\sqrt{{{rest}}}"


def _interval(draw: random.Random) -> tuple[str, str]:
    low = draw.randint(-9, 0)
    high = low + draw.randint(1, 9)
    return f"[{low},{high})", f"{low} \\le x < {high}"


def _pair(draw: random.Random) -> tuple[str, str]:
    first, second = draw.randint(-9, 9), draw.randint(-9, 9)
    return f"({first}, {second})", f"\\left({first},{second + draw.choice((0, 1))}\\right)"


def _product(draw: random.Random) -> tuple[str, str]:
    first, second = draw.randint(1, 9), draw.randint(10, 19)
    wrong = draw.choice((0, 1))
    return f"(x+{first})(x+{second})", f"x^2+{first + second}x+{first * second + wrong}"


_PYTHON = """<think>{thought}</think>
```python
import sys
numbers = list(map(int, sys.stdin.read().split()))[1:]
best = current = numbers[0]
for number in numbers[1:]:
    current = max(number, current + number)
    best = max(best, current)
print(best)
```"""
_CPP = """<think>{thought}</think>
```cpp
#include <bits/stdc++.h>
using namespace std;
int main() {{
    int n; cin >> n; vector<long long> a(n); for (auto& x : a) cin >> x;
    long long best = a[0], current = a[0];
    for (int i = 1; i < n; i++) {{
        current = max(a[i], current + a[i]);
        best = max(best, current);
    }}
    cout << best << endl;
}}
```"""


def make_program(language: str, seed: int) -> Sample:
    """A right program for the largest sum of a stretch, with its tests."""
    draw = random.Random(seed)
    cases = []
    for _ in range(TESTS):
        numbers = [draw.randint(-50, 50) for _ in range(40)]
        best = max(sum(numbers[i:j]) for i in range(40) for j in range(i + 1, 41))
        cases.append({"stdin": f"40\n{' '.join(map(str, numbers))}\n", "stdout": f"{best}\n"})
    text = {"python": _PYTHON, "cpp": _CPP}[language].format(thought=THOUGHT)
    return Sample(text=text, task="code", entry=json.dumps({"cases": cases}), seed=seed)


_SLOW_PYTHON = """<think>{thought}</think>
```python
import time
while time.process_time() < 2.5:
    pass
print(int(input()) + 1)
```"""
_SLOW_CPP = """<think>{thought}</think>
```cpp
#include <bits/stdc++.h>
int main() {{
    while (clock() < 2.5 * CLOCKS_PER_SEC) {{}}
    int n; std::cin >> n; std::cout << n + 1;
}}
```"""


def make_slow_program(seed: int) -> Sample:
    """A right program, Python and C++ in turns, that uses 2.5 s of CPU time in its one test."""
    text = (_SLOW_PYTHON, _SLOW_CPP)[seed % 2].format(thought=THOUGHT)
    entry = json.dumps({"cases": [{"stdin": f"{seed}\n", "stdout": f"{seed + 1}\n"}]})
    return Sample(text=text, task="code", entry=entry, seed=seed)


def to_draft(number: int, sample: Sample, rules: RewardRules) -> Draft:
    """The sample as a verifier gives it to its pool."""
    request = ScoreRequest(
        number, sample.task, sample.answer, sample.entry, sample.text, sample.tokens, True
    )
    draft = screen(request, rules)
    assert isinstance(draft, Draft), f"plain text decides {sample}"
    return draft
