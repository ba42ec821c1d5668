"""Lines of a user's own JSONL file: their shapes, the errors, the split of those without one."""

import json
from pathlib import Path

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import PromptSource
from megatron_rl.data.jsonl_source import load_jsonl
from megatron_rl.protocol.types import ChatMessage, Prompt

GOOD = {"question": "6*7?", "answer": "42", "split": "train"}


def load(folder: Path, *lines: dict | str, **source: object) -> list[Prompt]:
    path = folder / "mine.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return load_jsonl(PromptSource(path=path, **source), seed=0)


@pytest.mark.parametrize(
    "question",
    [
        {"question": "6*7?"},
        {"problem": "6*7?"},
        {"prompt": "6*7?"},
        {"prompt": [{"role": "user", "content": "6*7?"}]},
        {"messages": [{"role": "user", "content": "6*7?"}]},
    ],
)
def test_a_question_may_have_the_names_that_datasets_give_it(
    tmp_path: Path, question: dict
) -> None:
    [prompt] = load(tmp_path, {**question, "answer": 42, "level": 3, "question_id": "x"})
    assert prompt.messages == [ChatMessage("user", "6*7?")]
    assert (prompt.id, prompt.task, prompt.answer) == ("mine:1", "math", "42")
    assert prompt.place == f"{tmp_path}/mine.jsonl:1"


def test_the_source_names_the_task_of_lines_that_name_none(tmp_path: Path) -> None:
    lines = [GOOD, {**GOOD, "task": "code", "id": 7, "answer": 0.5}]
    prompts = load(tmp_path, *lines, task="exact")
    assert [prompt.task for prompt in prompts] == ["exact", "code"]
    assert (prompts[1].id, prompts[1].answer) == ("7", "0.5")


def test_an_entry_may_be_json_or_its_text_and_needs_no_answer(tmp_path: Path) -> None:
    entry = {"rubric": "it is short", "n": [1, 2]}
    lines = [{"question": q, "entry": e} for q, e in (("a", entry), ("b", json.dumps(entry)))]
    prompts = load(tmp_path, *lines, {**GOOD, "entry": [3]})
    assert [json.loads(prompt.entry) for prompt in prompts] == [entry, entry, [3]]
    assert [prompt.answer for prompt in prompts] == ["", "", str(GOOD["answer"])]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"question": "q"}, r"there is no 'answer'; the row has question\. Rename the column"),
        ({"q": "1+1=", "answers": "2"}, r"the row has q, answers; did you mean 'answers'\?"),
        ({"question": "q", "task": "essay"}, r"needs no answer, write \"answer\": \"\""),
        # Only with this kind, which `load` sets, columns cannot be named.
        ({"q": "1+1=", "solution": "2"}, r"columns\.answer; .* leave out prompts\.kind = \"jsonl"),
        ({"answer": "1"}, r"there is no 'question'; the row has answer"),
        ({"messages": [], "answer": "1"}, r"there is no question"),
        ({"question": " ", "answer": "1"}, r"there is no question"),
        ({**GOOD, "prompt": "q"}, r"prompt and question are both given"),
        ({**GOOD, "answer": {"value": 3}}, r"Expected `.*`, got `object` - at `\$.answer`"),
        ({**GOOD, "answer": [[3]]}, r"Expected `.*`, got `array` - at `\$.answer"),
        ({**GOOD, "answer": []}, r"the answer is empty \(\[\]\)"),
        ({**GOOD, "answer": "N/A"}, r"the answer is empty"),
        ({**GOOD, "answer": [str(n) for n in range(65)]}, r"65 accepted answers; allowed are 64"),
        ({**GOOD, "pass_rate": "6/5"}, r'"pass_rate" is \'6/5\'; expected 0 to 1, "5/8"'),
        ({**GOOD, "answer": None}, r"got `null` - at `\$.answer`"),
        ({**GOOD, "split": "test"}, r'"split" is \'test\'; expected "train" or "held_out"'),
        ({**GOOD, "spilt": "held_out"}, r"unknown key 'spilt'; did you mean 'split'"),
        ({"mesages": [], "answer": "1"}, r"unknown key 'mesages'; did you mean 'messages'"),
        ("{not json", r"JSON is malformed"),
        ('{"question": "\\ude00?", "answer": "7"}', r"half of a surrogate pair \(\\ude00\)"),
        ({**GOOD, "answer": '["\\ud83dx", "7"]'}, r"half of a surrogate pair \(\\ud83d\)"),
        ('{"question": "\\ud83d\\ude00?", "answer": "7"', r"Input data was truncated"),
        ("[1]", r"Expected `object`, got `array`"),
    ],
)
def test_malformed_line_names_file_line_and_fault(
    tmp_path: Path, bad: dict | str, message: str
) -> None:
    with pytest.raises(InputError, match=rf"mine\.jsonl:2: .*{message}"):
        load(tmp_path, GOOD, bad)


