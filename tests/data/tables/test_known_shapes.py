"""Small files in the shape of well-known data sets, written by hand: what is taken of each."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.prompts import PromptSource
from megatron_rl.data.tables.columns import find_columns
from megatron_rl.data.tables.data_sets import DATA_SETS, OWN, PARTS, DataSet
from megatron_rl.data.tables.source import Reading, read_files

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def read(path: Path, **source: Any) -> Reading:
    return read_files(PromptSource(path=path, **source))


def pairs(reading: Reading) -> list[tuple[str, str]]:
    return [(prompt.question, prompt.answer) for prompt in reading.prompts]


ANSWERS = {"all": "7", "after_hashes": "3+4 = 7\n#### 7", "last_boxed": "so \\boxed{7}"}


@pytest.mark.parametrize("one", [one for one in DATA_SETS if one.answer or one.tests])
def test_columns_of_each_entry_of_the_table_are_found(one: DataSet) -> None:
    row = dict.fromkeys(one.tests.split(", "), "assert f()")
    row |= {one.question: f"{one.prefix} 3+4? {one.suffix}", one.id: "a"}
    row |= {one.answer: ANSWERS[one.part], one.pass_rate: "4/8", one.kind: "math"}
    row |= dict.fromkeys(one.marks, "chain_sum")
    row.pop("", None)
    fields: dict[str, Any] = {}
    for column, value in row.items():
        # A dot enters a structure.
        first, _, inner = column.partition(".")
        outer = fields.get(first) if isinstance(fields.get(first), dict) else {}
        fields[first] = {**outer, inner: value} if inner else value
    found = find_columns(PromptSource(), list(row), [fields], place="file", is_lines=False)
    keys = ("question", "answer", "part", "tests", "id", "pass_rate", "prefix", "suffix", "kind")
    assert {key: getattr(found, key) for key in keys} == {key: getattr(one, key) for key in keys}
    assert found.form == (one.name if one.names or one.name == OWN else "")


def test_the_guide_lists_the_table() -> None:
    assert set(PARTS) == {one.part for one in DATA_SETS} - {"all"}
    guide = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    assert {name for one in DATA_SETS for name in one.names if name not in guide} == set()


GSM8K = [
    {"question": "Natalia sold clips to 48 friends, then half as many. How many?",
     "answer": "She sold 48/2 = <<48/2=24>>24 in May.\n48+24 = <<48+24=72>>72.\n#### 72"},
    {"question": "How much are two houses of $500,750?",
     "answer": "500,750 * 2 = 1,001,500\n#### 1,001,500"},
]  # fmt: skip


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_gsm8k(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"gsm8k.{suffix}"
    if suffix == "parquet":
        write(path, GSM8K)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in GSM8K))
    reading = read(path)
    assert [answer for _, answer in pairs(reading)] == ["72", "1001500"]
    assert [prompt.id for prompt in reading.prompts] == ["gsm8k:1", "gsm8k:2"]
    assert 'answer = answer after "####"' in reading.notes[0]


def test_math(tmp_path: Path) -> None:
    rows = [
        {"problem": "What is $1+1$?", "level": "Level 1", "type": "Algebra",
         "solution": "First \\boxed{3} is wrong, so \\boxed{\\frac{4}{2}}."},
        {"problem": "And $2+3$?", "level": "Level 5", "type": "Algebra",
         "solution": "We get $\\boxed 5$."},
        {"problem": "A set?", "level": "Level 5", "type": "Sets",
         "solution": "It is $\\fbox{\\{1, 2\\}}$ of course."},
    ]  # fmt: skip
    path = write(tmp_path / "train.parquet", rows)
    assert [a for _, a in pairs(read(path))] == ["\\frac{4}{2}", "5", "\\{1, 2\\}"]
    hard = read(path, where=["level == 'Level 5'"])
    assert [prompt.id for prompt in hard.prompts] == ["train:2", "train:3"]
    assert "rows left out: 1 where" in hard.notes[0]


def test_math_500_takes_its_answers_and_ids(tmp_path: Path) -> None:
    rows = [{"problem": f"p{n}", "solution": f"so \\boxed{{{n}}}", "answer": str(n + 100),
             "subject": "Algebra", "level": n, "unique_id": f"test/algebra/{n}.json"}
            for n in range(3)]  # fmt: skip
    reading = read(write(tmp_path / "test.parquet", rows))
    assert [a for _, a in pairs(reading)] == ["100", "101", "102"]
    assert reading.prompts[2].id == "test/algebra/2.json"


def dapo_row(number: int) -> dict[str, Any]:
    content = (
        "Solve the following math problem step by step. The last line of your response should be "
        "of the form Answer: $Answer (without quotes) where $Answer is the answer to the "
        f"problem.\n\nWhat is {number}+1?\n\nRemember to put your answer on its own line after "
        '"Answer:".'
    )
    return {
        "data_source": "math_dapo", "ability": "MATH",
        "prompt": [{"content": content, "role": "user"}],
        "reward_model": {"ground_truth": str(number + 1), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"9a9b{number}"},
    }  # fmt: skip


def test_dapo_17k_without_its_instructions_and_repetitions(tmp_path: Path) -> None:
    path = write(tmp_path / "dapo-math-17k.parquet", [dapo_row(n % 4) for n in range(12)])
    reading = read(path)
    assert pairs(reading) == [(f"What is {n}+1?", str(n + 1)) for n in range(4)]
    assert [prompt.id for prompt in reading.prompts] == [f"dapo-math-17k:{n}" for n in range(1, 5)]
    assert "answer = reward_model.ground_truth" in reading.notes[0]
    assert "8 repeated" in reading.notes[0]
    assert len(read(path, repeated="keep").prompts) == 12


def test_dapo_processed(tmp_path: Path) -> None:
    row = {"prompt": "In triangle ABC, ...", "solution": "34", "data_source": "math_dapo",
           "source_prompt": dapo_row(1)["prompt"], "ability": "MATH",
           "reward_model": {"ground_truth": "34", "style": "rule"},
           "extra_info": {"index": "9a9b"}}  # fmt: skip
    assert pairs(read(write(tmp_path / "a.parquet", [row]))) == [("In triangle ABC, ...", "34")]


def test_deepscaler_is_one_array_of_json(tmp_path: Path) -> None:
    rows = [{"problem": "P1", "answer": "-\\frac{2}{3}", "solution": "1. ..."},
            {"problem": "P2", "answer": 9, "solution": ""}]  # fmt: skip
    (tmp_path / "deepscaler.json").write_text(json.dumps(rows, indent=2))
    assert pairs(read(tmp_path / "deepscaler.json")) == [("P1", "-\\frac{2}{3}"), ("P2", "9")]


def openr1_row(number: int, answer: str | None) -> dict[str, Any]:
    return {
        "problem": f"P{number}", "solution": "Long.", "answer": answer, "problem_type": "Algebra",
        "question_type": "math-word-problem", "source": "olympiads", "uuid": f"u-{number}",
        "is_reasoning_complete": [True, False], "generations": ["<think>..", "<think>.."],
        "correctness_count": number,
        "messages": [{"role": "user", "content": f"P{number}"},
                     {"role": "assistant", "content": "<think>.."}],
    }  # fmt: skip


def test_openr1_takes_the_problem_and_not_the_worked_messages(tmp_path: Path) -> None:
    path = write(tmp_path / "default.parquet", [openr1_row(1, "(-3,2)"), openr1_row(2, "7")])
    reading = read(path)
    assert pairs(reading) == [("P1", "(-3,2)"), ("P2", "7")]
    assert [len(prompt.messages) for prompt in reading.prompts] == [1, 1]
    assert [prompt.id for prompt in reading.prompts] == ["u-1", "u-2"]


def test_rows_without_an_answer_are_refused_or_counted(tmp_path: Path) -> None:
    rows = [openr1_row(1, "4"), openr1_row(2, None), openr1_row(3, "5"), openr1_row(4, None)]
    path = write(tmp_path / "default.parquet", rows)
    said = r"default\.parquet:row 2: the column 'answer' has no value.*faulty"
    with pytest.raises(InputError, match=said):
        read(path)
    reading = read(path, faulty="drop")
    assert [prompt.id for prompt in reading.prompts] == ["u-1", "u-3"]
    assert f"2 no_answer (first {path}:row 2)" in reading.notes[0]


def test_numina_answers_are_in_the_boxes_of_most_solutions(tmp_path: Path) -> None:
    rows = [{"source": "aops", "problem": "p", "solution": "... \\boxed{12}",
             "messages": [{"role": "user", "content": "p"}]},
            {"source": "aops", "problem": "q", "solution": "A proof.",
             "messages": [{"role": "user", "content": "q"}]}]  # fmt: skip
    reading = read(write(tmp_path / "a.parquet", rows), faulty="drop")
    assert pairs(reading) == [("p", "12")]
    assert "1 no_answer" in reading.notes[0]


def test_big_math_solve_rates_are_pass_rates(tmp_path: Path) -> None:
    rows = [
        {"problem": name, "answer": "1", "source": "orca", "llama8b_solve_rate": rate}
        for name, rate in (("p", 0.25), ("q", None))
    ]
    reading = read(write(tmp_path / "a.parquet", rows))
    assert [prompt.pass_rate for prompt in reading.prompts] == [0.25, None]


def test_names_in_capitals_as_those_of_aime(tmp_path: Path) -> None:
    rows = [{"ID": "2024-I-4", "Problem": "Jen enters", "Solution": "..", "Answer": 116}]
    [prompt] = read(write(tmp_path / "aime.parquet", rows)).prompts
    assert (prompt.id, prompt.question, prompt.answer) == ("2024-I-4", "Jen enters", "116")


def test_a_problem_in_the_form_of_verl_keeps_its_system_message(tmp_path: Path) -> None:
    row = dapo_row(1) | {"prompt": [{"role": "system", "content": "Be brief."},
                                    {"role": "user", "content": "1+1?"}]}  # fmt: skip
    [prompt] = read(write(tmp_path / "a.parquet", [row])).prompts
    assert [(m.role, m.content) for m in prompt.messages] == [
        ("system", "Be brief."), ("user", "1+1?"),
    ]  # fmt: skip
