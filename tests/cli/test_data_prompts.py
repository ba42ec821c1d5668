"""`megatron-rl data check` and `data show`: each fault with its row, prompts as models see them."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_rl.cli import main as cli
from megatron_rl.cli.data_tools.prompts import CheckOptions, ShowOptions, check, show
from megatron_rl.config.errors import InputError
from megatron_rl.config.prompts import PromptSource
from megatron_rl.data.prompts import read_prompts
from megatron_rl.data.tiny_model import write_tokenizer

pytestmark = pytest.mark.usefixtures("forked_tokenizer_children")

LONG = "Find the sum of all positive divisors of the number n that is given here"


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def checked(source: Path, *overrides: str, **options: Any) -> tuple[int, dict[str, Any]]:
    console = Console(file=io.StringIO(), width=200)
    given = CheckOptions(str(source), list(overrides), json=True, **options)
    code = check(given, console)
    return code, json.loads(console.file.getvalue())


def faults(found: dict[str, Any]) -> list[tuple[str, str]]:
    return sorted((f["place"].rpartition("/")[2], f["reason"]) for f in found["faults"])


def test_every_fault_is_named_with_its_line(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.jsonl",
        {"question": "1+1?", "answer": "2"},
        "{bad json",
        {"question": "2+2?"},
        {"question": " 1+1? ", "answer": "3"},
        {"question": "a fraction?", "answer": "\\frac{1"},
        {"question": "whose task?", "answer": "5", "task": "mathh"},
        {"question": "nothing?", "answer": " "},
        {"question": "a program?", "answer": "", "task": "code", "entry": "{}"},
        {"question": "same id?", "answer": "1", "id": "mine:1"},
        {"question": "1+1?", "answer": "2"},
        {"messages": [{"role": "assistant", "content": "Hello."}], "answer": "1"},
        {"question": "fine?", "answer": "\\{1, 2\\}"},
        {"question": "in words?", "answer": "Monday"},
    )
    code, found = checked(path)
    assert code == 1 and found["prompts"] == 3
    assert found["rows"] == 13 == found["prompts"] + sum(found["counts"].values())
    assert faults(found) == [
        ("mine.jsonl:10", "repeated"),
        ("mine.jsonl:11", "not_a_question"),
        ("mine.jsonl:2", "no_json"),
        ("mine.jsonl:3", "no_answer"),
        ("mine.jsonl:4", "repeated_with_other_answer"),
        ("mine.jsonl:5", "unreadable_answer"),
        ("mine.jsonl:6", "unknown_task"),
        ("mine.jsonl:7", "no_answer"),
        ("mine.jsonl:8", "bad_tests"),
        ("mine.jsonl:9", "repeated_id"),
    ]
    assert found["counts"]["no_answer"] == 2
    # Where the same question may come again, it is no fault. An id that does is one.
    _, allowed = checked(path, 'prompts.0.repeated="keep"')
    reasons = {reason for _, reason in faults(found)} - {reason for _, reason in faults(allowed)}
    assert reasons == {"repeated", "repeated_with_other_answer"}


def test_white_space_makes_no_other_answer(tmp_path: Path) -> None:
    path = write(tmp_path / "w.jsonl", {"question": "a?", "answer": "1 +  2"},
                 {"question": "a?", "answer": "1 + 2"})  # fmt: skip
    assert faults(checked(path)[1]) == [("w.jsonl:2", "repeated")]


def test_a_row_with_several_faults_counts_once(tmp_path: Path) -> None:
    question = "How many sheep are there on the two meadows?"
    twice = {"question": question, "answer": "\\frac{1"}
    path = write(tmp_path / "p.jsonl", {"question": question, "answer": "2"}, twice,
                 {"question": "no answer?"}, {"question": "fine?", "answer": "1"})  # fmt: skip
    config = tmp_path / "run.toml"
    sets = f'[[eval.sets]]\nname = "s"\nprompts = {{path = "{path}", faulty = "drop"}}\n'
    config.write_text(f'[[prompts]]\npath = "{path}"\n{sets}')
    _, alone = checked(path)
    assert len(alone["faults"]) == 3 and (alone["rows"], alone["prompts"]) == (4, 2)
    assert alone["counts"] == {"repeated_with_other_answer": 1, "no_answer": 1}
    # The same file as a set, too: each place is two rows, and every train row leaks.
    _, both = checked(config)
    assert (both["rows"], both["prompts"]) == (8, 2)
    assert both["counts"] == {
        "repeated_with_other_answer": 2, "no_answer": 2, "in_evaluation_set": 2,
    }  # fmt: skip


def test_rows_of_parquet_are_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"problem": "p", "answer": "1"}, {"problem": "q", "answer": None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    code, found = checked(tmp_path / "a.parquet")
    assert code == 1 and faults(found) == [("a.parquet:row 2", "no_answer")]


def test_prompts_that_hold_an_evaluation_question(tmp_path: Path) -> None:
    write(
        tmp_path / "train.jsonl",
        {"question": "Tell me a number", "answer": "1"},
        {"question": f"{LONG.upper()}.", "answer": "2"},
        {"question": f"Here is one:  {LONG}. Explain it.", "answer": "2"},
        {"question": LONG.replace("sum", "product"), "answer": "2"},
        {"question": "TELL me  a number", "answer": "1"},
        {"question": "Tell me a number and why", "answer": "1"},
    )
    write(
        tmp_path / "aime.jsonl",
        {"question": LONG, "answer": "2"},
        {"question": "Tell me a number", "answer": "1"},
    )
    config = tmp_path / "run.toml"
    config.write_text(
        f'[[prompts]]\npath = "{tmp_path}/train.jsonl"\n'
        f'[[eval.sets]]\nname = "aime"\nprompts = {{path = "{tmp_path}/aime.jsonl"}}\n'
    )
    code, found = checked(config)
    leaks = [place for place, reason in faults(found) if reason == "in_evaluation_set"]
    # Line 2 holds the question and a full stop; short questions count as a whole alone.
    assert code == 1 and leaks == [f"train.jsonl:{n}" for n in (1, 2, 3, 5)]
    assert "question is that of" in found["faults"][1]["text"]


def test_prompts_without_room_and_a_clean_file(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write_tokenizer(tmp_path / "model")
    path = write(
        tmp_path / "mine.jsonl",
        {"question": "1 + 1", "answer": "2"},
        {"question": "1 + " * 400, "answer": "2"},
    )
    limits = [
        "generator.context_tokens=600",
        "sampling.max_new_tokens=100",
        'render.system_prompt=""',
    ]
    code, found = checked(path, *limits, model=tmp_path / "model")
    assert code == 1 and faults(found) == [("mine.jsonl:2", "too_long")]
    assert "the prompt has 1601 tokens; allowed are 1 to 500" in found["faults"][0]["text"]
    code, found = checked(path, "generator.context_tokens=40000", model=tmp_path / "model")
    assert code == 0 and found["faults"] == [] and found["notes"] == []


def test_prompts_longer_than_the_model_has_positions_are_faults(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write_tokenizer(tmp_path / "model")
    config = {"max_position_embeddings": 256, "vocab_size": 64}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    # The tokenizer knows each character; the template writes one token more.
    lines = [{"question": "1" * length, "answer": "2"} for length in (254, 255, 368)]
    path = write(tmp_path / "mine.jsonl", *lines)
    code, found = checked(path, 'render.system_prompt=""', model=tmp_path / "model")
    assert code == 1 and faults(found) == [
        ("mine.jsonl:2", "too_long"),
        ("mine.jsonl:3", "too_long"),
    ]
    assert [fault["text"].partition(": ")[2] for fault in found["faults"]] == [
        f"the prompt has {tokens} tokens; allowed are 1 to 255: the model has 256 positions"
        for tokens in (256, 369)
    ]
    assert "the model has 256 positions (max_position_embeddings), fewer than" in found["notes"][0]
    scaled = config | {"rope_scaling": {"factor": 2.0}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(scaled))
    code, found = checked(path, 'render.system_prompt=""', model=tmp_path / "model")
    assert code == 0


TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
HISTORY = [
    {"role": "user", "content": "2+3?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "5"},
    {"role": "user", "content": "And plus 1?"},
]


@pytest.mark.parametrize("kind", ["auto", "jsonl"])
@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"messages": HISTORY}, "message 1 has 'tool_calls', which prompts cannot have"),
        ({"messages": json.dumps(HISTORY)}, "message 1 has 'tool_calls', which prompts cannot"),
        ({"question": "2+3?", "tools": [TOOL]}, "'tools' offers tools, and prompts are rendered"),
        ({"question": "2+3?", "tools": [{"type": "web_search"}]}, "'tools' offers tools"),
        ({"question": "2+3?", "tools": json.dumps([TOOL])}, "'tools' offers tools, and prompts"),
    ],
)
def test_tools_and_calls_of_prompts_are_refused_and_not_left_out(
    tmp_path: Path, kind: str, row: dict[str, Any], text: str
) -> None:
    empty = [{"role": "user", "content": "1+1?", "tool_calls": None}]
    fine = {"messages": empty, "answer": "2", "tools": []}
    path = write(tmp_path / "mine.jsonl", fine, {**row, "answer": "6"})
    if kind == "auto" and "question" in row:
        fine = {"question": "1+1?", "answer": "2", "tools": None}
        write(path, fine, {**row, "answer": "6"})
    if kind == "auto":
        code, found = checked(path)
        assert code == 1 and faults(found) == [("mine.jsonl:2", "tools")]
        assert text in found["faults"][0]["text"] and found["prompts"] == 1
    with pytest.raises(InputError, match=rf"mine\.jsonl:2: {text}"):
        read_prompts([PromptSource(path=path, kind=kind)], 0)


def test_few_faults_are_printed_and_all_are_counted(tmp_path: Path) -> None:
    path = write(
        tmp_path / "tasks.jsonl",
        *[{"question": f"q{n}", "answer": "1", "task": f"no{n}"} for n in range(30)],
    )
    console = Console(file=io.StringIO(), width=200)
    assert check(CheckOptions(str(path), [], limit=4), console) == 1
    said = console.file.getvalue()
    assert said.count("unknown_task: /") == 4 and "... and 26 more: --limit 30" in said
    assert "fault: unknown_task" in said and " 30 " in said


@pytest.mark.parametrize(
    ("row", "reason", "said"),
    [
        ({"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]},
         "no_answer", "the messages end in an answer of the assistant; allowed are"),
        ({"prompt": "1+1?", "completion": "2"}, "no_answer",
         "there is a 'completion' to imitate and no \"answer\"; allowed is"),
        ({"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}],
          "answer": "2"}, "not_a_question", "the messages end in an answer of the assistant"),
    ],
)  # fmt: skip
def test_rows_to_imitate_are_one_line_with_their_count(
    tmp_path: Path, row: dict[str, Any], reason: str, said: str
) -> None:
    path = write(tmp_path / "sft.jsonl", *[row] * 1200)
    console = Console(file=io.StringIO(), width=200)
    assert check(CheckOptions(str(path), []), console) == 1
    [line] = [text for text in console.file.getvalue().split("\n") if said in text]
    places = ", ".join(f"{path}:{n}" for n in (1, 2, 3))
    assert line.startswith(f"{reason}: 1,200 rows ({places}, ...): {said}")
    for faulty in ("refuse", "drop"):
        with pytest.raises(InputError, match="all 1,200 rows of .* would leave none") as error:
            show(ShowOptions(str(path), [f"prompts.0.faulty={faulty}"]), console)
        assert said in str(error.value) and "leave such rows out" not in str(error.value)


def test_check_and_show_say_which_system_messages_disagree_with_the_format_check(
    tmp_path: Path,
) -> None:
    def row(number: int, system: str) -> dict[str, Any]:
        turns = [{"role": "system", "content": system}, {"role": "user", "content": f"q{number}"}]
        return {"messages": turns, "answer": "1"}

    path = write(
        tmp_path / "own.jsonl",
        *[row(n, "Reason, then write #### and the number.") for n in range(2)],
        row(2, "Reason step by step, and put your final answer within \\boxed{}."),
        {"question": "q", "answer": "1"},
    )
    code, found = checked(path)
    assert code == 0 and found["faults"] == []
    said = found["notes"][0]
    assert said.startswith(
        "warning: 2 of 4 prompts have a system message of their own, which disagrees with the "
        "format check: 2 ask for the answer behind ####, but box or think_box demands the answer "
        f'in \\boxed{{}} (first {path}:1). Set prompts.system="replace"'
    )
    notes = checked(path, "prompts.0.system=replace")[1]["notes"]
    assert not [note for note in notes if note.startswith("warning")]
    console = Console(file=io.StringIO(), width=200)
    assert show(ShowOptions(str(path), ["prompts.0.held_out_share=0"], rows=1), console) == 0
    assert said in console.file.getvalue()


def test_hostile_text_moves_no_cursor(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.jsonl",
        {
            "question": "red \u001b[31m \u202e back [bold]x[/bold]\nsecond line",
            "answer": "\u001b]0;t\u0007",
        },
        {"question": "red \u001b[31m \u202e back [bold]x[/bold]\nsecond line", "answer": "1"},
    )
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    share = ["prompts.0.held_out_share=0"]
    assert show(ShowOptions(str(path), share, rows=2), console) == 0
    assert check(CheckOptions(str(path), share), console) == 1
    said = console.file.getvalue()
    assert not {"\u001b[31m", "\u202e", "\u0007", "\u001b]"} & {
        part for part in ("\u001b[31m", "\u202e", "\u0007", "\u001b]") if part in said
    }
    assert "back [bold]x[/bold]" in said and "\nsecond line" in said


def test_show_prints_the_rendered_prompt_and_its_tokens(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "model").mkdir()
    write_tokenizer(tmp_path / "model")
    path = write(tmp_path / "mine.jsonl", {"question": "1 + 2", "answer": "3", "split": "train"})
    console = Console(file=io.StringIO(), width=400)
    assert (
        show(ShowOptions(str(path), ['render.system_prompt=""'], model=tmp_path / "model"), console)
        == 0
    )
    said = console.file.getvalue()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    messages = [{"role": "user", "content": "1 + 2"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert f"task math, train, {len(ids)} tokens" in said and "answer: 3" in said
    for line in tokenizer.decode(ids).split("\n"):
        assert line in said


def test_show_and_check_say_what_was_taken(tmp_path: Path) -> None:
    rows = [
        {"problem": "p", "answer": ["\\frac{7}{2}", "3.5"], "difficulty": "5/8"},
        {"problem": "q", "answer": "7", "difficulty": "0/8"},
    ]
    path = write(tmp_path / "polaris.jsonl", *rows)
    code, found = checked(path)
    said = found["notes"][0]
    assert code == 0 and "2 prompts, read as Polaris;" in said
    assert "pass_rate = difficulty" in said and "1 with several accepted answers" in said
    console = Console(file=io.StringIO(), width=400)
    assert show(ShowOptions(str(path), ["prompts.0.held_out_share=0"], rows=2), console) == 0
    shown = console.file.getvalue()
    assert "answer: \\frac{7}{2} or 3.5" in shown and said in shown


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    path = write(tmp_path / "mine.jsonl", {"question": "q", "answer": "1", "split": "train"})
    with pytest.raises(InputError, match="expected one of train, held_out"):
        show(ShowOptions(str(path), [], split="test"), console)
    with pytest.raises(InputError, match="the split train has 1 prompts"):
        show(ShowOptions(str(path), [], start=5), console)
    with pytest.raises(InputError, match="there is no such folder"):
        show(ShowOptions(str(path), [], model=tmp_path / "none"), console)
    write(path, {"question": "q", "answer": "1", "split": "held_out"})
    said = "split train has no prompts: all 1 are held out, .* give --split held_out"
    with pytest.raises(InputError, match=said):
        show(ShowOptions(str(path), []), console)
    with pytest.raises(InputError, match="cannot read the prompts"):
        check(CheckOptions(str(tmp_path / "none.jsonl"), []), console)


def test_by_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "mine.jsonl", {"question": "q", "answer": "1"})
    assert cli.main(["data", "check", str(path)]) == 0
    assert "no faults" in capsys.readouterr().out
    gym = ["prompts.0.train_size=3", "prompts.0.held_out_size=2"]
    assert cli.main(["data", "show", "reasoning_gym:chain_sum", *gym, "--rows", "2"]) == 0
    said = capsys.readouterr().out
    assert said.count("--- chain_sum/train/") == 2 and "3 for training, 2 held out" in said
    assert cli.main(["data", "check", "reasoning_gym:chain_sumx"]) == 2


def test_tasks_of_a_users_own_come_with_their_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "mine.jsonl", {"question": "q", "answer": "1", "task": "near"})
    other = write(
        tmp_path / "other.jsonl",
        *[{"question": f"o{i}", "answer": "1", "split": "train"} for i in "abc"],
    )
    mine = tmp_path / "mine.toml"
    mine.write_text(
        f'[reward.tasks.near]\ncompare = "exact"\n[[prompts]]\npath = "{other}"\n'
        f'[[eval.sets]]\nname = "o"\nprompts.path = "{path}"\n'
    )
    assert cli.main(["data", "check", str(path)]) == 1
    said = capsys.readouterr().out
    assert "unknown task 'near'" in said and "--config FILE that has their" in said
    assert cli.main(["data", "check", str(path), "--config", str(mine), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompts"] == 1, "the file's own, no evaluation set"
    alone = ["data", "check", "--config", str(mine), "eval.sets=[]", "--json"]
    assert cli.main(alone) == 0, "a key is no source"
    assert json.loads(capsys.readouterr().out)["prompts"] == 3
    assert cli.main(["data", "show", "--config", str(mine)]) == 0
    assert "--- other:1 (" in capsys.readouterr().out
    with pytest.raises(InputError, match="give a file of prompts, or --config FILE"):
        check(CheckOptions(None, []), Console(file=io.StringIO()))
