"""Evaluations on several sets: how each is sampled, what is recorded, and what a restart makes."""

import json
from pathlib import Path

import pytest

from megatron_rl.config.files import ConfigError, load_config
from megatron_rl.config.tree import Config
from megatron_rl.evaluation.samples import of_records
from megatron_rl.launcher.phases import eval_limit_s
from megatron_rl.protocol.metrics import read_jsonl
from megatron_rl.protocol.queue_state import QueueState
from megatron_rl.protocol.rollout_files import read_records, read_rollouts
from megatron_rl.protocol.types import (
    NOT_GRADED,
    UNGRADABLE,
    ClassRequest,
    SaveState,
    Score,
    WeightsSynced,
)
from tests.rollout_queue.makers import mixed
from tests.rollout_queue.played_queue import PlayedQueue

AIME = {"name": "aime", "prompts": {"path": "a.jsonl"}, "samples": 4, "temperature": 0.7,
        "top_p": 0.95, "max_new_tokens": 500}  # fmt: skip
CODE = {"name": "code", "prompts": {"path": "b.jsonl"}}


def same(request: ClassRequest) -> list[int]:
    """The wrong ones agree, and the last has no answer."""
    return [-1 if text.endswith("/3") else 0 for text in request.texts]


def evaluate(folder: Path, seconds: int = 12, **more: object) -> PlayedQueue:
    options = {"eval": {"prompts": 0, "sets": [AIME]}, "eval_sets": {"aime": 3}} | more
    queue = PlayedQueue(folder, **({"judge": mixed, "classify": same} | options),
                        evaluate_only="model")  # fmt: skip
    queue.serve()
    queue.play(seconds)
    return queue


def evaluations(folder: Path) -> dict[str, dict]:
    rows = read_jsonl(folder / "metrics.jsonl")
    return {row["label"]: row for row in rows if "eval/n" in row}


def test_each_set_is_sampled_in_its_own_way_and_the_rest_is_as_in_eval(tmp_path: Path) -> None:
    queue = evaluate(
        tmp_path,
        eval={"prompts": 2, "temperature": 0.5, "sets": [AIME, CODE]},
        eval_sets={"aime": 3, "code": 1},
        held_out=2,
        sampling={"max_new_tokens": 100},
    )
    assert queue.coordinator.is_over
    ways = {}
    for lease in queue.leases:
        sampling = lease.sampling
        way = (sampling.max_new_tokens, sampling.temperature, sampling.top_p)
        ways.setdefault(lease.prompt.id.rstrip("0123456789"), set()).add(way)
    assert ways == {
        "h": {(100, 0.5, 1.0)}, "aime": {(500, 0.7, 0.95)}, "code": {(100, 0.5, 1.0)},
    }  # fmt: skip
    found = evaluations(tmp_path)
    assert list(found) == ["model", "model.aime", "model.code"]
    assert [row["eval/n"] for row in found.values()] == [2, 3, 1]
    aime = found["model.aime"]
    assert aime["eval/accuracy"] == 0.25 and aime["eval/pass_at_4"] == 1.0
    # Two wrong answers that agree outvote the right one; of two, see the pairs: R, W, W, silent.
    assert aime["eval/maj_at_4"] == 0.0
    # RW 1/2, RW 1/2, R- 1, WW 0, W- 0, W- 0 of 6 pairs.
    assert aime["eval/maj_at_2"] == pytest.approx(2 / 6)
    assert "eval/maj_at_2" not in found["model.code"]


def test_rows_say_how_many_completions_of_all_sets_are_scored(tmp_path: Path) -> None:
    queue = evaluate(
        tmp_path, 0, held_out=10, eval={"prompts": 10, "samples": 4, "sets": [AIME]},
        eval_sets={"aime": 20},
    )  # fmt: skip
    queue.play(200, is_slow=True)
    assert queue.coordinator.is_over
    rows = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if "eval/running" in row]
    # Ten prompts with 4 completions and 20 with 4, one a second, a row each 5 s.
    assert {row["eval/completions_wanted"] for row in rows} == {120}
    done = [row["eval/completions_done"] for row in rows]
    assert done == sorted(done) and done[0] < 10 and 100 < done[-1] <= 120
    for row in rows:
        limits = (0, 40) if row["eval/running"] == "model" else (40, 120)
        assert limits[0] <= row["eval/completions_done"] <= limits[1]
    scored, told = 0, {}
    for row in read_jsonl(tmp_path / "metrics.jsonl"):
        scored += row.get("activity/rollouts_for_evaluation", 0)
        if "eval/running" in row:
            told[scored] = row["eval/completions_done"]
    assert told == {count: count for count in told}


