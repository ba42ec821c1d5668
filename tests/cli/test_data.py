"""`megatron-rl data TOOL`: files in, files and a report out, by the command line itself."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli.main import main


def write(path: Path, *lines: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def report_of(out: Path) -> dict[str, Any]:
    report = json.loads(out.with_name(f"{out.name}.report.json").read_text())
    added, dropped = sum(report["added"].values()), sum(report["dropped"].values())
    assert report["read"] + added - dropped == report["written"] == len(read(out))
    assert len(report["drops"]) == dropped
    return report


def test_a_file_goes_through_the_tools_one_after_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    choice = "How many legs has a spider that has lost two of its own?\nA. 6\nB. 8\nC. 10"
    easy = "What is the sum of the first 4 positive whole numbers?"
    prompts = write(
        tmp_path / "raw.jsonl",
        {"question": choice, "answer": "A", "source": "zoo", "serial": 12345678901234567890123},
        {"question": easy, "answer": "10"},
        {"question": easy.upper(), "answer": "10"},
        {"question": "Prove that 1 = 1.", "answer": "-1"},
        {"question": "Which whole number lies halfway between 5 and 9?", "answer": "8"},
        {"question": "What is the largest prime below 100, if there is one?", "answer": "97"},
    )
    evaluation = write(
        tmp_path / "eval.jsonl",
        {"problem": "What is the greatest prime below 100, if there is one", "answer": "97"},
    )
    formatted, distinct, clean = (tmp_path / f"{name}.jsonl" for name in "abc")
    assert main(["data", "filter-format", prompts, "--out", str(formatted)]) == 0
    assert main(["data", "dedupe", str(formatted), "--out", str(distinct)]) == 0
    command = ["data", "decontaminate", str(distinct), "--against", evaluation]
    assert main([*command, "--out", str(clean)]) == 0
    assert report_of(formatted)["dropped"] == {"proof": 1}
    assert report_of(distinct)["dropped"] == {"duplicate": 1}
    assert report_of(clean)["dropped"] == {"near_evaluation_problem": 1}
    lines = read(clean)
    # Ids are those of the first file, and keys that are not ours are as they were written.
    assert [line["id"] for line in lines] == ["raw:1", "raw:2", "raw:5"]
    assert lines[0] | {"question": ""} == {
        "id": "raw:1", "question": "", "answer": "6", "original_answer": "A", "source": "zoo",
        "serial": 12345678901234567890123,
    }  # fmt: skip
    samples = write(
        tmp_path / "samples.jsonl",
        {"id": "raw:1", "correct": [True] * 4 + [False] * 12, "answers": ["6"] * 4 + ["8"] * 12},
        {"id": "raw:2", "correct": [True] * 16},
        {"id": "raw:5", "correct": [False] * 16, "answers": ["7"] * 9 + ["7.0", "x=7"] + ["3"] * 5},
    )
    kept = tmp_path / "kept.jsonl"
    command = ["data", "difficulty", str(clean), "--samples", samples, "--out", str(kept)]
    capsys.readouterr()
    assert main([*command, "--labels", "relabel", "--relabel-share", "0.65"]) == 0
    assert report_of(kept)["dropped"] == {"too_easy": 1}
    assert [(line["answer"], line["pass_rate"]) for line in read(kept)] == [
        ("6", 0.25),
        ("7", 11 / 16),
    ]
    table = capsys.readouterr().out
    assert all(text in table for text in ("dropped: too_easy", "changed: relabelled", "written"))


@pytest.mark.parametrize("name", ["raw.jsonl", "raw.csv"])
def test_rows_without_an_answer_are_dropped_and_other_faults_end_the_command(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    raw = tmp_path / name
    answers = ["7", "proof", "", "N/A", "null", "8"]
    if name.endswith("jsonl"):
        lines = [{"question": f"What is {i}+3?", "answer": a} for i, a in enumerate(answers)]
        write(raw, *lines, {"question": "What is 9+3?", "answer": None}, {"question": "no key?"})
    else:
        rows = [f"What is {i}+3?,{answer}" for i, answer in enumerate(answers)]
        raw.write_text("\n".join(["question,answer", *rows, "What is 9+3?,", "no value?,"]) + "\n")
    out = tmp_path / "out.jsonl"
    command = ["data", "filter-format", str(raw), "--out", str(out)]
    assert main(command) == 0
    report = report_of(out)
    assert (report["read"], report["written"]) == (8, 2)
    assert report["dropped"] == {"no_answer": 6}
    assert [line["answer"] for line in read(out)] == ["7", "8"]
    first = 2 if name.endswith("jsonl") else "row 2"
    assert report["drops"][0] == {"id": "", "place": f"{raw}:{first}", "reason": "no_answer"}
    text = raw.read_text()
    raw.write_text(text.replace("What is 0+3?", "<image>"))
    out.unlink()
    assert main(command) == 2 and not out.exists()
    # Rows without any answer may be rows whose answer has another name.
    raw.write_text(text.replace("7", "").replace("8", ""))
    assert main(command) == 2 and not out.exists()


def test_a_line_that_is_no_utf_8_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    raw = tmp_path / "raw.jsonl"
    lines = [b'{"question": "What is %d+1?", "answer": "7"}\n' % n for n in range(6)]
    lines[4] = '{"question": "How long is a Fl\u00e4che?", "answer": "7"}\n'.encode("latin-1")
    raw.write_bytes(b"".join(lines))
    assert main(["data", "filter-format", str(raw), "--out", str(tmp_path / "out.jsonl")]) == 2
    assert f"{raw}:5: byte 0xe4 is no UTF-8" in caplog.text


def test_the_command_of_the_guide_relabels_and_says_why_others_cannot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    guide = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text()
    [command] = [line for line in guide.splitlines() if "--labels relabel" in line
                 and line.startswith("megatron-rl ")]  # fmt: skip
    prompts = write(tmp_path / "all.jsonl", {"id": "p", "question": "What is 3+4?", "answer": "8"})
    votes = ["7"] * 13 + ["9"] * 3
    samples = write(
        tmp_path / "samples.jsonl", {"id": "p", "correct": [False] * 16, "answers": votes}
    )
    words = command.split()[1:]
    out = tmp_path / "stage2.jsonl"
    words[words.index("all.jsonl")] = prompts
    words[words.index("--samples") + 1] = samples
    words[words.index("--out") + 1] = str(out)
    assert main(words) == 0
    [line] = read(out)
    assert (line["answer"], line["original_answer"], line["pass_rate"]) == ("7", "8", 13 / 16)
    # Without --up-to the default limit contradicts --relabel-share.
    at = words.index("--up-to")
    out.unlink()
    assert main(words[:at] + words[at + 2 :]) == 2
    assert "--relabel-share=0.8 must be at most --up-to=0.75" in caplog.text
    # Without answers no label can be checked.
    write(tmp_path / "samples.jsonl", {"id": "p", "correct": [False] * 12 + [True] * 4})
    assert main(words) == 2
    assert 'no line of the samples with a wrong sample has "answers"' in caplog.text
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "IN"], "is a file that is read"),
        (["--out", "nowhere/x.jsonl"], "there is no folder"),
        (["--out", "."], "--out . is a folder: name a file in it"),
        (["--out", "out.jsonl", "--threshold", "2"], "--threshold=2: expected a share"),
    ],
)
def test_bad_options_end_with_one_line_and_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    prompts = write(tmp_path / "in.jsonl", {"question": "q?", "answer": "7"})
    given = [prompts if word == "IN" else word for word in arguments]
    assert main(["data", "dedupe", prompts, *given]) == 2
    assert message in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "has no rows"),
        ([{"question": "q?", "answer": "7", "id": "a"}] * 2, "in.jsonl:2: id 'a' is that of"),
        ([{"question": "q?"}], "in.jsonl:1"),
        (
            [{"messages": [{"role": "system", "content": "x"}], "answer": "7"}],
            "of the role 'system'",
        ),
    ],
)
def test_bad_files_end_with_one_line_and_exit_code_2(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lines: list[dict[str, Any]], message: str
) -> None:
    prompts = write(tmp_path / "in.jsonl", *lines)
    out = str(tmp_path / "out.jsonl")
    assert main(["data", "filter-format", prompts, "--out", out]) == 2
    assert message in caplog.text


@pytest.mark.usefixtures("forked_tokenizer_children")
def test_a_prompt_and_a_line_number_are_printed_exactly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question = "sort :fire: 12 :100: [bold]now[/bold]"
    sums = [{"question": f"{number}+1?", "answer": str(number + 1)} for number in range(98)]
    path = write(tmp_path / "p.jsonl", {"question": question, "answer": "12"}, *sums)
    assert main(["data", "show", path, "--rows", "1"]) == 0
    assert f"[user] {question}" in capsys.readouterr().out.splitlines()
    with Path(path).open("a") as file:
        file.write("{bad json\n")
    assert main(["data", "check", path]) == 1
    assert f"no_json: {path}:100: " in capsys.readouterr().out
