"""Public data sets by their form: each is recognised, odd rows are named, right is told from wrong.

The rows are written by hand after the sets' published forms. The real scorer grades.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.prompts import PromptSource
from megatron_rl.data.sources import read_source
from megatron_rl.data.tables.source import Reading
from megatron_rl.protocol.types import Prompt
from tests.verification.requests import boxed, make_request, make_rules
from verification.score import score


class Form(NamedTuple):
    """A small file of a data set."""

    read_as: str
    """The data set that the note names."""
    rows: list[dict[str, Any]]
    answers: list[list[str]]
    """Accepted answers of each row that is kept, in the order of rows."""
    right: str
    """A right answer to the first kept row."""
    wrong: str
    said: str = ""
    """A part of the note."""
    rates: list[float | None] | None = None


def user(content: Any, *before: dict[str, Any]) -> list[dict[str, Any]]:
    return [*before, {"role": "user", "content": content}]


def verl(question: str, truth: str, ability: str = "math", **more: Any) -> dict[str, Any]:
    return {"data_source": "x", "prompt": user(question), "ability": ability,
            "reward_model": {"style": "rule", "ground_truth": truth}, **more}  # fmt: skip


def nemo(content: Any, answer: str | None, **more: Any) -> dict[str, Any]:
    request = {"input": content if isinstance(content, str) else user(content)}
    return {"responses_create_params": request, "expected_answer": answer,
            "agent_ref": {"name": "math_with_judge_simple_agent"}, **more}  # fmt: skip


SYSTEM = {"role": "system", "content": "Use the actions [ASSESS] and [ADVANCE]."}
TESTS = json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})
DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem."
    '\n\n{}\n\nRemember to put your answer on its own line after "Answer:".'
)
CHAIN = {"source_dataset": "chain_sum", "source_index": 0, "expression": "4 + 3", "num_terms": 2}

FORMS = {
    "gsm8k": Form(
        "GSM8K",
        [{"question": "48 + 24?", "answer": "48+24 = <<48+24=72>>72.\n#### 72"},
         {"question": "Two houses?", "answer": "so\n#### 1,001,500"},
         {"question": "Lost?", "answer": "The end of this row was lost."}],
        [["72"], ["1001500"]], "72.0", "24", "1 no_answer",
    ),
    "math": Form(
        "MATH, NuminaMath",
        [{"problem": "Half?", "solution": "Not \\boxed{3} but $\\boxed{\\frac{1}{2}}$."},
         {"problem": "Prove it.", "solution": "A proof."}],
        [["\\frac{1}{2}"]], "0.5", "3", "1 no_answer",
    ),
    "dapo": Form(
        "DAPO-Math-17k",
        [verl(DAPO.format("1+1?"), "2")] * 100 + [verl(DAPO.format("2+2?"), "4")] * 100,
        [["2"], ["4"]], "2", "4", "198 repeated",
    ),
    "deepscaler": Form(
        "DeepScaleR, AIME",
        [{"problem": "p", "answer": "-\\frac{2}{3}", "solution": "..."},
         {"problem": "q", "answer": "", "solution": "..."}],
        [["-\\frac{2}{3}"]], "-2/3", "2/3", "1 no_answer",
    ),
    "openr1": Form(
        "OpenR1-Math",
        [{"problem": "p", "answer": "(-3,2)", "uuid": "u1", "messages": user("p")},
         {"problem": "q", "answer": None, "uuid": "u2", "messages": user("q")}],
        [["(-3,2)"]], "(-3, 2)", "(2,-3)",
    ),
    "big-math": Form(
        "Big-Math",
        [{"problem": "p", "answer": "7", "llama8b_solve_rate": 0.25},
         {"problem": "q", "answer": "8", "llama8b_solve_rate": None}],
        [["7"], ["8"]], "7", "8", "1 without a known pass rate", [0.25, None],
    ),
    # A difficulty of 0.5 is no pass rate.
    "deepmath": Form(
        "DeepMath-103K",
        [{"question": "p", "final_answer": "0", "difficulty": 0.5, "topic": "Limits",
          "r1_solution_1": "\\boxed{9}", "r1_solution_2": "", "r1_solution_3": ""}],
        [["0"]], "0", "9", rates=[None],
    ),
    "polaris": Form(
        "Polaris",
        [{"problem": "p", "answer": "7", "difficulty": "5/8"},
         {"problem": "q", "answer": "8", "difficulty": "0/8"}],
        [["7"], ["8"]], "7", "8", "pass_rate = difficulty", [0.625, 0.0],
    ),
    "openmath": Form(
        "OpenMathReasoning",
        [{"problem": "p", "expected_answer": "7", "pass_rate_72b_tir": "n/a",
          "problem_type": "has_answer_extracted", "generated_solution": "a"},
         {"problem": "p", "expected_answer": "7", "pass_rate_72b_tir": "n/a",
          "problem_type": "has_answer_extracted", "generated_solution": "b"},
         {"problem": "q", "expected_answer": "8", "pass_rate_72b_tir": "0.21875",
          "problem_type": "no_answer_extracted", "generated_solution": "c"},
         {"problem": "r", "expected_answer": "n/a", "pass_rate_72b_tir": "n/a",
          "problem_type": "converted_proof", "generated_solution": "d"}],
        [["7"], ["8"]], "7", "8", "1 without a known pass rate", [None, 0.21875],
    ),
    "gsm8k of verl": Form(
        "GSM8K of verl",
        [verl("48 + 24? Let's think step by step and output the final answer after \"####\".", "72",
              data_source="openai/gsm8k"),
         verl("p", "7")],
        [["72"], ["7"]], "72", "24", "without the instructions",
    ),
    "skywork": Form(
        "Skywork-OR1, Eurus-2-RL, verl",
        [verl("p", '["\\\\frac{7}{2}", "3.5"]'), verl("q", '["[1, 2]"]'), verl("r", "[1, 2]")],
        [["\\frac{7}{2}", "3.5"], ["[1, 2]"], ["[1, 2]"]], "7/2", "3",
        "1 with several accepted answers",
    ),
    "eurus": Form(
        "Skywork-OR1, Eurus-2-RL, verl",
        [verl("p", "7", prompt=user("p", SYSTEM)),
         verl("Add.", TESTS, "code", prompt=user("Add.", SYSTEM)),
         verl("No tests.", "print(3)", "code", prompt=user("No tests.", SYSTEM))],
        [["7"], [""]], "7", "8", "1 bad_tests",
    ),
    "nemo": Form(
        "NeMo-Gym",
        [nemo("p", "7"), nemo([{"type": "input_text", "text": "q"}], "8"),
         nemo("r {question}", "9"), nemo("s", None), nemo("t", "<answer>"),
         nemo("", None, _hf_placeholder={"row": 5}), nemo([{"type": "input_image"}], "1")],
        [["7"], ["8"]], "7", "8",
        "rows left out: 3 placeholder",
    ),
    "synthetic": Form(
        "SYNTHETIC-1",
        [{"problem_id": "a", "task_type": "verifiable_math", "prompt": "p",
          "verification_info": json.dumps({"ground_truth": "\\frac{1}{2}"})},
         {"problem_id": "b", "task_type": "verifiable_code", "prompt": "Add.",
          "verification_info": json.dumps({"language": "python", "test_cases": []})},
         {"problem_id": "c", "task_type": "llm_judgeable_groundtruth_similarity", "prompt": "Why?",
          "verification_info": json.dumps({"ground_truth": "Because."})}],
        [["\\frac{1}{2}"]], "0.5", "2", "1 other_kind",
    ),
    "gym": Form(
        "reasoning_gym",
        [{"question": "4 + 3 =", "answer": "7", "metadata": CHAIN},
         {"question": "Queens?", "answer": "x",
          "metadata": {**CHAIN, "source_dataset": "n_queens"}}],
        [["7"]], "7", "8", "1 refused_data_set",
    ),
    "parts": Form(
        "conversations",
        [{"messages": user([{"type": "text", "text": "4 + "}, {"type": "text", "text": "3?"}]),
          "answer": "7"},
         {"messages": user([{"type": "image_url", "image_url": {"url": "x"}}]), "answer": "1"}],
        [["7"]], "7", "8", "1 not_text",
    ),
    "lists": Form(
        "",
        [{"question": "p", "answer": ["\\frac{7}{2}", "3.5"]},
         {"question": "q", "answer": '["\\frac{7}{2}", "3.5"]'},
         {"question": "r", "answer": "['7/2', '3.5']"}, {"question": "s", "answer": "[1, 2]"},
         {"question": "t", "answer": [" ", ""]},
         {"question": [{"type": "text", "text": "u"}], "answer": [7, 3.5]}],
        [["\\frac{7}{2}", "3.5"], ["\\frac{7}{2}", "3.5"], ["7/2", "3.5"], ["[1, 2]"],
         ["7", "3.5"]],
        "3.5", "3", "4 with several accepted answers",
    ),
}  # fmt: skip


def read(path: Path, **source: Any) -> Reading:
    given = {"path": path, "held_out_share": 0.0, "faulty": "drop", **source}
    return read_source(PromptSource(**given), 0, key="prompts.kind")


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def grade(prompt: Prompt, text: str) -> str:
    request = make_request(
        text, task=prompt.task, answer=prompt.answer, entry=prompt.entry, problem=prompt.question
    )
    request = msgspec.structs.replace(request, other_answers=prompt.other_answers)
    return score(request, make_rules()).reason


# One column of Parquet has one type, so contents in parts and lists have files of lines alone.
@pytest.mark.parametrize(
    ("name", "suffix"),
    [(name, suffix) for name in FORMS for suffix in ("jsonl", "parquet")
     if suffix == "jsonl" or name not in ("nemo", "lists")],
)  # fmt: skip
def test_each_form_is_read_and_graded(tmp_path: Path, name: str, suffix: str) -> None:
    form = FORMS[name]
    reading = read(write(tmp_path / f"{name}.{suffix}", form.rows))
    assert [prompt.answers for prompt in reading.prompts] == form.answers
    first = reading.prompts[0]
    assert grade(first, boxed(form.right)) == "correct"
    assert grade(first, boxed(form.wrong)) == "wrong_answer"
    note = "".join(reading.notes)
    assert form.said in note
    if suffix == "parquet":
        assert form.read_as == "conversations" or f"read as {form.read_as};" in note
    if form.rates is not None:
        assert [prompt.pass_rate for prompt in reading.prompts] == form.rates


def test_instructions_and_messages_become_plain_questions(tmp_path: Path) -> None:
    asked = {
        name: [
            p.question for p in read(write(tmp_path / f"{name}.jsonl", FORMS[name].rows)).prompts
        ]
        for name in ("dapo", "gsm8k of verl", "nemo", "parts", "synthetic")
    }
    assert asked == {
        "dapo": ["1+1?", "2+2?"], "gsm8k of verl": ["48 + 24?", "p"], "nemo": ["p", "q"],
        "parts": ["4 + 3?"], "synthetic": ["p"],
    }  # fmt: skip


def test_rows_of_code_and_of_reasoning_gym_have_their_tasks(tmp_path: Path) -> None:
    math, code = read(write(tmp_path / "eurus.jsonl", FORMS["eurus"].rows)).prompts
    assert (math.task, code.task) == ("math", "code")
    program = "<think>a</think>\n```python\na, b = map(int, input().split())\nprint(a {} b)\n```"
    assert [grade(code, program.format(sign)) for sign in "+-"] == ["correct", "wrong_output"]
    [gym] = read(write(tmp_path / "gym.jsonl", FORMS["gym"].rows)).prompts
    assert gym.task == "reasoning_gym"


def test_columns_that_say_what_rows_are_count_in_their_own_sets_alone(tmp_path: Path) -> None:
    rows = [{"question": "p", "answer": "7", "task_type": "logic", "ability": "code"},
            {"question": "q", "answer": "8", "entry": "", "task_type": "decode"}]  # fmt: skip
    assert [p.answer for p in read(write(tmp_path / "a.jsonl", rows)).prompts] == ["7", "8"]
    rows = [verl("p", "7", "decoding"), verl("q", "8", "coding"), verl("r", "9", "Code")]
    assert [p.answer for p in read(write(tmp_path / "b.jsonl", rows)).prompts] == ["7"]


def test_our_system_message_may_replace_that_of_the_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "eurus.parquet", FORMS["eurus"].rows)
    roles = {
        how: [[m.role for m in p.messages] for p in read(path, system=how).prompts]
        for how in ("keep", "replace")
    }
    assert roles == {"keep": [["system", "user"]] * 2, "replace": [["user"]] * 2}
    assert "2 whose own system message was removed" in read(path, system="replace").notes[0]


@pytest.mark.parametrize(
    "kind", ["gsm8k", "GSM8K", "dapo-math-17k", "Polaris", "openmathreasoning"]
)
def test_a_data_set_may_be_named_and_its_columns_must_be_there(tmp_path: Path, kind: str) -> None:
    name = {"dapo-math-17k": "dapo", "openmathreasoning": "openmath"}.get(kind, kind.lower())
    path = write(tmp_path / "rows.parquet", FORMS[name].rows)
    assert [p.answers for p in read(path, kind=kind).prompts] == FORMS[name].answers
    other = write(tmp_path / "other.parquet", [{"text": "p", "answr": "7"}])
    with pytest.raises(
        InputError, match=f"prompts.kind = '{kind}' is .*has no .*it has text, answr"
    ):
        read(other, kind=kind)


def test_an_unknown_kind_is_told_the_nearest_data_set(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", FORMS["gsm8k"].rows)
    with pytest.raises(InputError, match="'openmathreasonin' .* did you mean 'OpenMathReasoning'"):
        read(path, kind="openmathreasonin")
    with pytest.raises(InputError, match="prompts.kind = 'polaris' is Polaris"):
        read(path, kind="polaris")
