import json
import time
from pathlib import Path

import pytest

from megatron_rl.config.thinking import HOUSE_TAGS, ThinkTags
from verification.format import (
    CUT_OFF_REFUSALS,
    fenced_blocks,
    last_box,
    split_response,
    think_box,
    think_code,
)  # fmt: skip

GOLDEN = [
    json.loads(line)
    for line in (Path(__file__).parent / "golden" / "format.jsonl").read_text().splitlines()
]
TAGS = [
    HOUSE_TAGS,
    ThinkTags(open="[THINK]", close="[/THINK]"),
    # A user's own, with characters that mean something in patterns.
    ThinkTags(open="(?:mull", close="|$)+"),
]
of_each_pair = pytest.mark.parametrize("tags", TAGS, ids=lambda tags: tags.open)
BOX_CASES = [case for case in GOLDEN if case["kind"] == "box"]
CODE_CASES = [case for case in GOLDEN if case["kind"] == "code"]
BOX_ENDS = ["\\boxed{1}", "</think>\\boxed{1}"]
PROGRAM = "\n```python\n1\n```"
CODE_ENDS = [*(f"{end}{PROGRAM}" for end in ("", "\n</think>", "\n````", "\n~~~")), "\n````\n~~~"]

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
    ("<think>a</think>\\boxed {7}", "7"),
    ("<think>a</think>\\boxed\n{7}", "7"),
    ("<think>a</think>\\boxed  \r\n {7}", "7"),
    ("<think>a</think>\\boxed {1} so \\boxed{7}, \\boxed 8", "7"),
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
    ("<think>a</think>\\boxed\n\n{7}", "no_boxed"),
    ("<think>\\boxed {7}</think>so 7", "box_before_think_end"),
    ("<think>a</think>boxed{7}", "no_boxed"),
    ("<think>\\boxed{7}</think>so 7", "box_before_think_end"),
    ("<think>a</think>\\boxed{7", "unclosed_box"),
    ("<think>a</think>\\boxed{\\frac{1}{2}", "unclosed_box"),
    ("<think>a</think>\\boxed{7\\}", "unclosed_box"),
    ("<think>a</think>\\boxed{1} \\boxed{7", "unclosed_box"),
    ("<think>a</think>\\boxed{}", "empty_box"),
    ("<think>a</think>\\boxed{ \n}", "empty_box"),
]


def written(text: str, tags: ThinkTags) -> str:
    """A text in other tags."""
    return text.replace(HOUSE_TAGS.open, tags.open).replace(HOUSE_TAGS.close, tags.close)


@of_each_pair
@pytest.mark.parametrize(("text", "answer"), PASSED)
def test_well_formed_response_gives_its_last_box(text: str, answer: str, tags: ThinkTags) -> None:
    check = think_box(written(text, tags), "", tags)
    assert not check.refusal
    assert check.answer == answer


@of_each_pair
@pytest.mark.parametrize(("text", "refusal"), REFUSED)
def test_malformed_response_is_refused_with_its_reason(
    text: str, refusal: str, tags: ThinkTags
) -> None:
    check = think_box(written(text, tags), "", tags)
    assert (check.answer, check.refusal) == ("", refusal)


def note(case: dict[str, str]) -> str:
    """Name of a golden case."""
    return case["note"]


def test_golden_set_is_large_and_names_every_refusal() -> None:
    assert len(BOX_CASES) >= 50
    assert len(CODE_CASES) >= 50
    assert {case["refusal"] for case in BOX_CASES} == {
        "", "no_think_start", "several_think_tags", "no_think_end", "no_boxed",
        "box_before_think_end", "unclosed_box", "empty_box",
    }  # fmt: skip
    assert {case["refusal"] for case in CODE_CASES} == {
        "", "no_think_start", "several_think_tags", "no_think_end", "no_code_block",
        "code_before_think_end", "no_language_tag", "unclosed_code_block", "empty_code_block",
    }  # fmt: skip


@of_each_pair
@pytest.mark.parametrize("case", BOX_CASES, ids=note)
def test_golden_box_gets_its_verdict(case: dict[str, str], tags: ThinkTags) -> None:
    check = think_box(written(case["text"], tags), "", tags)
    assert (check.answer, check.refusal) == (written(case["answer"], tags), case["refusal"])
    assert (not check.refusal) is (case["refusal"] == "")


