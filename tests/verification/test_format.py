import time

import pytest

from verification.format import check_format, last_box

PASSED = [
    ("<think>a</think>\\boxed{7}", "7"),
    ("<think></think>\\boxed{7}", "7"),
    ("<think>maybe \\boxed{1}</think> so \\boxed{7}.", "7"),
    ("<think>a</think>\\boxed{1} no, \\boxed{7}", "7"),
    ("<think>a\nb</think>\n\n\\boxed{ 7 }\n", "7"),
    ("<think>a</think>\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
    ("<think>a</think>\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
    ("<think>a</think>\\boxed{\\left\\{1\\right.}", "\\left\\{1\\right."),
    ("<think>a</think>\\boxed{x} and }", "x"),
    ("<think>a</think>\\boxed{\\boxed{3}}", "3"),
    ("<think>a < b > c</think>\\boxed{é中}", "é中"),
]
REFUSED = [
    ("", "no_think_start"),
    ("\\boxed{7}", "no_think_start"),
    (" <think>a</think>\\boxed{7}", "no_think_start"),
    ("Well <think>a</think>\\boxed{7}", "no_think_start"),
    ("<Think>a</Think>\\boxed{7}", "no_think_start"),
    ("<think >a</think>\\boxed{7}", "no_think_start"),
    ("</think><think>\\boxed{7}", "no_think_start"),
    ("<think>a<think>b</think>\\boxed{7}", "several_think_tags"),
    ("<think>a</think>b</think>\\boxed{7}", "several_think_tags"),
    ("<think>a</think><think>b</think>\\boxed{7}", "several_think_tags"),
    ("<think>a</think>\\boxed{7}</think>", "several_think_tags"),
    ("<think>a \\boxed{7}", "no_think_end"),
    ("<think>a</ think>\\boxed{7}", "no_think_end"),
    ("<think>a</think>", "no_boxed"),
    ("<think>a</think>7", "no_boxed"),
    ("<think>a</think>\\boxed 7", "no_boxed"),
    ("<think>a</think>boxed{7}", "no_boxed"),
    ("<think>\\boxed{7}</think>so 7", "box_before_think_end"),
    ("<think>a</think>\\boxed{7", "unclosed_box"),
    ("<think>a</think>\\boxed{\\frac{1}{2}", "unclosed_box"),
    ("<think>a</think>\\boxed{7\\}", "unclosed_box"),
    ("<think>a</think>\\boxed{1} \\boxed{7", "unclosed_box"),
    ("<think>a</think>\\boxed{}", "empty_box"),
    ("<think>a</think>\\boxed{ \n}", "empty_box"),
]


@pytest.mark.parametrize(("text", "answer"), PASSED)
def test_well_formed_response_gives_its_last_box(text: str, answer: str) -> None:
    check = check_format(text)
    assert check.is_passed
    assert check.answer == answer


@pytest.mark.parametrize(("text", "refusal"), REFUSED)
def test_malformed_response_is_refused_with_its_reason(text: str, refusal: str) -> None:
    check = check_format(text)
    assert (check.answer, check.refusal) == ("", refusal)


def test_double_backslash_does_not_hide_a_brace() -> None:
    assert last_box("\\boxed{a \\\\} b") == "a \\\\"


def test_absent_box_is_none() -> None:
    assert last_box("no box") is None


@pytest.mark.parametrize(
    "text",
    [
        "<think>" * 100_000,
        "<think></think>" + "\\boxed{" * 100_000,
        "<think></think>\\boxed{" + "{" * 500_000,
        "<think></think>\\boxed{" + "{" * 250_000 + "}" * 250_001,
        "<think></think>\\boxed{" + "\\" * 500_000,
        "<think>" + "<" * 500_000 + "</think" * 100_000,
        "<think></think>" + "\\boxed" * 100_000,
    ],
)
def test_hostile_text_takes_linear_time(text: str) -> None:
    start = time.process_time()
    check_format(text)
    # About 0.1 s for 0.5 MB; quadratic time would be many minutes.
    assert time.process_time() - start < 5
