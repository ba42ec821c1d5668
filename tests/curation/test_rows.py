"""Tools read what a run reads: the same rows in any format come to the same lines."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from megatron_rl.cli.main import main
from megatron_rl.config.errors import InputError
from megatron_rl.config.prompts import PromptSource
from megatron_rl.curation.rows import encode_lines, read_rows
from megatron_rl.data.tables.source import read_files

PRODUCT = "What number do you get when you multiply 7 by 8 and then add 5 to the result?"
ROWS: list[dict[str, Any]] = [
    {
        "question": "What is the largest prime number that is smaller than 100, if there is one?",
        "answer": "97",
        "id": "a",
        "level": 3,
    },
    {
        "question": "What is the  largest prime number that is smaller than 100 , if there is one?",
        "answer": "97",
        "id": "b",
        "level": 4,
    },
    {
        "question": PRODUCT,
        "answer": "61",
        "id": "c",
        "level": 5,
    },
    {"question": "Prove that 1 = 1.", "answer": "-1", "id": "d", "level": 1},
]
DATA_SET = [
    {
        "messages": [{"role": "user", "content": "a worked example"}],
        "problem": "What is 2 + 2?", "solution": "It is \\boxed{4}.", "split": "test",
        "meta": {"year": 1999},
    },
    {"problem": "What is 3 + 3?", "solution": "So \\boxed{6}.", "split": "test", "meta": None},
]  # fmt: skip


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    table = pyarrow.Table.from_pylist(rows)
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case ".json":
            path.write_text(json.dumps(rows))
        case ".parquet":
            pyarrow.parquet.write_table(table, path)
        case ".arrow":
            with pyarrow.ipc.new_stream(path, table.schema) as stream:
                stream.write_table(table)
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".json"])
@pytest.mark.parametrize(
    "command",
    [["dedupe"], ["filter-format"], ["decontaminate", "--against", "AGAINST"],
     ["difficulty", "--samples", "SAMPLES"], ["translate", "--requests", "--share", "1"]],
    ids=lambda command: command[0],
)  # fmt: skip
def test_a_tool_makes_the_same_of_the_same_rows(
    tmp_path: Path, suffix: str, command: list[str]
) -> None:
    lines, table = write(tmp_path / "in.jsonl", ROWS), write(tmp_path / f"in{suffix}", ROWS)
    asked = [{"problem": PRODUCT, "answer": "61"}]
    against = write(tmp_path / f"evaluation{suffix}", asked)
    samples = tmp_path / "samples.jsonl"
    samples.write_text(
        "".join(
            json.dumps({"id": name, "correct": [True] * right + [False] * (16 - right)}) + "\n"
            for name, right in zip("abcd", (16, 4, 8, 0), strict=True)
        )
    )
    tool, *options = [{"AGAINST": str(against), "SAMPLES": str(samples)}.get(w, w) for w in command]
    outs = [tmp_path / "of_lines.jsonl", tmp_path / "of_table.jsonl"]
    for given, out in zip((lines, table), outs, strict=True):
        assert main(["data", tool, str(given), "--out", str(out), *options]) == 0
    written = [json.loads(line) for line in outs[0].read_text().splitlines()]
    # One duplicate; one proof; one of the evaluation; one always solved and one never. Too short to
    # be called English: the proof.
    counts = {"dedupe": 3, "filter-format": 3, "decontaminate": 3, "difficulty": 2, "translate": 3}
    assert len(written) == counts[tool]
    assert outs[1].read_text() == outs[0].read_text()


def test_columns_of_a_data_set_get_our_names_and_a_run_reads_the_same_of_the_lines(
    tmp_path: Path,
) -> None:
    table = write(tmp_path / "set.parquet", DATA_SET)
    rows = read_rows(table)
    out = tmp_path / "out.jsonl"
    out.write_text(encode_lines([row.line() for row in rows]))
    first = json.loads(out.read_text().splitlines()[0])
    assert first == {
        "id": "set:1", "problem": "What is 2 + 2?", "answer": "4", "meta": {"year": 1999},
        "original_messages": [{"role": "user", "content": "a worked example"}],
        "original_split": "test",
    }  # fmt: skip
    for path in (table, out):
        found = read_files(PromptSource(path=path, held_out_share=0.0)).prompts
        assert [(p.id, p.question, p.answer) for p in found] == [
            ("set:1", "What is 2 + 2?", "4"),
            ("set:2", "What is 3 + 3?", "6"),
        ]


@pytest.mark.parametrize("suffix", [".parquet", ".json"])
def test_programs_and_messages_are_the_same_rows(tmp_path: Path, suffix: str) -> None:
    entry = json.dumps({"cases": [{"stdin": "1", "stdout": "2"}]})
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u?"}]
    for name, rows in (
        ("code", [{"question": "q?", "answer": "", "entry": entry, "task": "code"}]),
        ("turns", [{"messages": turns, "answer": 7, "pass_rate": 0.5, "split": "held_out"}]),
        ("prompt", [{"prompt": turns[1:], "answer": 2.5, "language": "fr", "id": 12}]),
    ):
        of_lines = read_rows(write(tmp_path / f"{name}.jsonl", rows))
        of_table = read_rows(write(tmp_path / f"{name}{suffix}", rows))
        # As values: a line keeps the blanks of its JSON.
        first, second = (
            json.loads(encode_lines([found[0].line()])) for found in (of_lines, of_table)
        )
        assert first == second and list(first) == list(second)
        changed = [found[0].with_question("v?").line() for found in (of_lines, of_table)]
        first, second = (json.loads(encode_lines([line])) for line in changed)
        assert first == second


def test_lines_of_a_data_set_are_read_by_their_columns(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path / "gsm.jsonl", [{"question": "q?", "answer": "so\n#### 7"}]))
    assert rows[0].line() == {"id": "gsm:1", "question": "q?", "answer": "7"}


def test_a_folder_is_read_and_its_split_is_chosen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "set"
    write(folder / "train-00000-of-00001.parquet", ROWS[:2])
    write(folder / "test-00000-of-00001.parquet", ROWS[2:])
    out = tmp_path / "out.jsonl"
    command = ["data", "dedupe", str(folder), "--out", str(out)]
    assert main(command) == 2
    assert "has the splits test, train" in caplog.text and "--dataset-split" in caplog.text
    assert main([*command, "--dataset-split", "test"]) == 0
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["c", "d"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q?", "answer": None}, "in.parquet:row 5: "),
        ({"question": " ", "answer": "7"}, "in.parquet:row 5: there is no question"),
    ],
)
def test_a_fault_is_told_with_file_and_row(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        read_rows(write(tmp_path / "in.parquet", [*ROWS, row]))


def test_a_task_that_a_run_would_not_assume_is_written(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "q?", "answer": "7"}\n')
    assert PromptSource(path=path).task == "math"
    [plain], [given] = read_rows(path), read_rows(path, task="exact")
    assert "task" not in plain.line() and given.line()["task"] == "exact"
    path.write_text(encode_lines([given.line()]))
    assert [row.prompt for row in read_rows(path)] == [given.prompt]
