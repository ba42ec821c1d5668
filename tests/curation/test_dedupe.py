"""Planted near duplicates are found, problems that differ in numbers are left, by counts."""

import itertools
import random
import re
import sys
from pathlib import Path

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.curation.duplicates import (
    NearDuplicates,
    bands,
    decides_alike,
    decontaminate,
    dedupe,
    fingerprint,
    jaccard,
)
from megatron_rl.curation.rows import Row
from megatron_rl.protocol.types import ChatMessage, Prompt

THINGS = "apples pears coins marbles books tiles stamps shells cards bricks".split()
NAMES = "Anna Boris Clara David Elena Farid Greta Hugo Irene Jonas".split()
PLACES = "market garden library harbour workshop school station bakery museum theatre".split()
TEMPLATES = (
    "{name} brings {a} {thing} to the {place} and gives away {b} of them on the way home. How many "
    "{thing} does {name} have left when the {place} closes?",
    "Let $f(x) = {a}x^2 - {b}x + {c}$ be a polynomial with real coefficients. Compute the value of "
    "$f({b})$ and write it in lowest terms.",
    "A rectangle in the {place} has sides of length ${a}$ and ${b}$ metres. What is the length of "
    "its diagonal, if every metre of it costs {c} {thing}?",
    "Find the number of ways in which {name} can put {a} {thing} on {b} shelves of the {place} so "
    "that no shelf is empty and each has at most {c}.",
    "The sequence $a_1, a_2, \\ldots$ has $a_1 = {a}$ and $a_{{n+1}} = {b} a_n + {c}$ for all $n$. "
    "Determine the remainder of $a_{{10}}$ when it is divided by ${c}$.",
)
ONE_WORD = {
    "brings": "carries", "polynomial": "function", "length": "size", "shelves": "boards",
    "remainder": "rest",
}  # fmt: skip


def problem(number: int) -> str:
    rng = random.Random(number)
    a, b, c = rng.sample(range(3, 400), 3)
    values = {"name": rng.choice(NAMES), "thing": rng.choice(THINGS), "place": rng.choice(PLACES)}
    return TEMPLATES[number % len(TEMPLATES)].format(a=a, b=b, c=c, **values)


def spaced(text: str) -> str:
    return text.replace(" ", "  \n", 3).replace("?", " ?") + "\n"


def in_latex(text: str) -> str:
    if "$" not in text:
        return re.sub(r"\d+", r"$\\;\g<0>$", text)
    return text.replace("x^2", "x^{2}").replace("= ", "=\\;").replace("$", "").replace("f(", "f (")


def one_word(text: str) -> str:
    before, after = next((b, a) for b, a in ONE_WORD.items() if b in text)
    return text.replace(before, after)


def reworded(text: str) -> str:
    changes = {
        "How many": "What number of", "Compute": "Calculate", "What is": "Find",
        "so that": "such that", "Determine": "Find", "has sides": "possesses sides",
        "Let": "Suppose",
    }  # fmt: skip
    for before, after in changes.items():
        text = text.replace(before, after)
    return text


def other_numbers(text: str) -> str:
    return "".join(str((int(c) + 1) % 10) if c.isdigit() else c for c in text)


def swapped_numbers(text: str) -> str:
    numbers = fingerprint(text).numbers
    first, second = numbers[0], next(n for n in numbers if n != numbers[0])
    return text.replace(first, "#").replace(second, first).replace("#", second)


SAME = (spaced, str.upper, in_latex, one_word, reworded)


def rows(texts: list[str], *, prefix: str = "p", split: str = "train") -> list[Row]:
    return [
        Row({}, Prompt(f"{prefix}{i}", "math", [ChatMessage("user", text)], "7", split,
                       place=f"{prefix}:{i}"))
        for i, text in enumerate(texts)
    ]  # fmt: skip


@pytest.mark.parametrize("change", SAME, ids=lambda f: f.__name__)
def test_planted_near_duplicates_are_all_found(change: object) -> None:
    assert callable(change)
    originals = [problem(i) for i in range(200)]
    planted = [change(text) for text in originals]
    assert all(text != other for text, other in zip(originals, planted, strict=True))
    outcome = dedupe(rows(originals + planted), threshold=0.7)
    assert [row.prompt.id for row in outcome.rows] == [f"p{i}" for i in range(200)]
    assert outcome.report.dropped == {"duplicate": 200}
    # Each was dropped for the one that it was made from.
    assert [d.detail.partition(" like ")[2] for d in outcome.report.drops] == [
        f"p:{i}" for i in range(200)
    ]
    clean = decontaminate(rows(planted, prefix="t"), rows(originals), threshold=0.7)
    assert clean.rows == [] and clean.report.figures["evaluation_problems_found"] == 200


def test_problems_that_differ_in_numbers_alone_are_kept() -> None:
    originals = [problem(i) for i in range(200)]
    texts = originals + [other_numbers(text) for text in originals]
    assert len(dedupe(rows(texts), threshold=0.7).rows) == 400
    assert len(dedupe(rows(texts), threshold=0.3).rows) == 400
    train = rows([other_numbers(text) for text in originals], prefix="t")
    assert len(decontaminate(train, rows(originals), threshold=0.7).rows) == 200


def test_numbers_in_another_order_are_another_problem_but_no_clean_one() -> None:
    originals = [problem(i) for i in range(0, 200, 5)]
    swapped = [swapped_numbers(text) for text in originals]
    assert len(dedupe(rows(originals + swapped), threshold=0.7).rows) == 80
    assert decontaminate(rows(swapped, prefix="t"), rows(originals), threshold=0.7).rows == []


