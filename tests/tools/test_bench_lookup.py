"""The workload `lookup` of the end-to-end benchmark: both sides hold the same conversations."""

import json
import pkgutil
import random
from pathlib import Path

import pytest
from jinja2 import Environment

from examples.agents.lookup import REPLY_TOKENS, find, prompts
from megatron_rl.config.files import load_config
from megatron_rl.data.tiny_model import make_folder
from tools.bench.children import CACHE, TRL_PINS, ChildFailed, fingerprint
from tools.bench.end_to_end import LOOKUP, checked_turns, make_lookup
from tools.bench.end_to_end_peer import LOOKUP_CHAT, LOOKUP_TOOL, Table, check_turns
from tools.bench.loops import StepMark, marks_from_metrics, marks_from_peer, turns_per_rollout
from tools.bench.variants import peer_job, run_peer, write_peer_prompts

VENV = CACHE / "bench-trl-venv"
STAMP = VENV / ".installed"
NEEDS_TRL = pytest.mark.skipif(
    not STAMP.exists() or STAMP.read_text() != fingerprint(VENV, TRL_PINS),
    reason="TRL's environment is made by python -m tools.bench.end_to_end",
)
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function"}]}
TOLD = {"role": "tool", "name": "find", "content": "3"}
ANSWER = {"role": "assistant", "content": "3"}


def mark(turns: float, generated: int = 64) -> StepMark:
    return StepMark(1.0, generated, generated, 0.5, turns=turns)


def test_trls_job_has_the_sizes_of_the_example(tmp_path: Path) -> None:
    config = load_config(LOOKUP, [f"model.path={tmp_path}", f"run.dir={tmp_path}"])
    assert (config.train.prompts_per_batch, config.train.group_size) == (8, 8)
    assert (config.train.minibatches, config.queue.max_staleness) == (1, 1)
    job = peer_job(config, Path("p"), threads=1, run_dir=tmp_path)
    grpo = job["grpo"]
    assert (job["task"], job["rollouts"], grpo["learning_rate"]) == ("lookup", 64, 4e-4)
    assert grpo["generation_kwargs"] == {"max_new_tokens": REPLY_TOKENS}
    assert (grpo["max_completion_length"], grpo["max_tool_calling_iterations"]) == (24, 1)


def test_trl_gets_the_questions_and_tables_of_our_train_prompts(tmp_path: Path) -> None:
    make_folder(tmp_path / "model", seed=0)
    source = tmp_path / "prompts.jsonl"
    lines = prompts(random.Random(0))
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    paths = [f"model.path={tmp_path / 'model'}", f"prompts.0.path={source}"]
    config = load_config(LOOKUP, [*paths, "reward.tasks.lookup.environment=a:b"])
    assert write_peer_prompts(config, tmp_path / "peer.jsonl", task="lookup") == 1800
    rows = [json.loads(line) for line in (tmp_path / "peer.jsonl").read_text().splitlines()]
    for row in rows[:50]:
        key = row["messages"][0]["content"]
        assert row["text"] == f"<bos>{key}:" and len(row["token_ids"]) == 3
        assert json.loads(row["entry"])[key] == row["answer"]
    expected = sorted(line["entry"] for line in lines if line["split"] == "train")
    assert sorted(row["entry"] for row in rows) == expected


def test_trls_template_adds_to_a_conversation_what_ours_adds() -> None:
    ours = load_config(LOOKUP, ["model.path=m", "run.dir=r"]).render.chat_template
    told = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "=a"}, TOLD]
    rendered = [
        Environment().from_string(text).render(messages=told) for text in (ours, LOOKUP_CHAT)
    ]
    assert rendered == ["<bos>a:=a<eos>3:"] * 2


def test_trls_environment_is_the_examples_tool_and_starts_anew() -> None:
    assert pkgutil.resolve_name(LOOKUP_TOOL) is find
    table = Table(find)
    table.reset(entry='{"a": "3", "b": "5"}', answer="3", prompt=[])
    assert (table.find("a"), table.find("x")) == ("3", "none")
    assert table.calls == [("a", "3"), ("x", "none")]
    table.reset(entry='{"a": "1"}', answer="1")
    assert (table.find("a"), table.calls, table.answer) == ("1", [("a", "1")], "1")


def test_conversations_with_and_without_a_call_are_accepted() -> None:
    check_turns([("a", "3")], [CALL, TOLD, ANSWER], "=a<eos>3:3")
    check_turns([("ab", "3")], [CALL, TOLD, ANSWER], "=ab3:3")  # The reply was cut.
    check_turns([], [ANSWER], "3")


@pytest.mark.parametrize(
    ("calls", "messages", "text"),
    [
        ([("a", "3")], [CALL, TOLD, ANSWER], "=a<eos>3"),
        ([("a", "3")], [CALL, TOLD, ANSWER], "=a<eos>4:3"),
        ([("a", "3")], [CALL, TOLD], "=a<eos>3:"),
        ([("a", "4")], [CALL, TOLD, ANSWER], "=a<eos>4:3"),
        ([], [CALL], "=a"),
        ([], [ANSWER, TOLD, ANSWER], "33:3"),
    ],
    ids=["no result", "another result", "no second turn", "told otherwise", "not run", "not asked"],
)
def test_a_conversation_that_its_environment_did_not_see_is_refused(
    calls: list[tuple[str, str]], messages: list[dict], text: str
) -> None:
    with pytest.raises(AssertionError):
        check_turns(calls, messages, text)


def test_turns_are_of_both_sides_rows_and_weighed_by_rollouts() -> None:
    sync = {"time": 1.0, "source": "trainer", "step": 0, "weight_sync/s": 0.5}
    row = {
        "time": 3.0, "source": "trainer", "step": 1, "train/loss": 0.1, "rollout/correct": 0.25,
        "queue/rollouts_trained": 64, "queue/groups_dropped_zero_variance": 1,
        "environment/turns": 1.75,
    }  # fmt: skip
    (ours,) = marks_from_metrics([sync, row], group_size=8)
    peer = {"step": 1, "seconds": 3.0, "rollouts": 64, "accuracy": 0.5, "turns": 1.5}
    assert (ours.turns, ours.generated) == (1.75, 72)
    assert marks_from_peer([peer])[0].turns == 1.5
    # (64 * 2 + 192 * 1) / 256
    assert turns_per_rollout({"ours": [[mark(2.0)], [mark(1.0, 192)]]}) == {"ours": 1.25}


def test_a_side_without_second_turns_gives_no_figure() -> None:
    assert checked_turns({"ours": [[mark(2.0)]], "trl": [[mark(1.9)]]}) == {"ours": 2, "trl": 1.9}
    with pytest.raises(ChildFailed, match="fewer than 1.8 turns"):
        checked_turns({"ours": [[mark(2.0)]], "trl": [[mark(1.0)]]})


@NEEDS_TRL
@pytest.mark.exhaustive
def test_trl_trains_on_conversations_with_the_tool(tmp_path: Path) -> None:
    workload = make_lookup(tmp_path, steps=6)
    python = VENV / "bin" / "python"
    marks = run_peer(workload, python, threads=1, run_dir=tmp_path / "trl")
    assert [one.generated for one in marks] == [64] * 6
    assert turns_per_rollout({"trl": [marks]})["trl"] > 1.8
    # The teacher calls the right key 2 of 3 times and then answers rightly 3 of 5 times.
    assert all(0.15 < one.accuracy < 0.85 for one in marks)
