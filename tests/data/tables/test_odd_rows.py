"""Odd rows of known data sets: what each is called, and that `data check` and a run agree."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.prompts import PromptSource
from megatron_rl.config.tree import Config
from megatron_rl.data.check import check_prompts
from megatron_rl.data.prompts import material_of_run, read_prompts
from megatron_rl.data.sources import read_source
from megatron_rl.data.tables.rows import RowFault
from tests.data.tables.test_sets_by_form import read, user, verl, write
from verification import settings


class Odd(NamedTuple):
    """Rows of a file, and what becomes of each."""

    rows: list[dict[str, Any]]
    found: list[str]
    """Of each row: its task and first answer, or the reason of its fault and a part of the text."""
    suffixes: tuple[str, ...] = ("jsonl", "parquet")


def synthetic(kind: str, info: Any) -> dict[str, Any]:
    return {"problem_id": f"{kind} {info}", "task_type": kind, "prompt": f"{kind} {info}?",
            "verification_info": json.dumps(info), "metadata": "{}"}  # fmt: skip


def kodcode(question: str, test: str | None) -> dict[str, Any]:
    return {"question": question, "solution": "def f(): return 1", "test": test, "test_info": []}


TESTS = {"inputs": ["1 2\n"], "outputs": ["3\n"]}
PYTEST = "from solution import f\ndef test_f():\n    assert f() == 1\n"
TURNS = "the last message is of the role"
ODD = {
    "a program in place of a solution is no answer": Odd(
        [kodcode("p", PYTEST), kodcode("q", None), kodcode("r", "")],
        ["code ", "bad_tests the row has no tests", "bad_tests"],
    ),
    "a solution with a box beside tests": Odd(
        [{"problem": "p", "solution": "so \\boxed{7}", "tests": None},
         {"problem": "q", "solution": "print(1)", "tests": json.dumps(TESTS)},
         {"problem": "r", "solution": "print(1)", "tests": None}],
        ["math 7", "code ", "no_answer there is no answer in the last"],
    ),
    "other rows of SYNTHETIC-1": Odd(
        [synthetic("verifiable_math", {"ground_truth": 7}),
         synthetic("verifiable_math", {"ground_truth": None}), synthetic("git_diff", {}),
         synthetic("code_output_prediction", {"output": "3"}),
         synthetic("verifiable_code", {"language": "python", "test_cases": []})],
        ["math 7", "no_answer the column 'verification_info.ground_truth' has no value",
         "other_kind", "bad_tests", "bad_tests"],
    ),
    "labels that are no answer": Odd(
        [verl("p", '["7"]'), verl("q", "[]"), verl("r", '[""]'), verl("s", "\\boxed{}"),
         verl("t", "proof"), verl("u", "?")],
        ["math 7", *["no_answer the answer is empty"] * 5],
    ),
    "an object in place of an answer": Odd(
        [verl("p", "7"), verl("q", '{"target": 24, "numbers": [4, 6]}')],
        ["math 7", "bad_tests the answer is an object (target, numbers), which is neither a text"],
    ),
    "conversations without a last question": Odd(
        [verl("p", "7"), verl("", "7"), verl("", "7", prompt=[{"role": "system", "content": "s"}]),
         verl("", "7", prompt=[*user("q"), {"role": "tool", "content": "8"}]),
         verl("", "7", prompt=[*user("q"), {"role": "assistant", "content": "7"}]),
         verl("", "7", prompt=[]), verl("", "7", prompt=None)],
        ["math 7", "no_question", f"not_a_question {TURNS} 'system'",
         f"not_a_question {TURNS} 'tool'", "not_a_question the messages end in an answer",
         *["no_question the column 'prompt' has no value"] * 2],
        ("parquet",),
    ),
    "a name with a dot may be that of a column": Odd(
        [{"prompt": "p", "reward_model.ground_truth": "7"},
         {"prompt": "q", "reward_model.ground_truth": None}],
        ["math 7", "no_answer the column 'reward_model.ground_truth' has no value"],
    ),
    "columns much like keys of ours": Odd(
        [{"question": "p", "answer": "7", "tags": ["a"], "answers": ["7"], "problems": 2},
         {"question": "q", "answer": "7", "spilt": "train"},
         {"question": "r", "answer": "7", "split": "validation"},
         {"question": "s", "answer": "7", "pass_rate": 7}],
        ["math 7", "malformed unknown key 'spilt'; did you mean 'split'?",
         "malformed prompts.columns.split = '-'", "malformed prompts.columns.pass_rate = '-'"],
        ("jsonl",),
    ),
}  # fmt: skip
CASES = [(name, suffix) for name, one in ODD.items() for suffix in one.suffixes]


@pytest.mark.parametrize(("name", "suffix"), CASES)
def test_each_odd_row_is_read_or_named(tmp_path: Path, name: str, suffix: str) -> None:
    odd = ODD[name]
    path = write(tmp_path / f"a.{suffix}", odd.rows)
    row = "row " if suffix == "parquet" else ""
    source = PromptSource(path=path, held_out_share=0.0, faulty="drop")
    config = Config(prompts=[source])
    findings = check_prompts(config, with_lengths=False)
    told = {fault.place: fault for fault in findings.faults}
    kept = {prompt.place: prompt for prompt in findings.parts[0].prompts}
    for number, expected in enumerate(odd.found, 1):
        place = f"{path}:{row}{number}"
        reason, _, text = expected.partition(" ")
        if reason in ("math", "code"):
            assert (kept[place].task, kept[place].answer) == (reason, text)
        else:
            assert told[place].reason == reason and text in told[place].text
    # A run keeps the same rows, and could grade them.
    sets = material_of_run(config).divide()
    assert {prompt.place for prompt in sets.all} == kept.keys()
    settings.check_prompts(sets.all, config.reward)
    with pytest.raises(InputError, match=f"{len(told)} of {len(odd.rows)} rows"):
        read(path, faulty="refuse")


@pytest.mark.parametrize("kind", ["auto", "jsonl"])
def test_the_entry_of_a_named_task_is_read_as_it_is(tmp_path: Path, kind: str) -> None:
    """An environment's entry may have any keys, also those of tests that we know."""
    entries = [{"rubric": "it is short"}, {"inputs": ["1"], "outputs": ["2"]}, {"entry_point": 3}]
    rows = [{"task": "essay", "question": str(n), "entry": e} for n, e in enumerate(entries)]
    path = write(tmp_path / "a.jsonl", rows)
    unnamed = write(tmp_path / "b.jsonl", [{k: r[k] for k in ("question", "entry")} for r in rows])
    for source in (PromptSource(path=path, kind=kind),
                   PromptSource(path=unnamed, kind=kind, task="essay")):  # fmt: skip
        faults: list[RowFault] = []
        for on_fault in (None, faults.append):
            prompts = read_source(source, 0, key="prompts.kind", on_fault=on_fault).prompts
            assert [json.loads(prompt.entry) for prompt in prompts] == entries
            assert {(p.task, p.answer) for p in prompts} == {("essay", "")} and not faults
            assert [p.question for p in prompts] == ["0", "1", "2"]
    with pytest.raises(InputError, match=r'form that is known.*write "task" into the row'):
        read(write(tmp_path / "c.jsonl", [{"question": "q", "entry": {"rubric": "short"}}]))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("kind", ["auto", "SYNTHETIC-1", "NeMo-Gym"])
