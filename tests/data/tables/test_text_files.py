"""Text files as people have them: compressed, CSV, marks of encodings, JSON in one value."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import read_layers, resolve
from megatron_rl.config.prompts import PromptSource
from megatron_rl.curation.rows import read_rows
from megatron_rl.data.tables.source import Reading, read_files

ROWS = [{"question": f"{n}+1, é?", "answer": f"so\n#### {n + 1}"} for n in range(3)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in ROWS).encode()
TABLE = "question,answer\n" + "".join(f'"{r["question"]}","{r["answer"]}"\n' for r in ROWS)
MARK = b"\xef\xbb\xbf"


def read(path: Path, **source: Any) -> Reading:
    return read_files(PromptSource(path=path, held_out_share=0.0, **source))


@pytest.mark.parametrize(
    ("name", "content", "row"),
    [
        ("a.jsonl", MARK + LINES, "1"),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0), "1"),
        ("a.json", LINES, "row 1"),
        ("a.json", MARK + json.dumps(ROWS, indent=2).encode(), "row 1"),
        ("a.json", json.dumps({"data": ROWS}).encode(), "row 1"),
        ("a.json", json.dumps({"version": 1, "by": {"x": 1}, "data": ROWS}).encode(), "row 1"),
        ("a.json.gz", gzip.compress(json.dumps(ROWS).encode(), mtime=0), "row 1"),
        ("a.csv", MARK + TABLE.replace("\n", "\r\n").encode(), "row 1"),
        ("a.csv.gz", gzip.compress(TABLE.encode(), mtime=0), "row 1"),
        ("a.tsv", TABLE.replace('","', '"\t"').replace("n,a", "n\ta").encode(), "row 1"),
    ],
)  # fmt: skip
def test_text_of_every_kind_holds_the_same_rows(
    tmp_path: Path, name: str, content: bytes, row: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    prompts = read(path).prompts
    assert [(p.question, p.answer) for p in prompts] == [
        ("0+1, é?", "1"), ("1+1, é?", "2"), ("2+1, é?", "3"),
    ]  # fmt: skip
    assert (prompts[0].id, prompts[0].place) == ("a:1", f"{path}:{row}")
    assert [row.prompt.answer for row in read_rows(path, task="math")] == ["1", "2", "3"]


def test_a_file_with_one_object_is_one_row(tmp_path: Path) -> None:
    """MATH as its authors publish it: a file for each problem."""
    for number in range(2):
        problem = {"problem": f"p{number}", "level": "Level 5", "solution": f"\\boxed{{{number}}}"}
        (tmp_path / f"{number}.json").write_text(json.dumps(problem, indent=4))
    assert [p.answer for p in read(tmp_path).prompts] == ["0", "1"]


def test_one_object_with_messages_is_one_row(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "1+1?"}]
    (tmp_path / "a.json").write_text(json.dumps({"messages": turns, "answer": 2, "level": 3}))
    [prompt] = read(tmp_path / "a.json").prompts
    assert (prompt.question, prompt.answer) == ("1+1?", "2")


@pytest.mark.parametrize("form", ["{%s}\n", "[{%s}]"])
def test_a_number_beyond_floats_is_no_answer(tmp_path: Path, form: str) -> None:
    path = tmp_path / ("a.jsonl" if form.endswith("\n") else "a.json")
    path.write_text(form % '"question": "What is 10^400?", "answer": 1e400')
    with pytest.raises(InputError, match=r"a\.json.*1.*number beyond 1e308: write it as text"):
        read(path)


def test_numbers_that_python_writes_are_read(tmp_path: Path) -> None:
    rows = [{"question": "p", "answer": 1.5, "x": float("inf")},
            {"question": "q", "answer": float("nan")}, {"question": 7, "answer": "7"}]  # fmt: skip
    for name, text in {
        "a.jsonl": "\n".join(map(json.dumps, rows)), "a.json": json.dumps(rows),
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
        reading = read(tmp_path / name, faulty="drop")
        assert [p.answer for p in reading.prompts] == ["1.5"]
        assert "1 no_answer" in reading.notes[0] and "1 malformed" in reading.notes[0]
    (tmp_path / "b.jsonl").write_text('{"question": "NaN}\n')
    with pytest.raises(InputError, match="b.jsonl:1: "):
        read(tmp_path / "b.jsonl")


def test_half_of_a_surrogate_pair_is_a_fault_of_its_row(tmp_path: Path) -> None:
    lines = [
        '{"question": "p\\ud83d\\ude00", "answer": "[\\"\\\\ud83d\\\\ude00\\", \\"7\\"]"}',
        # Neither the answer, nor a line that only Python's reader takes, can be sent.
        '{"question": "q", "answer": "[\\"\\\\ud83dx\\", \\"7\\"]"}',
        '{"question": "r \\ud83d?", "level": NaN, "answer": "2"}',
        '{"question": "s", "level": NaN, "c\\ude00": 1, "answer": "2"}',
        '{"question": "t", "level": NaN, "answer": "8"}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    reading = read(tmp_path / "a.jsonl", faulty="drop")
    assert [p.answers for p in reading.prompts] == [["\U0001f600", "7"], ["8"]]
    assert reading.prompts[0].question == "p\U0001f600"
    assert "2 no_json" in reading.notes[0] and "1 malformed" in reading.notes[0]
    for prompt in reading.prompts:
        assert msgspec.json.encode(prompt)


def test_values_of_csv_may_be_structures_and_long_tests(tmp_path: Path) -> None:
    tests = json.dumps({"inputs": ["1\n"] * 30_000, "outputs": ["2\n"] * 30_000})
    verl = str({"ground_truth": "7", "style": "rule"})
    turns = str([{"role": "user", "content": "it's 3+4?"}])
    for name, row in {
        "code": {"question": "Add.", "input_output": tests},
        "verl": {"prompt": turns, "reward_model": verl},
        "list": {"problem": "p", "answer": "['7', '7.0']"},
    }.items():
        cells = ",".join('"' + value.replace('"', '""') + '"' for value in row.values())
        (tmp_path / f"{name}.csv").write_text(f"{','.join(row)}\n{cells}\n")
    [code] = read(tmp_path / "code.csv").prompts
    assert code.task == "code" and len(json.loads(code.entry)["cases"]) == 30_000
    [verl_row] = read(tmp_path / "verl.csv").prompts
    assert (verl_row.question, verl_row.answers) == ("it's 3+4?", ["7"])
    assert read(tmp_path / "list.csv").prompts[0].answers == ["7", "7.0"]


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.jsonl"])
def test_a_column_may_have_no_value_in_the_first_row(tmp_path: Path, name: str) -> None:
    rows = [{"problem": "p", "answer": None, "llama8b_solve_rate": None},
            {"problem": "q", "answer": "7", "llama8b_solve_rate": "0.5"}]  # fmt: skip
    lines = [json.dumps({k: v for k, v in row.items() if v}) for row in rows]
    texts = {
        "a.json": f"[{','.join(lines)}]", "a.jsonl": "\n".join(lines),
        "a.csv": "\n".join(",".join(v or "" for v in row.values()) for row in rows),
    }  # fmt: skip
    (tmp_path / name).write_text(f"{','.join(rows[0])}\n" * (name == "a.csv") + texts[name])
    [prompt] = read(tmp_path / name, faulty="drop").prompts
    assert (prompt.answer, prompt.pass_rate) == ("7", 0.5)


def test_rows_without_answers_are_for_a_reward_that_needs_none(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("prompt,topic,level\nSay hi,greeting,1\nSay ho,,2\n")
    with pytest.raises(InputError, match="or give '-' for a task of your own"):
        read(path, task="mine")
    prompts = read(path, task="mine", columns={"answer": "-"}).prompts
    assert [(p.question, p.answer) for p in prompts] == [("Say hi", ""), ("Say ho", "")]
    entries = [json.loads(prompt.entry) for prompt in prompts]
    assert entries[0] == {"topic": "greeting", "level": "1"} and entries[1]["level"] == "2"
    with pytest.raises(InputError, match="the answer is empty"):
        read(path, task="math", columns={"answer": "-"})


def test_lines_under_other_names_are_told_the_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"question_text": "1+1?", "label": 2}\n')
    said = r"no column of questions; it has question_text, label; did you mean 'question_text'\?"
    with pytest.raises(InputError, match=said):
        read(path)
    path.write_text('{"question": "1+1?", "answer_text": "2"}\n')
    said = r"a.jsonl:1: there is no 'answer'; the row has question, answer_text; did you mean 'ans"
    with pytest.raises(InputError, match=said) as error:
        read(path)
    assert "prompts.kind" not in str(error.value)


def test_faulty_rows_are_left_out_by_the_key_that_the_error_names(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "1+1?", "answer": "2"}\n{"question": "1+2?", "answer": ""}\n')
    with pytest.raises(InputError, match="as in (prompts.0.faulty=drop)") as error:
        read(path)
    key = str(error.value).rpartition(" ")[2]
    layers = read_layers([])
    layers.tree["prompts"] = [{"path": str(path)}]
    layers.add_overrides([key])
    [source] = resolve(layers).prompts
    assert [prompt.answer for prompt in read_files(source).prompts] == ["2"]


def test_conditions_that_leave_faulty_rows_alone_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("question,answer,level\n1+1,2,1\n2+1,3,1\n3+1,4,1,5\n")
    words = r"2 rows of .* do not meet prompts\.where=\['level == 1'\] \(values of CSV files are"
    with pytest.raises(InputError, match=words):
        read(path, where=["level == 1"])
    assert len(read(path, where=["level == '1'"], faulty="drop").prompts) == 2


@pytest.mark.parametrize(
    ("where", "fix"),
    [
        ("level in [4, 5]", 'level in ["4", "5"]'), ("level == 4", 'level == "4"'),
        ("level > 3", 'level in ["4"]'),
    ],
)  # fmt: skip
def test_numbers_that_no_text_of_csv_equals_are_named_with_the_fix(
    tmp_path: Path, where: str, fix: str
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("problem,solution,level\n2+2,\\boxed{4},4\n")
    with pytest.raises(InputError, match="the column 'level' holds texts, as \"4\"") as error:
        read(path, where=[where])
    assert str(error.value).endswith(f"Quote the values, as in {fix}")
    assert [prompt.answer for prompt in read(path, where=[fix]).prompts] == ["4"]


def test_a_row_of_csv_with_other_columns_is_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("question,answer\np,1\nq,2,3\nr\n")
    with pytest.raises(InputError, match=r"2 of 3 .*a\.csv:row 2: more values than the 2 columns"):
        read(path)
    assert "1 no_json" in (said := read(path, faulty="drop").notes[0]) and "1 no_answer" in said


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", LINES.decode().encode("utf-16"), "is UTF-16; expected UTF-8: `iconv"),
        ("a.csv", b"question,answer\ncaf\xe9,1\n", "'utf-8' codec can't decode"),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:30], "Compressed file ended before"),
        ("a.jsonl.gz", LINES, "Not a gzipped file"),
        ("a.json", b'{"question": {"0": "p"}, "answer": {"0": "1"}}',
         "it is one object of columns .question, answer.; expected a list of objects"),
        ("a.json", b"[]", "has no rows"),
        ("a.jsonl", b"\n", "has no rows"),
        ("a.csv", b"question,answer\n", "has no rows"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
         "is a pointer of Git LFS, not the file: run `git lfs pull`"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS"),
        ("a.parquet.gz", b"x", "is of no format that is read: expected .jsonl"),
    ],
)  # fmt: skip
def test_other_files_are_refused_by_name(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"{name}:? {said}"):
        read(path)


def test_a_file_without_rows_lacks_no_column(tmp_path: Path) -> None:
    path, columns = tmp_path / "a.jsonl", {"question": "my_prompt", "answer": "gold"}
    path.write_bytes(b"")
    with pytest.raises(InputError, match=r"a\.jsonl has no rows: expected a question and its"):
        read(path, columns=columns)
    # A line that is no JSON is a row.
    path.write_bytes(b"question\n")
    with pytest.raises(InputError, match=r"has no such column"):
        read(path, columns=columns)


def lines_of(name: str) -> str:
    return json.dumps({"question": name, "answer": "1"}) + "\n"


@pytest.mark.parametrize("write", [str, lambda name: f"data/{name}"])
def test_names_of_numbered_files_are_splits(tmp_path: Path, write: Callable[[str], str]) -> None:
    """Skywork-OR1 and OpenMathReasoning have splits such as math, code, cot and tir."""
    first = "math-00000-of-00001-b42a775f407cee45"
    for name in (first, "code-00000-of-00002", "code-00001-of-00002"):
        path = tmp_path / write(f"{name}.jsonl.gz")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(lines_of(name).encode()))
    with pytest.raises(
        InputError, match=r"splits code, math: choose one by prompts\.dataset_split"
    ):
        read(tmp_path)
    assert len(read(tmp_path, dataset_split="code").prompts) == 2
    assert [p.question for p in read(tmp_path, dataset_split="math").prompts] == [first]
    path.unlink()
    with pytest.raises(InputError, match="1 of the 2 files .*code-[*]-of-00002"):
        read(tmp_path, dataset_split="code")


def test_csv_next_to_other_files_is_no_prompts_unless_a_split(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines_of("p"))
    (tmp_path / "results.csv").write_text("model,score\nx,1\n")
    assert [p.question for p in read(tmp_path).prompts] == ["p"]
    (tmp_path / "a.jsonl").rename(tmp_path / "test.jsonl")
    (tmp_path / "train.csv").write_text("question,answer\nq,1\n")
    assert [p.question for p in read(tmp_path, dataset_split="train").prompts] == ["q"]


def test_an_empty_first_file_decides_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "b.jsonl").write_text('{"problem": "p", "expected_answer": "7"}\n')
    assert [p.answer for p in read(tmp_path).prompts] == ["7"]
