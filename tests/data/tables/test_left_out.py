"""Rows and columns that are refused or left out by name: repeats, faults, missing columns."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.evaluation import EvalConfig, EvalSet
from megatron_rl.config.prompts import PromptSource
from megatron_rl.config.reward import RewardConfig, TaskConfig
from megatron_rl.config.tree import Config
from megatron_rl.curation.rows import encode_lines, read_rows
from megatron_rl.data.check import check_prompts
from megatron_rl.data.prompts import material_of_run, read_prompts
from megatron_rl.data.sources import read_source
from megatron_rl.data.tables.rows import RowFault
from megatron_rl.data.tables.source import read_files
from tests.data.tables.test_sets_by_form import FORMS, read, verl, write
from verification import settings


def test_repeated_rows_of_verl_leave_one_of_each_on_one_side(tmp_path: Path) -> None:
    rows = [verl(f"{n}+1?", str(n + 1)) for n in range(8)] * 50
    for suffix in ("jsonl", "parquet"):
        path = write(tmp_path / f"train.{suffix}", rows)
        sets = read_prompts([PromptSource(path=path, held_out_share=0.25)], seed=0).divide()
        trained, held = ({p.question for p in ps} for ps in (sets.train[0], sets.held_out))
        assert len(sets.train[0]) + len(sets.held_out) == 8 and held and not trained & held
        place = "9" if suffix == "jsonl" else "row 9"
        assert f"rows left out: 392 repeated (first {path}:{place})" in sets.notes[0]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_the_first_known_rate_of_repeated_rows_is_kept(tmp_path: Path, suffix: str) -> None:
    rates = [("p", "1", "n/a"), ("p", "2", "0.9"), ("p", "1", "0.25"), ("p", "1", "0.5"),
             ("q", "3", "0.75"), ("q", "3", "0.1"), ("r", "4", "n/a")]  # fmt: skip
    rows = [{"problem": q, "expected_answer": a, "pass_rate_72b_tir": rate} for q, a, rate in rates]
    reading = read_files(PromptSource(path=write(tmp_path / f"a.{suffix}", rows)))
    # The rate 0.9 belongs to another answer.
    assert [prompt.pass_rate for prompt in reading.prompts] == [0.25, 0.75, None]
    assert "1 without a known pass rate" in reading.notes[0]
    ours = [{"question": q, "answer": a, "pass_rate": rate} for q, a, rate in rates]
    lines = PromptSource(kind="jsonl", path=write(tmp_path / "b.jsonl", ours))
    found = read_source(lines, 0, key="prompts.kind").prompts
    assert [prompt.pass_rate for prompt in found] == [0.25, 0.75, None]


def test_a_question_with_another_answer_is_named_and_does_not_stop_a_run(tmp_path: Path) -> None:
    rows = [{"problem": "p", "answer": "1"}, {"problem": " P ", "answer": "2"},
            {"problem": "p", "answer": "1 "}]  # fmt: skip
    path = write(tmp_path / "a.parquet", rows)
    reading = read_files(PromptSource(path=path))
    assert [p.answer for p in reading.prompts] == ["1"]
    assert f"1 repeated_with_other_answer (first {path}:row 2)" in reading.notes[0]
    assert "1 repeated (first" in reading.notes[0]
    found = check_prompts(Config(prompts=[PromptSource(path=path)]), with_lengths=False)
    assert [fault.reason for fault in found.faults] == ["repeated_with_other_answer", "repeated"]
    lines = write(tmp_path / "a.jsonl", [{"question": q, "answer": a} for q, a in
                                         (("p", "1"), (" P ", "2"), ("p", "1 "))])  # fmt: skip
    of_run = read_source(PromptSource(kind="jsonl", path=lines), 0, key="prompts.kind")
    left_out = "1 repeated_with_other_answer, 1 repeated"
    assert of_run.notes == [f"{lines}: rows left out: {left_out}"]


def test_a_question_on_both_sides_is_held_out_and_named(tmp_path: Path) -> None:
    rows = [{"question": q, "answer": "1", "split": split}
            for q, split in (("p", "train"), ("p", "held_out"), ("q", "train"))]  # fmt: skip
    path = write(tmp_path / "a.jsonl", rows)
    sets = read_prompts([PromptSource(path=path)], seed=0).divide()
    assert [p.question for p in sets.train[0]] == ["q"]
    assert "1 train prompts removed because their question is held out" in sets.describe()
    found = check_prompts(Config(prompts=[PromptSource(path=path)]), with_lengths=False)
    assert [fault.reason for fault in found.faults] == ["in_both_splits"]


def test_games_that_begin_alike_are_no_leak_of_each_other(tmp_path: Path) -> None:
    """As in a run, which tells games of an environment apart by their ids within a file."""
    asked = "Play the game of the hidden number until you know it for sure."
    train, held = (
        write(
            tmp_path / f"{name}.jsonl",
            [{"question": asked, "answer": "", "task": "game", "entry": f"{n}", "id": str(n % 10)}
             for n in range(start, start + 5)]
            + [{"question": f"{name} 1+1?", "answer": "2"}, {"question": "1+1?", "answer": "2"}],
        )
        for name, start in (("train", 0), ("held", 10))
    )  # fmt: skip
    source = PromptSource(path=train, repeated="keep", held_out_share=0)
    of_set = EvalSet(name="games", prompts=PromptSource(path=held, repeated="keep"))
    task = TaskConfig(environment="package.module:Game")
    config = Config(
        prompts=[source],
        eval=EvalConfig(sets=[of_set]),
        reward=RewardConfig(tasks={"game": task}),
    )
    [trained] = material_of_run(config).divide().train
    assert [prompt.question for prompt in trained] == [*[asked] * 5, "train 1+1?"]
    found = check_prompts(config, with_lengths=False)
    assert [(one.place, one.reason) for one in found.faults] == [
        (f"{train}:7", "in_evaluation_set")
    ]


FAULTY = [
    {"question": "p", "answer": "7"},
    {"question": "q", "answer": ""},
    {"question": "r", "answer": "", "task": "code", "entry": '{"cases": []}'},
    {"question": "s", "answer": "", "task": "own", "entry": ""},
    {"question": "{problem}", "answer": "7"},
]


def test_faulty_rows_never_stop_a_run_that_drops_them(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", FAULTY)
    reward = RewardConfig(tasks={"own": TaskConfig(compare="exact")})
    source = PromptSource(path=path, faulty="drop", held_out_share=0.0)
    sets = EvalConfig(sets=[EvalSet(name="e", prompts=source)])
    config = Config(prompts=[source], reward=reward, eval=sets)
    material = material_of_run(config)
    assert [[p.question for p in ps] for ps in material.loaded] == [["p"]]
    assert [p.question for p in material.eval_sets["e"]] == ["p"]
    first, second = material.notes[:2]
    assert "1 no_answer" in first and "1 placeholder" in first
    assert "prompts left out: 1 bad_tests, 1 no_answer" in second
    settings.check_prompts(material.divide().all, reward)


def test_lines_in_our_own_form_are_dropped_alike(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [FAULTY[0], *FAULTY[:2]])
    reading = read(path, kind="jsonl")
    assert [p.question for p in reading.prompts] == ["p"]
    assert "1 repeated" in reading.notes[0] and "1 no_answer" in reading.notes[0]
    with pytest.raises(InputError, match=r"a\.jsonl:3: the answer is empty"):
        read(path, kind="jsonl", faulty="refuse")
    reading = read(write(tmp_path / "b.jsonl", FAULTY[:1] * 3), kind="jsonl", faulty="refuse")
    assert len(reading.prompts) == 1 and "2 repeated" in reading.notes[0]


def test_refused_rows_are_counted_by_reason(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", FAULTY)
    with pytest.raises(InputError, match=r"2 of 5 rows .* \(1 no_answer, 1 placeholder\); first"):
        read_files(PromptSource(path=path))
    kept = write(tmp_path / "b.jsonl", [row for row in FAULTY if row["question"] in "prs"])
    source = PromptSource(path=kept)
    reward = RewardConfig(tasks={"own": TaskConfig(compare="exact")})
    prompts = material_of_run(Config(prompts=[source], reward=reward)).divide().all
    with pytest.raises(
        InputError, match=r"2 prompts cannot be graded .*1 bad_tests.*prompts\.0\.faulty=drop"
    ):
        settings.check_prompts(prompts, reward)


def test_a_line_may_have_a_column_that_is_nearly_a_key_of_ours(tmp_path: Path) -> None:
    rows = [{"question": "p", "answers": ["7/2", "3.5"]}]
    path = write(tmp_path / "a.jsonl", rows)
    [prompt] = read(path, columns={"answer": "answers"}).prompts
    assert prompt.answers == ["7/2", "3.5"] and read(path).prompts == [prompt]
    other = write(tmp_path / "b.jsonl", [{"question": "p", "answer": "1", "spilt": "train"}])
    with pytest.raises(InputError, match="unknown key 'spilt'; did you mean 'split'"):
        read(other)


def test_an_id_that_repeats_is_dropped_by_name(tmp_path: Path) -> None:
    rows = [{"question": f"q{n}", "answer": "1", "id": f"x{n % 2}"} for n in range(3)]
    path = write(tmp_path / "a.jsonl", rows)
    reading = read(path)
    assert [p.question for p in reading.prompts] == ["q0", "q1"]
    assert f"1 repeated_id (first {path}:3)" in reading.notes[0]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_empty_and_missing_tests_are_named(tmp_path: Path, suffix: str) -> None:
    good = json.dumps({"inputs": ["1"], "outputs": ["2"]})
    tests = [good, "", None, json.dumps({"inputs": [], "outputs": []}), "{", "{}"]
    rows = [{"question": f"q{n}", "input_output": one} for n, one in enumerate(tests)]
    reading = read(write(tmp_path / f"a.{suffix}", rows))
    assert [(p.question, p.task) for p in reading.prompts] == [("q0", "code")]
    assert "rows left out: 5 bad_tests (first" in reading.notes[0]


def test_hostile_rows_are_faults_and_nothing_worse(tmp_path: Path) -> None:
    deep = '{"a":' * 50_000
    rows = [{"question": "p", "answer": "7"}, {"question": "q", "answer": deep + "1"},
            {"question": "r", "reward_model": deep, "answer": "8"},
            {"question": "s", "tests": "[" * 50_000}, {"question": "t", "answer": {}},
            {"prompt": '[{"role": ' + "[" * 50_000, "answer": "9"}]  # fmt: skip
    path = write(tmp_path / "a.jsonl", rows)
    with path.open("a") as file:
        file.write('{"question": "u", "answer": ' + "[" * 100_000 + "\n")
        file.write('{"question": "v", "answer": ' + "1" * 5000 + "}\n")
        file.write('{"question": "w", "answer": ' + "1" * 100_001 + "}\n")
    told: list[RowFault] = []
    reading = read_files(PromptSource(path=path), told.append)
    # Text that is no JSON is a text.
    assert [p.messages[0].content[:3] for p in reading.prompts] == ["p", "q", "r", '[{"', "v"]
    assert (reading.prompts[1].answer, reading.prompts[4].answer) == (deep + "1", "1" * 5000)
    assert [(fault.place.rpartition(":")[2], fault.reason) for fault in told] == [
        ("4", "bad_tests"), ("5", "no_answer"), ("7", "no_json"), ("9", "no_json"),
    ]  # fmt: skip


def test_lists_as_labels_are_no_fault(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", FORMS["lists"].rows[:4])
    found = check_prompts(Config(prompts=[PromptSource(path=path)]), with_lengths=False)
    assert found.faults == []
    path = write(tmp_path / "b.jsonl", [{"question": "p", "answer": ["7", "\\frac{1"]}])
    found = check_prompts(Config(prompts=[PromptSource(path=path)]), with_lengths=False)
    assert [fault.reason for fault in found.faults] == ["unreadable_answer"]


NESTED = [
    {"text": "p", "gold": {"value": "7"}, "info": json.dumps({"rate": "5/8", "truth": "8"})},
    {"text": "q", "gold": {"value": "9"}, "info": json.dumps({"rate": "n/a", "truth": "10"})},
]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_columns_enter_structures_and_json_text(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a.{suffix}", NESTED)
    columns = {"question": "text", "answer": "gold.value", "pass_rate": "info.rate"}
    prompts = read(path, columns=columns).prompts
    assert [(p.question, p.answer, p.pass_rate) for p in prompts] == [
        ("p", "7", 0.625), ("q", "9", None),
    ]  # fmt: skip
    prompts = read(path, columns={**columns, "answer": "info.truth"}).prompts
    assert [p.answer for p in prompts] == ["8", "10"]
    kept = read(path, columns=columns, where=["info.truth == '10'"]).prompts
    assert [p.question for p in kept] == ["q"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("columns", "nearest"),
    [
        ({"question": "txt"}, "text"),
        ({"answer": "gold.valeu"}, "gold.value"),
        ({"answer": "value"}, "gold.value"),
        ({"answer": "Gold.Value"}, "gold.value"),
        ({"pass_rate": "info.rat"}, "info.rate"),
        ({"language": "infos.rate"}, "info.rate"),
    ],
)
def test_a_missing_column_names_the_nearest(
    tmp_path: Path, columns: dict[str, str], nearest: str, suffix: str
) -> None:
    path = write(tmp_path / f"a.{suffix}", NESTED)
    given = {"question": "text", "answer": "gold.value", **columns}
    [(key, wrong)] = columns.items()
    with pytest.raises(InputError) as error:
        read(path, columns=given, faulty="refuse")
    said = str(error.value)
    assert f"prompts.columns.{key} = '{wrong}'" in said and f"did you mean '{nearest}'?" in said


@pytest.mark.parametrize("name", sorted(FORMS))
def test_tools_write_lines_that_a_run_reads_like_the_rows(tmp_path: Path, name: str) -> None:
    def facts(path: Path) -> list[Any]:
        return [(p.question, p.answers, p.entry, p.task, p.pass_rate) for p in read(path).prompts]

    path = write(tmp_path / "all.jsonl", FORMS[name].rows)
    places = [int(prompt.place.rpartition(":")[2]) for prompt in read(path).prompts]
    path = write(tmp_path / "rows.jsonl", [FORMS[name].rows[place - 1] for place in places])
    out = tmp_path / "out.jsonl"
    out.write_text(encode_lines([row.line() for row in read_rows(path)]))
    assert facts(out) == facts(path)
