"""Answers and rates as rows write them: what is a list, what a placeholder, what a rate."""

import time

import pytest

from megatron_rl.data.answers import (
    accepted_answers,
    has_placeholder,
    is_placeholder,
    read_rate,
    texts_of_list,
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('["\\\\frac{7}{2}", "3.5"]', ["\\frac{7}{2}", "3.5"]),
        # Written without escapes: JSON would read a form feed and a tab.
        ('["\\frac{7}{2}", "\\theta"]', ["\\frac{7}{2}", "\\theta"]),
        ("['7/2', \"it's\"]", ["7/2", "it's"]),
        (' [ "7" , ] ', ["7"]),
        ('["a, b", "c]"]', ["a, b", "c]"]),
        ('["\\u0037", "a\\"b"]', ["7", 'a"b']),
        # As json.dumps writes an emoji; a half alone stays, for `refuse_half_pairs`.
        ('["01289", "\\ud83d\\ude00", "\\ufeff1"]', ["01289", "\U0001f600", "\ufeff1"]),
        ('["\\ud83dx"]', ["\ud83dx"]),
        # One answer each: an interval, a matrix, a sequence, broken lists.
        ("[1, 2]", None),
        ("[1,2)", None),
        ("[[1,2],[3,4]]", None),
        ("[x, y]", None),
        ('["a" "b"]', None),
        ('["a", 3.50]', ["a", "3.50"]),
        ('["a", b]', None),
        ("[]", []),
        ('["a"', None),
        ("7", None),
    ],
)
def test_a_list_of_quoted_texts_is_a_list_and_nothing_else(
    text: str, found: list[str] | None
) -> None:
    assert texts_of_list(text) == found


def test_hostile_lists_take_linear_time() -> None:
    started = time.monotonic()
    for text in ('["' + "\\" * 200_000, '["a",' * 100_000 + "]", "['" + "a'," * 100_000 + "]"):
        texts_of_list(text)
    assert time.monotonic() - started < 30.0


def test_accepted_answers_are_different_and_not_empty() -> None:
    def read(value: object) -> list[str]:
        return accepted_answers(value, reads_text=True, is_math=True)

    assert read(["7", 7, " ", None, "7.0"]) == ["7", "7.0"]
    assert read("n/a") == read(["", "N/A"]) == []
    empty = [
        "[]",
        "[ ]",
        "{}",
        "$$",
        "\\boxed{}",
        "\\text{ }",
        "...",
        "?",
        "\u200b",
        "proof",
        "notfound",
    ]
    assert [one for one in empty if read(one) or read([one])] == []
    kept = ["-", "\\{\\}", "\\emptyset", "(0)", "+", "<", "None", "\\boxed{7}", "proof by cases"]
    assert [one for one in kept if read(one) != [one]] == []
    assert read('[3.5, "7/2"]') == read([3.5, "7/2"]) == ["3.5", "7/2"]
    plain = accepted_answers("['a']", reads_text=False, is_math=False)
    assert plain == ["['a']"] and accepted_answers("n/a", reads_text=True, is_math=False) == ["n/a"]


@pytest.mark.parametrize(
    ("value", "rate"),
    [
        ("5/8", 0.625), ("0/8", 0.0), ("8 / 8", 1.0), ("0.25", 0.25), ("62%", 0.62),
        ("1e-3", 0.001), (".5", 0.5), (0.625, 0.625), (1, 1.0), ("n/a", None), ("N/A", None),
        ("", None), ("0/0", None), (float("nan"), None), (None, None),
    ],
)  # fmt: skip
def test_rates_in_text_are_rates(value: object, rate: float | None) -> None:
    assert read_rate(value) == rate


@pytest.mark.parametrize("value", ["9/8", "62", "101%", "hard", "5/0", -0.1, 1.5, True, "-0.1"])
def test_other_values_are_no_rates(value: object) -> None:
    with pytest.raises(ValueError, match="expected 0 to 1"):
        read_rate(value)


def test_placeholders_are_told_from_short_answers() -> None:
    left = ["<answer>", "{question}", "PLACEHOLDER", "[TODO]", "{{ problem }}", "<placeholder>"]
    assert all(map(is_placeholder, left))
    assert has_placeholder("Solve the problem: {question}\nThink first.")
    kept = ["7", "\\{1,2\\}", "no solution", "answer", "\\text{question}", "(a)", "[x]", "Solution"]
    assert not any(map(is_placeholder, kept))
    assert not has_placeholder("What is \\text{problem} in $\\{x\\}$?")
