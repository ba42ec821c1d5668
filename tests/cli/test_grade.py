"""`data grade`: which problems it makes a set of, what it refuses, and the whole of it once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.cli.data_tools.grade import (
    SET,
    check_questions,
    check_recorded,
    grading_config,
    problem_line,
)
from megatron_rl.cli.main import main
from megatron_rl.config.errors import InputError
from megatron_rl.config.reward import RewardConfig
from megatron_rl.curation.rows import read_rows
from megatron_rl.curation.samples import match, read_samples
from megatron_rl.data.prompts import read_prompts
from megatron_rl.rollout_queue.evaluation import recorded_problems
from tests.cli.command_line.parsed import parse
from tests.end_to_end.commands import launched
from tests.evaluation.runs.folders import write_results

ROOT = Path(__file__).resolve().parents[2]
LINES = [
    {"question": "1+1", "answer": 2, "split": "train", "note": "kept"},
    {"id": "b", "question": "1+2", "answer": "3", "split": "held_out"},
    {"id": "c", "question": "1+3", "answer": "4"},
]


def write(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_every_row_is_a_problem_whatever_its_split(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path / "raw.jsonl", LINES))
    options = parse(
        ["data", "grade", "raw.jsonl", "--model", "m", "--samples", "4", "--out", str(tmp_path),
         "--temperature", "0.5", "sampling.max_new_tokens=7", "generator.engine=hf"]
    )  # fmt: skip
    config = grading_config(options)
    write(tmp_path / "problems.jsonl", [])
    text = "".join(json.dumps(_plain(problem_line(row))) + "\n" for row in rows)
    (tmp_path / "problems.jsonl").write_text(text)
    found = read_prompts(config.prompts, 0, eval_sets=config.eval.sets).divide()
    ids = [prompt.id for prompt in found.eval_sets["graded"]]
    assert ids == [f"graded/{row.prompt.id}" for row in rows] and not found.train
    [one] = config.eval.sets
    assert (one.samples, one.temperature, config.eval.prompts) == (4, 0.5, 0)
    assert (config.sampling.max_new_tokens, config.generator.engine) == (7, "hf")
    assert (config.model.path, config.run.dir) == (Path("m").absolute(), tmp_path)


def _plain(line: dict) -> dict:
    return {key: json.loads(bytes(v)) if not isinstance(v, str) else v for key, v in line.items()}


def test_without_a_temperature_it_is_that_of_training() -> None:
    arguments = ["data", "grade", "p", "--model", "m", "--out", "o", "sampling.temperature=0.625"]
    [one] = grading_config(parse(arguments)).eval.sets
    assert (one.temperature, one.samples) == (0.625, 16)


def test_two_rows_with_one_question_are_refused(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path / "p.jsonl", [LINES[1], LINES[1] | {"id": "d"}]))
    with pytest.raises(InputError, match=r"p.jsonl:2 asks what .*p.jsonl:1 asks.*data dedupe"):
        check_questions(rows)


def test_the_folder_of_another_run_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write(tmp_path / "p.jsonl", LINES)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.toml").write_text("")
    arguments = ["data", "grade", str(prompts), "--model", "m", "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.toml"]
    assert main([*arguments, "--samples", "0"]) == 2


def test_completions_of_problems_that_the_file_lacks_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out, model = tmp_path / "out", tmp_path / "model"
    write_results(out, {SET: {f"{SET}/{name}": [1, 0] for name in "abc"}}, label=SET)
    (out / "problems.jsonl").write_text("earlier\n")
    files = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    # The recorded question is "How many?", and only "a" is in the file; "l:1" has another one.
    lines = [{"id": "a", "question": "How many?", "answer": "3"}, {"question": "x", "answer": "1"}]
    prompts = str(write(tmp_path / "l.jsonl", lines))
    for extra in ([], ["--dry-run"]):
        arguments = ["data", "grade", prompts, "--model", str(model), "--out", str(out), *extra]
        assert main(arguments) == 2
        said = "completions of 2 problems that are not among the rows of"
        assert said in caplog.text and "(first 'b')" in caplog.text and "--out DIR" in caplog.text
        assert files == {path: path.read_bytes() for path in files}
        caplog.clear()


def test_an_id_from_the_line_number_is_another_problem_in_another_file(tmp_path: Path) -> None:
    write_results(tmp_path, {SET: {f"{SET}/l:1": [1, 0], f"{SET}/l:2": [1, 0]}}, label=SET)
    asked = [one.problem for one in recorded_problems(tmp_path, f"{SET}.{SET}").values()]
    same, second = ({"question": question, "answer": "3"} for question in asked)
    path = write(tmp_path / "l.jsonl", [same, second, {"question": "x", "answer": "1"}])
    check_recorded(tmp_path, read_rows(path), path)
    path = write(tmp_path / "l.jsonl", [same, {"question": "x", "answer": "1"}])
    with pytest.raises(InputError, match=r"of 1 problems .*first 'l:2'"):
        check_recorded(tmp_path, read_rows(path), path)
    # The user's own id says that the problem is the same, with a changed text.
    path = write(tmp_path / "l.jsonl", [same, {"id": "l:2", "question": "x", "answer": "1"}])
    check_recorded(tmp_path, read_rows(path), path)


@pytest.mark.slow(60)
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_what_it_leaves_are_samples_of_every_row(tmp_path: Path) -> None:
    make = [sys.executable, "-m", "tools.make_tiny_model", str(tmp_path / "model")]
    subprocess.run(make, cwd=ROOT, check=True, timeout=200)
    lines = [
        {"id": f"row-{n}", "task": "character", "question": f"{n}=", "answer": str(n),
         "split": "train" if n % 2 else "held_out"}
        for n in range(10)
    ]  # fmt: skip
    prompts = write(tmp_path / "raw.jsonl", lines)
    config = tmp_path / "engine.toml"
    config.write_text(
        '[generator]\nengine = "hf"\nmax_running = 32\nkv_tokens = 4096\ncontext_tokens = 64\n'
        '[model]\ndtype = "float32"\n[sampling]\nmax_new_tokens = 1\n[render]\nsystem_prompt = ""\n'
        "[reward]\nlength_margin_tokens = 0\n"
        '[reward.tasks.character]\nformat_check = "none"\ncompare = "exact"\n'
    )
    out = tmp_path / "graded"
    command = ["data", "grade", prompts, "--model", tmp_path / "model", "--samples", 8]
    command += ["--out", out, "--config", config]

    def grade() -> str:
        with launched(*map(str, command)) as run:
            output, _ = run.communicate(timeout=150)
        assert run.returncode == 0, output
        return output

    grade()
    tasks = RewardConfig.model_validate(
        {"tasks": {"character": {"format_check": "none", "compare": "exact"}}}
    )
    rows = read_rows(prompts)
    samples_of, unmatched = match(rows, read_samples(out, tasks).graded)
    assert {name: len(samples) for name, samples in samples_of.items()} == {
        f"row-{n}": 8 for n in range(10)
    }
    assert unmatched == 0
    # Right is the completion that is the digit of its row.
    for n in range(10):
        for sample in samples_of[f"row-{n}"]:
            assert sample.is_correct == (sample.answer == str(n))
    assert "nothing is generated" in grade()
