"""tools.make_tasks: disjoint questions, right answers, the asked share of wrong SFT examples."""

import json
import random
import re
import sys
from pathlib import Path

import pytest

from megatron_rl.config.tree import PromptSource
from megatron_rl.data import example_tasks
from megatron_rl.data.sources import load_jsonl
from tools import make_tasks

Lines = list[dict]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["make_tasks", *map(str, arguments)])
    make_tasks.main()


def read(path: Path) -> Lines:
    return [json.loads(line) for line in path.read_text().splitlines()]


def question(line: dict) -> str:
    return line["messages"][0]["content"]


def boxed(line: dict) -> str:
    match = re.fullmatch(r"<think>.*</think>\\boxed\{(.*)\}", line["response"], re.DOTALL)
    assert match, line
    return match[1]


def questions_by_use(folder: Path) -> list[set[str]]:
    prompts, examples = read(folder / "prompts.jsonl"), read(folder / "sft.jsonl")
    held_out = {question(line) for line in prompts if line["split"] == "held_out"}
    train = {question(line) for line in prompts if line["split"] == "train"}
    return [held_out, train, {question(line) for line in examples}]


def expression_value(text: str) -> int:
    """By hand: signs and numbers, read from left to right."""
    total, sign = 0, 1
    for token in text.removeprefix("Compute: ").removesuffix(" =").split(" "):
        if token in "+-":
            sign = 1 if token == "+" else -1
        else:
            total += sign * int(token)
    return total


@pytest.fixture
def sort_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    sizes = ["--train", 300, "--held-out", 40, "--sft-examples", 50]
    run(monkeypatch, "sort", tmp_path / "sort", *sizes)
    return tmp_path / "sort"


@pytest.fixture
def sums_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    sizes = ["--train", 300, "--held-out", 40, "--sft-examples", 50, "--wrong-share", 0.3]
    run(monkeypatch, "chain_sum", tmp_path / "sums", *sizes)
    return tmp_path / "sums"


@pytest.mark.parametrize("name", ["sort_folder", "sums_folder"])
def test_no_question_has_two_uses(name: str, request: pytest.FixtureRequest) -> None:
    held_out, train, taught = questions_by_use(request.getfixturevalue(name))
    assert (len(held_out), len(train), len(taught)) == (40, 300, 50)
    assert len(held_out | train | taught) == 390


def test_sort_answers_are_the_digits_in_order(sort_folder: Path) -> None:
    for line in read(sort_folder / "prompts.jsonl"):
        digits = re.fullmatch(r"sort (\d{5})=", question(line))[1]
        assert line["answer"] == "".join(sorted(digits))
        assert line["task"] == "exact"


def test_a_wrong_sort_trace_is_descending(sort_folder: Path) -> None:
    examples = read(sort_folder / "sft.jsonl")
    ascending = ["".join(sorted(question(line)[5:10])) for line in examples]
    pairs = list(zip(examples, ascending, strict=True))
    right = [line for line, answer in pairs if boxed(line) == answer]
    descending = [line for line, answer in pairs if boxed(line) == answer[::-1]]
    assert (len(right), len(descending)) == (20, 30)  # 60 % of 50 are wrong


def test_held_out_questions_are_the_same_for_every_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for seed in (0, 1):
        sizes = ["--train", 30, "--held-out", 40, "--sft-examples", 5, "--seed", seed]
        run(monkeypatch, "sort", tmp_path / str(seed), *sizes)
        found.append(questions_by_use(tmp_path / str(seed)))
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1]


def test_chain_sum_answers_are_the_values_of_the_questions(sums_folder: Path) -> None:
    for line in read(sums_folder / "prompts.jsonl"):
        assert int(line["answer"]) == expression_value(question(line))
        assert line["task"] == "math"


def test_right_examples_have_right_steps_and_the_asked_share_is_wrong(sums_folder: Path) -> None:
    examples = read(sums_folder / "sft.jsonl")
    wrong = [line for line in examples if int(boxed(line)) != expression_value(question(line))]
    assert len(wrong) == 15  # 30 % of 50
    for line in examples:
        steps = line["response"].removeprefix("<think>").split("</think>")[0].splitlines()
        false_steps = 0
        for step in steps:
            left, operator, right, result = re.fullmatch(
                r"(-?\d+)([+-])(\d+)=(-?\d+)", step
            ).groups()
            value = int(left) + int(right) * (1 if operator == "+" else -1)
            false_steps += value != int(result)
        assert false_steps == (line in wrong)
        assert steps[-1].endswith(f"={boxed(line)}")


def test_partial_sums_by_hand() -> None:
    solved = example_tasks.partial_sums([12, 7, -30], [0, 0, 0])
    assert (solved.thoughts, solved.answer) == ("12+7=19\n19-30=-11", "-11")
    slipped = example_tasks.partial_sums([12, 7, -30], [0, 10, 0])
    assert (slipped.thoughts, slipped.answer) == ("12+7=29\n29-30=-1", "-1")


@pytest.mark.parametrize("name", sorted(example_tasks.MISTAKES))
def test_every_mistake_changes_the_answer(name: str) -> None:
    rng = random.Random(0)
    for terms in ([4, -9], [0, 5, -7], [3, 0, 4], [50, -20, 1]):
        assert example_tasks.MISTAKES[name](terms, rng).answer != str(sum(terms))


def test_dropping_the_last_term_leaves_the_steps_before_it() -> None:
    solved = example_tasks.drop_last([6, 5, -4], random.Random(0))
    assert (solved.thoughts, solved.answer) == ("6+5=11", "11")


def test_compact_questions_have_no_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [
        "--train",
        20,
        "--held-out",
        20,
        "--sft-examples",
        10,
        "--terms",
        3,
        3,
        "--digits",
        1,
        1,
    ]
    options = ["--template", "{question}", "--compact", "--mistake", "drop_last"]
    run(monkeypatch, "chain_sum", tmp_path, *sizes, *options)
    for questions in questions_by_use(tmp_path):
        assert questions and all(re.fullmatch(r"\d([+-]\d){2}=", text) for text in questions)


def test_examples_of_other_sizes_leave_the_held_out_questions_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [
        "--train",
        100,
        "--held-out",
        60,
        "--sft-examples",
        40,
        "--terms",
        2,
        3,
        "--digits",
        1,
        1,
    ]
    run(monkeypatch, "chain_sum", tmp_path, *sizes, "--sft-terms", 2, 2, "--sft-digits", 1, 1)
    held_out, train, taught = questions_by_use(tmp_path)
    assert all(len(re.findall(r"\d+", text)) == 2 for text in taught)
    assert (held_out | train) & taught == set()


def test_the_queue_reads_the_prompts(sort_folder: Path) -> None:
    prompts = load_jsonl(PromptSource(path=sort_folder / "prompts.jsonl"), 0)
    assert len(prompts) == 340
    assert len({prompt.id for prompt in prompts}) == 340


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sort", "--held-out", "40000"], "fewer than the 40000"),
        (["chain_sum", "--terms", "2", "2", "--digits", "1", "1"], "too few different questions"),
        (["sort", "--wrong-share", "1.5"], "not between 0 and 1"),
    ],
)
def test_impossible_sizes_are_one_clear_error(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, arguments[0], tmp_path, *arguments[1:])
    assert list(tmp_path.iterdir()) == []