def test_different_problems_are_no_duplicates() -> None:
    outcome = dedupe(rows([problem(i) for i in range(3000)]), threshold=0.7)
    # None of them shares its numbers with another: a drop would be false.
    assert len(outcome.rows) == 3000
    # Nor is it compared with the hundreds of the same template.
    assert outcome.report.figures["pairs_compared"] < 30


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("Find the maximum of $x+y$ on the unit disc in the plane.",
         "Find the minimum of $x+y$ on the unit disc in the plane.", False),
        ("Find the maximum of $x+y$ on the unit disc in the plane.",
         "Compute the largest value... of $x+y$ on the unit disc in the plane", True),
        ("What is $\\sin 30$ plus one in a right angled triangle of unit side?",
         "What is $\\cos 30$ plus one in a right angled triangle of unit side?", False),
        ("Compute $17 + 25$.", "Compute $17 - 25$.", False),
        ("Anna has three cats, and buys 1,000 more at the fair. How many has she?",
         "Anna has 3 cats, and buys 1000 more at the fair.  How many has she?", True),
        ("Let $\\dfrac{1}{2} \\le x$ hold; find all such whole numbers $x$.",
         "Let $\\frac{1}{2} \\leq x$ hold; find all such whole numbers $x$.", True),
        ("How many of the first 9 primes are even?", "How many of the first 9 primes are odd?",
         False),
        ("Solve $x = 2.50$ for the unknown side of the box.",
         "Solve $x = 2.5$ for the unknown side of the box.", True),
    ],
)  # fmt: skip
def test_what_decides_about_the_answer_must_be_equal(one: str, other: str, is_same: bool) -> None:
    assert (len(dedupe(rows([one, other]), threshold=0.6).rows) == 1) == is_same


def test_the_index_finds_the_pairs_that_a_comparison_of_all_finds() -> None:
    # Words drawn from few, so that similarities lie on both sides of the threshold.
    rng = random.Random(5)
    words = [f"{a}{b}a" for a, b in itertools.product("bdfgklmnprstvz", "aeiou")]
    texts = []
    for _ in range(60):
        base = [rng.choice(words) for _ in range(25)]
        for changed in range(5):
            text = list(base)
            for place in rng.sample(range(25), changed):
                text[place] = rng.choice(words)
            texts.append(" ".join(text))
    prints = [fingerprint(text) for text in texts]
    found, missed = 0, 0
    index = NearDuplicates(0.7, ordered=True)
    for i, text in enumerate(texts):
        similar = [j for j in range(i) if jaccard(prints[i], prints[j]) >= 0.7]
        question = index.prepare(text)
        match = index.find(question)
        found += match is not None
        missed += bool(similar) and match is None
        assert match is None or int(match.key) in similar
        index.add(str(i), question)
    assert found > 100 and missed == 0


def test_jaccard_of_a_pair_by_hand() -> None:
    # {a, b, c, "a b", "b c"} and {a, b, d, "a b", "b d"}: 3 of 7.
    assert jaccard(fingerprint("a b c"), fingerprint("A, b; d")) == pytest.approx(3 / 7)
    assert jaccard(fingerprint(""), fingerprint("")) == 0.0
    assert decides_alike(fingerprint("2 + 3"), fingerprint("3 + 2"), ordered=False)


def test_bands_miss_fewer_than_one_pair_in_a_thousand() -> None:
    assert bands(0.7) == (32, 4)
    for threshold in (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        count, size = bands(threshold)
        assert count * size <= 128 and (1 - threshold**size) ** count <= 1e-3


def test_held_out_problems_stay_and_other_answers_are_named() -> None:
    text = problem(0)
    train, held_out = rows([text, text]), rows([text], prefix="h", split="held_out")
    outcome = dedupe([*train, *held_out], threshold=0.7)
    assert [row.prompt.id for row in outcome.rows] == ["h0"]
    other = rows([text], prefix="o")[0].replace(answer="8")
    assert dedupe([train[0], other], threshold=0.7).report.dropped == {
        "duplicate_with_other_answer": 1
    }


@pytest.mark.parametrize(
    ("earlier", "is_same"),
    [
        (["user", "Here are 2 Apples.", "assistant", "Seen."], True),
        (["user", "here  are 2 apples.", "assistant", "seen."], True),
        (["user", "Here are 3 apples.", "assistant", "Seen."], False),
        (["assistant", "Here are 2 Apples.", "user", "Seen."], False),
        ([], False),
        (["system", "Think.", "user", "Here are 2 Apples.", "assistant", "Seen."], True),
    ],
)
def test_turns_before_a_question_are_a_part_of_the_problem(
    earlier: list[str], is_same: bool
) -> None:
    question = "What is the total price of the fruit in the table above?"
    first = ["user", "Here are 2 Apples.", "assistant", "Seen."]
    one, other = with_earlier("one", first, question), with_earlier("other", earlier, question)
    assert len(dedupe([one, other], threshold=0.7).rows) == (1 if is_same else 2)
    assert decontaminate([one], [other], threshold=0.7).rows == []


def test_a_system_message_counts_where_both_problems_have_one() -> None:
    plain, *told = (
        with_earlier(name, ["system", name] if name else [], problem(0)) for name in ("", "a", "b")
    )
    assert [len(dedupe(pair, threshold=0.7).rows) for pair in ([plain, told[0]], told)] == [1, 2]


def with_earlier(name: str, earlier: list[str], question: str) -> Row:
    said = [*zip(earlier[::2], earlier[1::2], strict=True), ("user", question)]
    messages = [ChatMessage(role, content) for role, content in said]
    return Row({}, Prompt(name, "math", messages, "7", place=name))


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(InputError, match="pip install datasketch==2.0.0"):
        dedupe(rows(["a"]), threshold=0.7)
    monkeypatch.undo()
    with pytest.raises(InputError, match="--threshold=0.1"):
        dedupe(rows(["a"]), threshold=0.1)