@of_each_pair
@pytest.mark.parametrize("case", CODE_CASES, ids=note)
def test_golden_code_gets_its_verdict(case: dict[str, str], tags: ThinkTags) -> None:
    check = think_code(written(case["text"], tags), "", tags)
    assert (check.answer, check.tag, check.refusal) == (
        written(case["source"], tags), case["tag"], case["refusal"],
    )  # fmt: skip
    assert (not check.refusal) is (case["refusal"] == "")


@pytest.mark.parametrize("case", [case for case in GOLDEN if case["refusal"]], ids=note)
def test_refusals_of_cut_off_text_are_those_that_more_text_can_mend(case: dict[str, str]) -> None:
    if case["kind"] == "box":
        checks = [think_box(case["text"] + end) for end in BOX_ENDS]
    else:
        checks = [think_code(case["text"] + end) for end in CODE_ENDS]
    if not case["text"]:
        return  # An empty text can become anything, but no tag is missing yet.
    assert any(not check.refusal for check in checks) is (case["refusal"] in CUT_OFF_REFUSALS)


def test_tags_of_another_model_are_plain_text() -> None:
    mull = TAGS[1]
    assert think_box("<think>a</think>\\boxed{7}", "", mull).refusal == "no_think_start"
    mixed = "[THINK]<think>a</think>[/THINK]<think>\\boxed{7}"
    assert think_box(mixed, "", mull).answer == "7"


@of_each_pair
@pytest.mark.parametrize(
    ("text", "thoughts", "answer"),
    [
        ("<think>a</think>b", "a", "b"),
        ("<think>a</think>b</think>c", "a", "b</think>c"),
        ("<think>a", "a", ""),
        ("a</think>b", "a", "b"),
        ("b", "", "b"),
        ("", "", ""),
    ],
)
def test_response_is_split_at_the_end_of_its_thoughts(
    text: str, thoughts: str, answer: str, tags: ThinkTags
) -> None:
    assert split_response(written(text, tags), tags) == (thoughts, written(answer, tags))


def test_blocks_know_where_they_stand() -> None:
    text = "a\n```py\nb\n```\nc\n~~~\nd"
    first, second = fenced_blocks(text)
    assert (first.tag, first.source, first.is_closed) == ("py", "b\n", True)
    assert text[first.start : first.end] == "```py\nb\n```"
    assert (second.tag, second.source, second.is_closed) == ("", "d", False)
    assert text[second.start : second.end] == "~~~\nd"


def test_double_backslash_does_not_hide_a_brace() -> None:
    assert last_box("\\boxed{a \\\\} b") == "a \\\\"


def test_absent_box_is_none() -> None:
    assert last_box("no box") is None


@pytest.mark.parametrize(
    "text",
    [
        "<think>" * 100_000,
        "<think></think>" + "\\boxed{" * 100_000,
        "<think></think>\\boxed" + " " * 1_000_000,
        "<think></think>" + "\\boxed \n " * 100_000,
        "<think></think>\\boxed{" + "{" * 500_000,
        "<think></think>\\boxed{" + "{" * 250_000 + "}" * 250_001,
        "<think></think>\\boxed{" + "\\" * 500_000,
        "<think>" + "<" * 500_000 + "</think" * 100_000,
        "<think></think>" + "\\boxed" * 100_000,
    ],
)
def test_hostile_text_takes_linear_time(text: str) -> None:
    start = time.process_time()
    think_box(text)
    # About 0.1 s for 0.5 MB; quadratic time would be many minutes.
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    "body",
    [
        "`" * 1_000_000,
        "~" * 1_000_000,
        "`" * 500_000 + "x" + "`" * 500_000,
        "```\n" * 250_000,
        "```x\n" * 200_000,
        "``` `\n" * 160_000,
        "~~~\n```\n" * 120_000,
        "   ```\n" * 140_000,
        "   ```py\n" + " \n" * 500_000 + "```",
        "\n".join("`" * length for length in range(3, 1400)),
        "```" + "x" * 1_000_000,
        "```py" + " " * 1_000_000 + "\nx",
        "\n" * 1_000_000,
        "\r" * 1_000_000,
        " " * 1_000_000,
    ],
    ids=range(15),
)
def test_hostile_fences_take_linear_time(body: str) -> None:
    start = time.process_time()
    think_code("<think></think>" + body)
    think_code("<think>" + body + "</think>")
    # Below 0.5 s for 2 MB; quadratic time would be many minutes.
    assert time.process_time() - start < 10