def unsplit(count: int) -> list[dict]:
    return [{"question": f"{n}+1=", "answer": n + 1} for n in range(count)]


def test_lines_without_a_split_get_the_share_asked_for(tmp_path: Path) -> None:
    def held_out(share: float) -> set[str]:
        prompts = load(tmp_path, *unsplit(2000), held_out_share=share)
        assert {prompt.split for prompt in prompts} <= {"train", "held_out"}
        return {p.messages[0].content for p in prompts if p.split == "held_out"}

    tenth, third = held_out(0.1), held_out(1 / 3)
    # Five standard deviations of a binomial count.
    assert abs(len(tenth) - 200) < 5 * (2000 * 0.1 * 0.9) ** 0.5
    assert abs(len(third) - 667) < 5 * (2000 * 2 / 9) ** 0.5
    assert tenth < third
    assert held_out(0.0) == set() and len(held_out(1.0)) == 2000


def test_a_question_keeps_its_split_whatever_is_added_and_however_it_is_written(
    tmp_path: Path,
) -> None:
    first = {p.messages[0].content: p.split for p in load(tmp_path, *unsplit(300))}
    spaced = [{**line, "question": f" {n}+1= "} for n, line in enumerate(unsplit(300))]
    more = load(tmp_path, *reversed(unsplit(900)), *spaced)
    for prompt in more:
        question = prompt.messages[0].content.strip()
        assert prompt.split == first.get(question, prompt.split)
    by_question: dict[str, set[str]] = {}
    for prompt in more:
        by_question.setdefault(prompt.messages[0].content.strip(), set()).add(prompt.split)
    assert all(len(splits) == 1 for splits in by_question.values())


def test_a_given_split_wins_also_for_other_lines_of_that_question(tmp_path: Path) -> None:
    for split in ("train", "held_out"):
        lines = [{**line, "split": split} for line in unsplit(50)]
        prompts = load(tmp_path, *unsplit(50), *lines, held_out_share=0.5)
        assert {prompt.split for prompt in prompts} == {split}


def test_few_questions_have_one_held_out_at_least(tmp_path: Path) -> None:
    for count in (2, 3, 5):
        splits = [p.split for p in load(tmp_path, *unsplit(count), held_out_share=1e-9)]
        assert sorted(splits) == ["held_out"] + ["train"] * (count - 1)
    assert [p.split for p in load(tmp_path, *unsplit(1), held_out_share=1e-9)] == ["train"]


def test_no_key_of_ours_is_taken_for_a_slip(tmp_path: Path) -> None:
    line = {
        "question": "1+1=", "answer": "2", "task": "math", "id": "a", "split": "train",
        "entry": "", "language": "en", "pass_rate": 0.25,
    }  # fmt: skip
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(line) + "\n")
    [prompt] = load_jsonl(PromptSource(path=path), 0)
    assert (prompt.pass_rate, prompt.language, prompt.id) == (0.25, "en", "a")


def test_another_format_is_told_how_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1\xff\xfe")
    with pytest.raises(InputError, match=r"a\.parquet:1: .*read by prompts\.kind='files'"):
        load_jsonl(PromptSource(kind="jsonl", path=path), 0)
