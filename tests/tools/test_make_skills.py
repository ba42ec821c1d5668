"""tools.make_skills: right answers, disjoint questions, programs that the sandbox accepts."""

import json
import re
import sys
from pathlib import Path

import pytest

from megatron_rl.data.tiny_model import make_folder
from tools import make_skills
from tools.make_skills import Counts, make
from verification.library import Grading, Sample

SMALL = Counts(
    train=30, held_out=12, sft_examples=10, followed=14, wrong_share=0.6, expert_wrong_share=0.1
)


def digits_of(line: dict) -> str:
    text = line.get("question") or line["messages"][0]["content"]
    return re.fullmatch(r"[a-z]{4} ([1-9]{5})=", text)[1]


def test_no_digits_are_asked_about_twice() -> None:
    files = make(SMALL, seed=0)
    lines = [line for name in ("math", "code", "instructions") for line in files[name]]
    lines += files["sft"] + files["expert"][:20]
    assert len(lines) == 42 + 42 + 12 + 34 + 20
    assert len({digits_of(line) for line in lines}) == len(lines)
    assert files["expert"][20:] == files["sft"][20:] == files["instruction_examples"]


def test_answers_of_math_and_of_instructions_by_hand() -> None:
    assert make_skills.math_line("37824")["answer"] == "23478"
    answers = [make_skills.instruction_line("37824", name)["answer"] for name in
               ("copy", "back", "head", "tail")]  # fmt: skip
    assert answers == ["37824", "42873", "3", "4"]
    files = make(SMALL, seed=0)
    asked = [line["question"].split()[0] for line in files["instructions"]]
    assert asked == ["copy", "back", "head", "tail"] * 3


@pytest.mark.parametrize(("name", "wrong"), [("sft", 6), ("expert", 1)])
def test_as_many_examples_of_each_skill_are_wrong_as_asked_for(name: str, wrong: int) -> None:
    lines = make(SMALL, seed=0)[name]
    for part in (lines[:10], lines[10:20]):
        found = [re.search(r"(\d{5})", line["response"])[1] for line in part]
        descending = ["".join(sorted(digits_of(line), reverse=True)) for line in part]
        assert sum(a == b for a, b in zip(found, descending, strict=True)) == wrong


def test_right_programs_pass_their_tests_and_wrong_ones_fail() -> None:
    files = make(SMALL, seed=0)
    line = files["code"][0]
    right = "".join(sorted(digits_of(line)))
    with Grading() as grading:
        scores = grading.score(
            Sample(text=make_skills.code_reply(answer), task="code", entry=line["entry"])
            for answer in (right, right[::-1])
        )
    assert [score.parts["correct"] for score in scores] == [0.9, 0.0]


def test_the_model_has_one_token_for_each_fence(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    make_folder(tmp_path / "model", seed=0, programs=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = make_skills.code_reply("12345")
    ids = tokenizer.encode(text, add_special_tokens=False)
    # Two tags, two fences, and a token for each character of the line between.
    assert len(ids) == 4 + len("print(12345+int(input()))")
    assert tokenizer.decode(ids) == text and len(tokenizer) == 64


def test_too_many_lines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["make_skills", str(tmp_path / "out"), "--train", "9000"])
    with pytest.raises(SystemExit, match="there are 15120"):
        make_skills.main()
    assert not (tmp_path / "out").exists()


def test_the_files_are_those_of_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["make_skills", str(tmp_path)])
    make_skills.main()
    assert {path.stem for path in tmp_path.iterdir()} == set(make(Counts(), seed=0))
    lines = [json.loads(line) for line in (tmp_path / "math.jsonl").read_text().splitlines()]
    assert lines == make(Counts(), seed=0)["math"] != make(Counts(), seed=1)["math"]
