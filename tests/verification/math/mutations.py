"""Wrong answers that look right: a reference with one small change, drawn by a seed."""

import hashlib
import random
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

Mutation = Callable[[str, random.Random], str]

_NUMBER = re.compile(r"[0-9]+")
_EXPONENT = re.compile(r"\^(?:\{(-?[0-9]+)\}|([0-9]))")
_SIGN = re.compile(
    r"(?<=[0-9A-Za-z)}\]|! ])[+-](?=[0-9A-Za-z\\({ ])|(?:(?<=[=(,\[{ ])|^)-(?=[0-9A-Za-z\\])"
)
_FACTOR = re.compile(r"(?<![0-9.,^_{\\A-Za-z])[2-9](?=[a-z](?![a-z])|\\sqrt|\\pi|\()")
_NAME = re.compile(r"(?<![\\A-Za-z{])[a-hj-z](?![A-Za-z}])")
_BOUND = re.compile(r"[\[\]()](?=[^()\[\]]*,|$)|\\le(?!f)q?|\\ge(?!q?[a-z])q?|<|>")
_FLIPS = {"[": "(", "]": ")", "(": "[", ")": "]", "<": "\\le ", ">": "\\ge "}
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|ln|log|cup|cap|sqrt)(?![a-z])")
_OTHER_FUNCTION = {
    "\\sin": "\\cos", "\\cos": "\\sin", "\\tan": "\\cot", "\\ln": "\\log", "\\log": "\\ln",
    "\\cup": "\\cap", "\\cap": "\\cup", "\\sqrt": "\\sqrt[3]",
}  # fmt: skip


def _at_random(
    pattern: re.Pattern[str], change: Callable[[re.Match[str], random.Random], str]
) -> Mutation:
    """Changes one match of a pattern; leaves a text without a match as it is."""

    def mutate(text: str, draw: random.Random) -> str:
        matches = list(pattern.finditer(text))
        if not matches:
            return text
        match = draw.choice(matches)
        return text[: match.start()] + change(match, draw) + text[match.end() :]

    return mutate


def _other_digit(match: re.Match[str], draw: random.Random) -> str:
    digits = list(match[0])
    place = draw.randrange(len(digits))
    digits[place] = draw.choice([digit for digit in "0123456789" if digit != digits[place]])
    return "".join(digits)


def _neighbour(match: re.Match[str], draw: random.Random) -> str:
    return str(max(0, int(match[0]) + draw.choice((-1, 1, 10))))


def _other_exponent(match: re.Match[str], draw: random.Random) -> str:
    return f"^{{{int(match[1] or match[2]) + draw.choice((-1, 1, 2))}}}"


def _other_name(match: re.Match[str], draw: random.Random) -> str:
    return draw.choice([name for name in "abcnxyz" if name != match[0]])


def _swap_names(text: str, draw: random.Random) -> str:
    names = sorted(set(_NAME.findall(text)))
    if len(names) < 2:
        return text
    one, other = draw.sample(names, 2)
    swapped = {one: other, other: one}
    return _NAME.sub(lambda match: swapped.get(match[0], match[0]), text)


def _drop_item(text: str, draw: random.Random) -> str:
    items = text.split(",")
    if len(items) < 2:
        return text
    del items[draw.randrange(len(items))]
    return ",".join(items)


MUTATIONS: dict[str, Mutation] = {
    "digit": _at_random(_NUMBER, _other_digit),
    "neighbour": _at_random(_NUMBER, _neighbour),
    "sign": _at_random(_SIGN, lambda match, _: {"+": "-", "-": "+"}[match[0]]),
    "negated": lambda text, _: text.removeprefix("-") if text.startswith("-") else f"-{text}",
    "exponent": _at_random(_EXPONENT, _other_exponent),
    "dropped exponent": _at_random(_EXPONENT, lambda *_: ""),
    "dropped factor": _at_random(_FACTOR, lambda *_: ""),
    "name": _at_random(_NAME, _other_name),
    "swapped names": _swap_names,
    "bound": _at_random(_BOUND, lambda match, _: _FLIPS.get(match[0], "<")),
    "function": _at_random(_FUNCTION, lambda match, _: _OTHER_FUNCTION[match[0]]),
    "dropped item": _drop_item,
    "added term": lambda text, draw: text + draw.choice(("+1", "+x", "+\\pi")),
    "doubled": lambda text, _: f"2\\cdot({text})",
}
"""By the mistake that each stands for."""


class Mutant(NamedTuple):
    """A changed reference."""

    kind: str
    answer: str
    reference: str


def draw_mutants(references: Iterable[str], count: int, seed: int = 0) -> list[Mutant]:
    """Mutants of references, the same for the same seed.

    Each is drawn by its own text and kind, so that a new reference leaves the others as they are.
    """
    cases = [(text, kind) for text in sorted(set(references)) for kind in MUTATIONS]
    cases.sort(key=lambda case: hashlib.sha256(f"{seed} {case}".encode()).digest())
    mutants = []
    for text, kind in cases:
        answer = MUTATIONS[kind](text, random.Random(f"{seed} {kind} {text!a}"))
        if answer != text:
            mutants.append(Mutant(kind, answer, text))
        if len(mutants) == count:
            break
    return mutants
