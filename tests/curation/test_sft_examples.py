"""SFT examples mined from a run whose records are written out by hand."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_rl.cli.main import main
from megatron_rl.config.errors import InputError
from megatron_rl.config.thinking import ThinkTags
from megatron_rl.curation.rows import encode_lines
from megatron_rl.curation.sft_examples import (
    Mined,
    SftExampleOptions,
    mine_sft_examples,
    read_training_rollouts,
)
from megatron_rl.protocol.rollout import ConversationTurn, GivenMessage, given_ranges
from megatron_rl.protocol.rollout_files import RecordedSpan, RolloutRecord
from megatron_rl.protocol.types import ChatMessage, Prompt, Rollout
from megatron_rl.trainer.sft_dataset import SftExample, read_sft_dataset
from megatron_rl.trainer.sft_messages import SftMessage
from megatron_rl.trainer.sft_rendering import tokenize
from tests.generation.test_episodes import ScriptedEngine, play
from tests.protocol.real_templates import open_model

NO_INSTRUCTIONS = {"instruction_share": 0.0}


def record(problem: str, index: int = 0, **fields: Any) -> RolloutRecord:
    values = {
        "prompt_id": problem, "group": 1, "index": index, "task": "math", "problem": problem,
        "language": "", "text": f"<think>{index}</think>\\boxed{{7}}", "answer": "7",
        "reward": 1.0, "parts": {}, "reason": "correct", "tokens": 100, "versions": [0],
        "finish_reason": "stop", "seed": 0, "prompt_tail": "",
    }  # fmt: skip
    return RolloutRecord(**values | fields)


def mine(*records: RolloutRecord, step: int = 5, **values: Any) -> Any:
    options = SftExampleOptions(**NO_INSTRUCTIONS | values)
    rollouts = [Mined(item, step, f"f:{i}") for i, item in enumerate(records)]
    return mine_sft_examples(rollouts, instructions=[], prompts=[], options=options)


def wrong(problem: str, count: int) -> list[RolloutRecord]:
    return [record(problem, 100 + i, reason="wrong_answer", reward=0.1) for i in range(count)]


def test_each_rule_drops_what_it_names() -> None:
    outcome = mine(
        record("q", 0),
        record("q", 1, reason="wrong_answer"),
        record("q", 2, reward=None, reason="ungradable"),
        record("q", 3, finish_reason="length"),
        record("q", 4, tokens=9),
        record("q", 5, text=record("q", 0).text),
        min_tokens=10,
    )
    assert outcome.report.dropped == {
        "not_correct": 1, "ungraded": 1, "cut_at_limit": 1, "short": 1, "same_text": 1,
    }  # fmt: skip
    [example] = outcome.rows
    assert example.messages == [SftMessage("user", "q")] and example.task == "math"
    with pytest.raises(InputError, match="none of 1 rollouts is left: 1 early"):
        mine(record("q"), step=4, first_step=5)


TURNS = [
    ConversationTurn(0, 4, -1, [GivenMessage("user", "q")], "<think>1</think>a", 0.0, 1.0, 2),
    ConversationTurn(9, 12, 0, [GivenMessage("user", "and?")], "<think>2</think>b", 2.0, 3.0, 11),
]


def test_a_conversation_of_one_chat_teaches_all_its_replies(tmp_path: Path) -> None:
    [example] = mine(record("q", tokens=12, conversation=TURNS)).rows
    assert [(said.role, said.content) for said in example.messages] == [
        ("user", "q"), ("assistant", "<think>1</think>a"), ("user", "and?"),
    ]  # fmt: skip
    assert (example.response, example.learns_all) == ("<think>2</think>b", True)
    path = tmp_path / "sft.jsonl"
    path.write_text(encode_lines([example]))
    assert read_sft_dataset(path) == [example]
    opened = record("q", conversation=TURNS, prompt_tail="<think>\n")
    assert mine(opened).rows[0].response == "<think><think>2</think>b"
    called = msgspec.structs.replace(TURNS[1], given=[GivenMessage("assistant", "3")])
    chats = msgspec.structs.replace(TURNS[1], follows=-1)
    outcome = mine(
        record("q"), record("q", conversation=[TURNS[0], called]),
        record("q", conversation=[TURNS[0], chats]),
        record("q", spans=[RecordedSpan(0, 0, 4), RecordedSpan(0, 9, 100)]),
    )  # fmt: skip
    assert outcome.report.dropped == {"other_roles": 1, "several_chats": 1, "conversation": 1}


def test_an_empty_reply_of_the_policy_is_not_taught(tmp_path: Path) -> None:
    silent = msgspec.structs.replace(TURNS[0], text=" \n")
    [example] = mine(record("q", tokens=12, conversation=[silent, TURNS[1]])).rows
    assert [said.weight for said in example.messages] == [None, 0, None]
    path = tmp_path / "sft.jsonl"
    path.write_text(encode_lines([example]))
    assert read_sft_dataset(path) == [example]
    last = msgspec.structs.replace(TURNS[1], text="")
    outcome = mine(record("q"), record("q", text=""), record("q", conversation=[TURNS[0], last]))
    assert outcome.report.dropped == {"empty_reply": 2} and len(outcome.rows) == 1


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


@pytest.mark.parametrize(
    ("game", "replies"), [("count", ["one", "two  \n", "three 🙂"]), ("adds", [CALL, "5"])]
)
def test_a_mined_conversation_has_the_tokens_that_the_policy_sampled(
    game: str, replies: list[str], tmp_path: Path
) -> None:
    renderer, words = open_model(tmp_path / "model", "qwen2.5"), iter(replies)
    [rollout] = play(tmp_path, ScriptedEngine(renderer, lambda _: next(words)), game)
    assert isinstance(rollout, Rollout) and rollout.turns == len(replies)
    fields = {"tokens": len(rollout.token_ids), "task": "sums", "text": rollout.text}
    outcome = mine(record("p", conversation=rollout.conversation, **fields))
    [sequence] = tokenize(outcome.rows, renderer)
    whole = [*rollout.prompt_ids.tolist(), *rollout.token_ids.tolist()]
    assert sequence.token_ids.tolist() == whole
    assert sequence.given == given_ranges(rollout.spans)


def test_a_problem_gives_at_most_its_cap_the_same_ones_for_the_same_seed() -> None:
    records = [record("q", i) for i in range(30)]
    first, again = mine(*records, per_problem=3), mine(*reversed(records), per_problem=3)
    assert len(first.rows) == 3 and first.report.dropped == {"over_cap": 27}
    assert first.rows == again.rows
    chosen = {frozenset(t.response for t in mine(*records, seed=s).rows) for s in range(5)}
    assert len(chosen) > 1


def test_seldom_solved_problems_are_repeated_by_their_pass_rate() -> None:
    # Pass rates 1/2, 1/4, 1/16: 1, 2 and, capped, 4 copies of one SFT example each.
    records = [record("often"), *wrong("often", 1), record("less"), *wrong("less", 3)]
    records += [record("rare"), *wrong("rare", 15)]
    outcome = mine(*records)
    counts = Counter(example.messages[0].content for example in outcome.rows)
    assert counts == {"often": 1, "less": 2, "rare": 4}
    assert outcome.report.added == {"repeated": 4}


def test_parts_of_a_copy_are_there_in_that_share_of_the_examples() -> None:
    # Pass rate 1/3: 0.5 / (1/3) = 1.5 copies on average.
    records = [r for i in range(400) for r in (record(f"q{i}"), *wrong(f"q{i}", 2))]
    assert len(mine(*records).rows) == pytest.approx(600, abs=40)


def test_instruction_data_has_its_share_and_epochs_are_stated() -> None:
    rollouts = [Mined(record(f"q{i}"), 0, "f") for i in range(90)]
    given = [SftExample([SftMessage("user", f"i{i}")], "r", "open") for i in range(50)]
    options = SftExampleOptions(batch_size=8)
    outcome = mine_sft_examples(rollouts, instructions=given, prompts=[], options=options)
    mixed = [example for example in outcome.rows if example.task == "open"]
    assert len(mixed) == 10 == len(set(t.messages[0].content for t in mixed))
    assert (len(outcome.rows), outcome.report.written) == (100, 100)
    # They are spread over the file: 4 epochs of 100 SFT examples are 50 steps of 8.
    assert any(t.task == "open" for t in outcome.rows[:50])
    assert any(t.task == "open" for t in outcome.rows[50:])
    assert (outcome.report.figures["epochs"], outcome.report.figures["sft_steps"]) == (4, 50)
    with pytest.raises(InputError, match="need 10 lines of instruction data, and 3"):
        mine_sft_examples(rollouts, instructions=given[:3], prompts=[], options=options)


def test_thoughts_that_the_template_opened_are_opened_in_the_example() -> None:
    opened = record("q", text="a</think>\\boxed{7}", prompt_tail="assistant\n<think>\n")
    assert mine(opened).rows[0].response == "<think>a</think>\\boxed{7}"
    kept = mine(opened, template_opens_thoughts=True).rows[0]
    assert kept.response == "a</think>\\boxed{7}"
    other = record("q", text="a[/THINK]\\boxed{7}", prompt_tail="[/INST][THINK]")
    outcome = mine_sft_examples(
        [Mined(other, 0, "f")],
        instructions=[],
        prompts=[],
        options=SftExampleOptions(**NO_INSTRUCTIONS),
        tags=ThinkTags(open="[THINK]", close="[/THINK]"),
    )
    assert outcome.rows[0].response == "[THINK]a[/THINK]\\boxed{7}"


def test_all_messages_come_from_the_prompts_where_they_are_given() -> None:
    messages = [ChatMessage("system", "s"), ChatMessage("user", "q")]
    prompt = Prompt(id="q", task="math", messages=messages, answer="7")
    outcome = mine_sft_examples(
        [Mined(record("q"), 0, "f")],
        instructions=[],
        prompts=[prompt],
        options=SftExampleOptions(**NO_INSTRUCTIONS),
    )
    assert [message.plain for message in outcome.rows[0].messages] == messages


def test_a_reply_never_gets_the_messages_of_another_problem() -> None:
    """A run calls the second source's "q1" "1:q1"; a file of that source alone has "q1"."""
    prompts = [
        Prompt(f"q{n}", "math", [ChatMessage("system", f"s{n}"), ChatMessage("user", asked)], "7")
        for n, asked in enumerate(["b0", "b1", "go on", "Go  on"])
    ]
    records = [
        record("a1", prompt_id="q1", text="of a1"),
        record("B1", prompt_id="1:q1", text="of b1"),
        record("b0", prompt_id="q0", text="of b0"),
        record("go on", prompt_id="q3", text="of q3"),
        # Either of two prompts may have asked this.
        record("go on", prompt_id="1:q2", text="of 1:q2"),
    ]
    outcome = mine_sft_examples(
        [Mined(one, 0, "f") for one in records],
        instructions=[],
        prompts=prompts,
        options=SftExampleOptions(**NO_INSTRUCTIONS),
    )
    found = {one.response: [said.content for said in one.messages] for one in outcome.rows}
    assert found == {
        "of a1": ["a1"], "of b1": ["s1", "b1"], "of b0": ["s0", "b0"],
        "of q3": ["s3", "Go  on"], "of 1:q2": ["go on"],
    }  # fmt: skip


def test_the_command_reads_training_steps_alone_and_writes_what_sft_reads(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    folder.mkdir()
    for name, problem in (("step_000001", "a"), ("dropped_000001", "b"), ("eval_before", "c")):
        line = msgspec.json.encode(record(problem)).decode()
        (folder / f"{name}.jsonl").write_text(line + "\n")
    assert sorted(m.record.problem for m in read_training_rollouts(tmp_path)) == ["a", "b"]
    out = tmp_path / "sft.jsonl"
    command = ["data", "sft", str(tmp_path), "--out", str(out), "--instruction-share", "0"]
    assert main(command) == 0
    assert sorted(example.messages[0].content for example in read_sft_dataset(out)) == ["a", "b"]
    report = json.loads((tmp_path / "sft.jsonl.report.json").read_text())
    assert (report["read"], report["written"], report["tool"]) == (2, 2, "sft")