def test_classes_are_recorded_and_votes_follow_from_the_records_alone(tmp_path: Path) -> None:
    queue = evaluate(tmp_path)
    assert len(queue.class_requests) == 3
    records = list(read_records(tmp_path / "rollouts" / "eval_model.aime.jsonl"))
    by_index = {(r.prompt_id, r.index): r.answer_class for r in records}
    assert len(by_index) == 12
    assert [by_index["aime1", index] for index in range(4)] == [0, 1, 1, -1]
    [first, *_] = of_records(records)
    assert sorted(first.classes.tolist()) == [-1, 0, 1, 1]


@pytest.mark.parametrize("kind", [UNGRADABLE, NOT_GRADED])
def test_an_evaluation_without_classes_keeps_its_problems(tmp_path: Path, kind: str) -> None:
    queue = evaluate(tmp_path, 20, classify=lambda request: kind, queue={"max_failed_groups": 2})
    assert queue.coordinator.is_over
    row = evaluations(tmp_path)["model.aime"]
    assert (row["eval/n"], row["eval/lost"], row["eval/without_classes"]) == (3, 0, 3)
    assert row["eval/pass_at_2"] == 0.5 and "eval/maj_at_2" not in row
    records = list(read_records(tmp_path / "rollouts" / "eval_model.aime.jsonl"))
    assert {record.answer_class for record in records} == {None}


def test_classes_that_come_too_late_are_done_without(tmp_path: Path) -> None:
    eval_ = {"prompts": 0, "sets": [AIME], "timeout_s": 20}
    queue = evaluate(tmp_path, 30, classify=lambda request: None, eval=eval_)
    assert queue.coordinator.is_over
    assert evaluations(tmp_path)["model.aime"]["eval/without_classes"] == 3


def test_single_completions_need_no_classes(tmp_path: Path) -> None:
    queue = evaluate(tmp_path, eval={"prompts": 0, "sets": [AIME | {"samples": 1}]})
    assert queue.coordinator.is_over and queue.class_requests == []


def test_a_second_start_generates_what_is_missing(tmp_path: Path) -> None:
    first = evaluate(tmp_path, 2, eval_sets={"aime": 40})
    assert not first.coordinator.is_over
    path = tmp_path / "rollouts" / "eval_model.aime.jsonl"
    written = list(read_records(path))
    done = {record.prompt_id for record in written}
    assert 0 < len(done) < 40
    # A crash cuts a line and a word.
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join(lines[:-2]) + b"\n" + lines[-2][:30])
    with path.with_suffix(".int32").open("ab") as words:
        words.write(b"\x01\x02\x03")
    cut = json.loads(lines[-2])["prompt_id"]
    second = evaluate(tmp_path, 40, eval_sets={"aime": 40}, keeps_evaluated=True)
    assert second.coordinator.is_over
    again = {prompt for prompt, _ in second.leased}
    assert again == {f"aime{n}" for n in range(40)} - done | {cut}
    records = list(read_records(path))
    assert len({(record.prompt_id, record.index) for record in records}) == len(records) == 160
    # Groups of both parts have numbers of their own, and all arrays can be read back.
    assert len({record.group for record in records}) == 40
    assert sum(1 for _ in read_rollouts(tmp_path)) == 160
    assert evaluations(tmp_path)["model.aime"]["eval/n"] == 40


def test_a_finished_evaluation_is_not_made_again(tmp_path: Path) -> None:
    evaluate(tmp_path)
    before = (tmp_path / "rollouts" / "eval_model.aime.jsonl").read_bytes()
    second = evaluate(tmp_path, keeps_evaluated=True)
    assert second.coordinator.is_over and second.leased == []
    assert (tmp_path / "rollouts" / "eval_model.aime.jsonl").read_bytes() == before


def test_a_problem_that_lost_a_completion_is_made_again(tmp_path: Path) -> None:
    def fails_once(prompt: str, index: int) -> Score | str:
        return UNGRADABLE if (prompt, index) == ("aime1", 2) else mixed(prompt, index)

    evaluate(tmp_path, judge=fails_once, queue={"max_attempts": 1})
    assert evaluations(tmp_path)["model.aime"]["eval/not_graded"] == 1
    dropped = tmp_path / "rollouts" / "dropped_eval_model.aime.jsonl"
    assert len(list(read_records(dropped))) == 1
    second = evaluate(tmp_path, keeps_evaluated=True)
    assert {prompt for prompt, _ in second.leased} == {"aime1"}
    assert len(list(read_records(tmp_path / "rollouts" / "eval_model.aime.jsonl"))) == 12
    assert not dropped.exists()