def test_a_file_of_code_alone_is_known_as_its_set(tmp_path: Path, kind: str, suffix: str) -> None:
    cases = [{"type": "stdin_stdout", "input": "1 2\n", "output": "3\n"}]
    code = synthetic("verifiable_code", {"language": "python", "test_cases": cases})
    nemo = {"responses_create_params": {"input": user("Add.")},
            "verifier_metadata": {"unit_tests": TESTS}}  # fmt: skip
    for name, row in (("SYNTHETIC-1", code), ("NeMo-Gym", nemo)):
        if kind in ("auto", name):
            reading = read(write(tmp_path / f"{name}.{suffix}", [row]), kind=kind)
            assert f"read as {name}; " in reading.notes[0]
            assert [prompt.task for prompt in reading.prompts] == ["code"]


@pytest.mark.parametrize(
    ("column", "rates", "said"),
    [
        ("llama8b_solve_rate", [0.5, 50.0], "llama8b_solve_rate is no rate"),
        ("difficulty", ["5/8", "hard"], "difficulty is no rate"),
        ("difficulty", ["5/8", "4/8"], "pass_rate = difficulty"),
        ("difficulty", [5.5, 6.0], ""),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_column_of_rates_is_used_or_said(
    tmp_path: Path, column: str, rates: list[Any], said: str, suffix: str
) -> None:
    rows = [{"problem": f"{n}", "answer": "7", column: rate} for n, rate in enumerate(rates)]
    note = "".join(read(write(tmp_path / f"a.{suffix}", rows)).notes).partition("columns:")[2]
    assert said in note and ("rate" in note) == bool(said)


def test_a_condition_that_no_row_meets_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"question": "p", "answer": "7", "level": 5}])
    unmet = r"a\.jsonl has no rows that meet prompts\.where: "
    with pytest.raises(InputError, match=f"{unmet}'level == 4': the first row has level = 5"):
        read(path, where=["level == 4"])
    with pytest.raises(InputError, match=f"{unmet}.* holds numbers, as 5, .* without quotes"):
        read(path, where=["level == '5'"])


def test_rows_of_reasoning_gym_need_its_marks(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [{"question": "p", "answer": "7"}])
    with pytest.raises(InputError, match="is reasoning_gym, .* has no metadata.source_dataset"):
        read(path, kind="reasoning_gym")
    with pytest.raises(InputError, match="prompts.path = .* is not read next to prompts.name"):
        read(path, kind="reasoning_gym", name="chain_sum", train_size=4)


def test_keys_that_a_kind_does_not_read_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"question": "p", "answer": "7"}])

    def warnings(**given: Any) -> list[str]:
        notes = read_prompts([PromptSource(path=path, **given)], seed=0).notes
        return [note for note in notes if note.startswith("warning")]

    told = f"warning: {path} is read by kind 'files', without prompts.options (for reasoning_gym), "
    made: dict[str, Any] = {"options": {"min_terms": 2}, "train_size": 9}
    assert warnings(**made) == [f"{told}prompts.train_size (for reasoning_gym)"]
    [told] = warnings(kind="jsonl", template="{question}?", **made)
    assert told.endswith("(for reasoning_gym), prompts.template (for files, hub, reasoning_gym)")
    assert not warnings(template="{question}?")