def train_to_the_end(folder: Path, steps: int, *, state: QueueState | None = None) -> QueueState:
    """The trainer asks for the state of the last step when the evaluations there are over."""
    queue = PlayedQueue(folder, mixed, train={"steps": steps}, held_out=2, eval_sets={"code": 1},
                        eval={"prompts": 2, "sets": [CODE]})  # fmt: skip
    first = 0
    if state is not None:
        queue.coordinator.resume(state)
        first = state.step
    queue.serve()
    for version in range(first, steps):
        queue.sync(version)
        queue.reach(version - first + 1)
    queue.version = steps
    queue.coordinator.handle("batches", "t", WeightsSynced(steps, is_final=True), queue.now)
    queue.play(10)
    queue.coordinator.handle("batches", "t", SaveState(steps), queue.now)
    [saved] = [one.message for one in queue.coordinator.outgoing(queue.now)]
    return saved


def test_a_run_resumed_for_more_steps_is_evaluated_at_its_new_end(tmp_path: Path) -> None:
    """And the old end, resumed without further steps, is not evaluated twice."""
    state = train_to_the_end(tmp_path, 2)
    assert state.evaluated == ["before", "before.code", "after", "after.code"]
    train_to_the_end(tmp_path, 2, state=state)
    train_to_the_end(tmp_path, 4, state=state)
    rows = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if "eval/n" in row]
    assert [(row["label"], row["step"]) for row in rows] == [
        ("before", 0), ("before.code", 0), ("after", 2), ("after.code", 2),
        ("after", 4), ("after.code", 4),
    ]  # fmt: skip


def test_training_evaluates_each_set_too(tmp_path: Path) -> None:
    queue = PlayedQueue(
        tmp_path, mixed, classify=same, held_out=2,
        eval={"prompts": 2, "sets": [AIME]}, eval_sets={"aime": 3},
    )  # fmt: skip
    queue.start()
    queue.play(10)
    assert list(evaluations(tmp_path)) == ["before", "before.aime"]
    assert len(queue.batches) == 1
    queue.version = 1
    queue.coordinator.handle("batches", "t", WeightsSynced(1, is_final=True), queue.now)
    queue.play(10)
    assert list(evaluations(tmp_path))[2:] == ["after", "after.aime"]
    rows = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if "eval/accuracy" in row]
    assert [(row["eval/oldest_version"], row["eval/newest_version"]) for row in rows] == [
        (0, 0), (0, 0), (1, 1), (1, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[[eval.sets]]\nname = "a b"\nprompts = {path = "x"}', "eval.sets.0.name"),
        (
            '[[eval.sets]]\nname = "a"\nprompts = {path = "x"}\n'
            '[[eval.sets]]\nname = "a"\nprompts = {path = "y"}',
            "the name 'a' is given twice",
        ),
        (
            '[[eval.sets]]\nname = "a"\nprompts = {path = "x"}\nmax_new_tokens = 4096',
            "generator.context_tokens=2048 leaves no room .* max_new_tokens=4096",
        ),
    ],
)
def test_a_wrong_set_is_a_clear_error(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        load_config(path)


@pytest.mark.parametrize(("replicas", "versions"), [(1, 1), (2, 2)])
def test_trainer_and_launcher_wait_for_all_sets_of_the_versions_that_follow_each_other(
    replicas: int, versions: int
) -> None:
    """Without evaluators training waits for the evaluations of each version."""
    sets = [{"name": name, "prompts": {"path": f"{name}.jsonl"}} for name in "abc"]
    eval_ = {"prompts": 8, "sets": sets, "timeout_s": 550.0}
    config = Config.model_validate({"eval": eval_, "generator": {"replicas": replicas}})
    assert config.eval_delay_s == versions * 4 * 550.0
    margin_s = eval_limit_s(config) - config.generator.start_timeout_s - versions * 4 * 550.0
    assert 0 < margin_s < 550.0
    assert Config.model_validate({"eval": {"prompts": 0}}).eval_delay_s == 0.0
