"""A completion that cannot be graded is dropped alone: its group goes on without it."""

import collections
import json
from pathlib import Path

import pytest

from megatron_rl.config.tree import QueueConfig
from megatron_rl.observe.activity_text import ActivityTotals
from megatron_rl.protocol.generator_messages import PROMPT_UNRENDERABLE, RolloutFailed
from megatron_rl.protocol.metrics import read_jsonl
from megatron_rl.protocol.types import (
    NOT_GRADED,
    UNGRADABLE,
    SaveState,
    Score,
    ScoreDone,
    ScoreFailed,
    WeightsSynced,
)
from megatron_rl.protocol.wire import DeadlineExceeded
from megatron_rl.rollout_queue.group_end import least_members
from tests.rollout_queue.makers import RIGHT, make_group
from tests.rollout_queue.played_queue import FAILURE, PlayedQueue

WRONG = Score(0.0, {"format": 0.0, "correct": 0.0}, "wrong_answer")


def differing(index: int) -> Score:
    """Rewards that are not equal inside a group, whichever one of it is missing."""
    return RIGHT if index % 2 else WRONG


def trained(folder: Path, step: int = 0) -> dict[int, list[int]]:
    """Group -> indices of the completions that the batch of a step holds."""
    found = collections.defaultdict(list)
    for record in read_jsonl(folder / "rollouts" / f"step_{step:06d}.jsonl"):
        found[record["group"]].append(record["index"])
    return dict(found)


@pytest.mark.parametrize("kind", [UNGRADABLE, NOT_GRADED])
def test_lost_completion_is_generated_once_more_and_its_group_stays_whole(
    tmp_path: Path, kind: str
) -> None:
    tries: collections.Counter[tuple[str, int]] = collections.Counter()

    def judge(prompt: str, index: int) -> Score | str:
        tries[prompt, index] += 1
        return kind if index == 2 and tries[prompt, index] <= 3 else differing(index)

    queue = PlayedQueue(tmp_path, judge, queue={"max_attempts": 3})
    queue.start()
    queue.play(12)
    [batch] = queue.batches
    groups = trained(tmp_path)
    assert len(groups) == 2 and all(indices == [0, 1, 2, 3] for indices in groups.values())
    leased = collections.Counter(queue.leased)
    prompt = queue.leased[0][0]
    assert [leased[prompt, index] for index in range(4)] == [1, 1, 2, 1]
    dropped = [
        line for line in read_jsonl(tmp_path / "rollouts" / "dropped_000000.jsonl")
        if line["dropped"] == kind
    ]  # fmt: skip
    assert len(dropped) >= 2 and {line["index"] for line in dropped} == {2}
    assert batch.metrics[f"queue/completions_dropped_{kind}"][0] == len(dropped)
    assert f"queue/groups_dropped_{kind}" not in batch.metrics
    # Each rollout of the batch has a score; those without one are in no mean.
    assert batch.metrics["rollout/reward"][:2] == (4.0, 8)
    assert batch.metrics["queue/rollouts_trained"][0] == 8


def test_dropped_completion_is_recorded_with_all_that_a_person_needs(tmp_path: Path) -> None:
    queue = PlayedQueue(
        tmp_path,
        lambda prompt, index: UNGRADABLE if index == 2 else differing(index),
        queue={"max_attempts": 2},
    )
    queue.start()
    queue.play(4)
    path = tmp_path / "rollouts" / "dropped_000000.jsonl"
    first = read_jsonl(path)[0]
    prompt = first["prompt_id"]
    assert first["text"] == f"{prompt}/2" and first["problem"] == f"question {prompt}"
    assert (first["answer"], first["task"], first["index"]) == ("1", "math", 2)
    assert (first["reason"], first["dropped"], first["parts"]) == (UNGRADABLE, UNGRADABLE, {})
    # Never a reward of 0 that somebody might average.
    assert first["reward"] is None
    assert (
        "tried 2 times (expert.queue.max_attempts)" in first["detail"]
        and FAILURE in first["detail"]
    )
    # What the completion made the verifier say stays inside its JSON line.
    lines = path.read_bytes().split(b"\n")
    assert b"\x1b" not in path.read_bytes() and all(json.loads(line) for line in lines[:-1])


def test_group_goes_on_smaller_when_the_replacement_is_lost_too(tmp_path: Path) -> None:
    queue = PlayedQueue(
        tmp_path,
        lambda prompt, index: UNGRADABLE if index == 3 else differing(index),
        queue={"max_attempts": 2, "max_replacements": 2},
    )
    queue.start()
    queue.play(6)
    groups = trained(tmp_path)
    assert len(groups) == 2 and all(indices == [0, 1, 2] for indices in groups.values())
    prompt = queue.leased[0][0]
    # Once and two replacements, each graded twice.
    assert queue.leased.count((prompt, 3)) == 3 and queue.graded.count(f"{prompt}/3") == 6
    [batch] = queue.batches
    [minibatch] = batch.minibatches
    sequences = [s for microbatch in minibatch.microbatches for s in microbatch]
    # Rewards 0, 1, 0: less their mean 1/3, over the standard deviation sqrt(2)/3.
    advantages = sorted(sequence.advantage for sequence in sequences)
    assert advantages == pytest.approx([-(0.5**0.5)] * 4 + [2**0.5] * 2)
    # Two groups of three completions of three tokens each.
    assert [sequence.weight for sequence in sequences] == pytest.approx([1 / 18] * 6)


def test_group_of_which_too_few_remain_is_dropped_under_the_reason_and_others_are_trained_on(
    tmp_path: Path,
) -> None:
    def judge(prompt: str, index: int) -> Score | str:
        if int(prompt[1:]) % 2:
            return NOT_GRADED if index else RIGHT
        return differing(index)

    queue = PlayedQueue(
        tmp_path, judge, queue={"max_attempts": 1, "max_replacements": 0, "min_group_share": 0.5}
    )
    queue.start()
    queue.play(20)
    [batch] = queue.batches
    lost = batch.metrics.get("queue/groups_dropped_not_graded", (0,))[0]
    lines = read_jsonl(tmp_path / "rollouts" / "dropped_000000.jsonl")
    given_up = {line["group"] for line in lines if line["dropped"] == NOT_GRADED}
    assert lost == len(given_up) > 0
    assert all(len(indices) == 4 for indices in trained(tmp_path).values())
    # Three of four cannot be graded, and two are needed: the third is not waited for.
    per_group = collections.Counter(line["group"] for line in lines if line["reward"] is None)
    assert set(per_group.values()) == {3}
    assert batch.metrics["queue/completions_dropped_not_graded"][0] == sum(per_group.values())


def test_the_least_members_of_a_group_are_its_share_rounded_up_and_two() -> None:
    group = make_group(0, [0.0] * 4)
    shares = (0.1, 0.5, 0.6, 1.0)
    found = [least_members(group, QueueConfig(min_group_share=share)) for share in shares]
    assert found == [2, 2, 3, 4]


def test_no_completion_of_a_group_that_fails_in_the_same_pass_is_replaced(tmp_path: Path) -> None:
    queue = PlayedQueue(tmp_path, lambda prompt, index: None, queue={"max_attempts": 1})
    queue.start()
    queue.play(1, is_slow=True)
    [request], (lease, index) = queue.requests, queue.open[0]
    assert request.text == f"{lease.prompt.id}/0" and index == 1
    failed = RolloutFailed(lease.lease_id, index, "too long", drop_as=PROMPT_UNRENDERABLE)
    ungraded = ScoreFailed(request.request_id, FAILURE, UNGRADABLE)
    queue.coordinator.handle("prompts", "g", failed, queue.now)
    queue.coordinator.handle("verify", "v", ungraded, queue.now)
    queue.play(2)
    assert max(collections.Counter(queue.leased).values()) == 1
    list(queue.coordinator.farewell(queue.now))
    totals = ActivityTotals(read_jsonl(tmp_path / "metrics.jsonl"))
    assert totals.by_reason("groups_dropped") == {PROMPT_UNRENDERABLE: 1}
    assert totals.by_reason("completions_dropped") == {}


def test_loss_of_the_last_open_completion_completes_its_group(tmp_path: Path) -> None:
    # All others are scored, and equal, when the last try of this one fails.
    queue = PlayedQueue(
        tmp_path,
        lambda prompt, index: UNGRADABLE if index == 0 else WRONG,
        queue={"max_attempts": 5},
    )
    queue.start()
    queue.play(30)
    assert queue.batches == []
    lines = read_jsonl(tmp_path / "rollouts" / "dropped_000000.jsonl")
    flat = collections.Counter(
        line["group"] for line in lines if line["dropped"] == "zero_variance"
    )
    assert flat and set(flat.values()) == {3}
    list(queue.coordinator.farewell(queue.now))
    totals = ActivityTotals(read_jsonl(tmp_path / "metrics.jsonl"))
    assert totals.count("groups_complete") == len(flat)
    assert totals.by_reason("groups_dropped") == {"zero_variance": len(flat)}
    lost = sum(line["reward"] is None for line in lines)
    assert totals.by_reason("completions_dropped") == {UNGRADABLE: lost} and lost >= 2 * len(flat)


def evaluation_rows(folder: Path) -> list[dict]:
    return [row for row in read_jsonl(folder / "metrics.jsonl") if "label" in row]


def test_evaluation_counts_what_was_graded_and_says_how_much_was_not(tmp_path: Path) -> None:
    def judge(prompt: str, index: int) -> Score | str:
        # Of eight prompts with two completions: one without either, two with one, right else.
        if prompt in ("h0", "h1", "h2") and index == 0:
            return UNGRADABLE
        return NOT_GRADED if (prompt, index) == ("h0", 1) else RIGHT

    queue = PlayedQueue(
        tmp_path,
        judge,
        held_out=8,
        eval={"prompts": 8, "samples": 2, "temperature": 1.0},
        queue={"max_attempts": 2},
    )
    queue.start()
    queue.play(6)
    [row] = evaluation_rows(tmp_path)
    assert (row["eval/accuracy"], row["eval/n"], row["eval/lost"]) == (1.0, 7, 1)
    assert row["eval/not_graded"] == 4
    records = read_jsonl(tmp_path / "rollouts" / "eval_before.jsonl")
    assert len(records) == 12
    # Not generated again: an evaluation that draws until it likes the draw measures another thing.
    assert max(collections.Counter(queue.leased).values()) == 1
    lost = read_jsonl(tmp_path / "rollouts" / "dropped_eval_before.jsonl")
    assert sorted((line["prompt_id"], line["index"], line["reason"]) for line in lost) == [
        ("h0", 0, UNGRADABLE), ("h0", 1, NOT_GRADED), ("h1", 0, UNGRADABLE), ("h2", 0, UNGRADABLE),
    ]  # fmt: skip


def test_evaluation_of_which_nothing_was_graded_neither_hangs_nor_ends_the_run(
    tmp_path: Path,
) -> None:
    queue = PlayedQueue(
        tmp_path,
        lambda prompt, index: UNGRADABLE if prompt[0] == "h" else differing(index),
        held_out=2,
        queue={"max_attempts": 1},
    )
    queue.start()
    queue.play(6)
    [row] = evaluation_rows(tmp_path)
    assert (row["eval/n"], row["eval/lost"], row["eval/not_graded"]) == (0, 2, 2)
    assert "eval/accuracy" not in row
    assert [batch.step for batch in queue.batches] == [0]


def test_evaluation_ends_in_time_without_the_grades_that_do_not_come(tmp_path: Path) -> None:
    queue = PlayedQueue(
        tmp_path,
        lambda prompt, index: None if prompt == "h1" else differing(index),
        held_out=3,
        eval={"prompts": 3, "timeout_s": 50.0},
    )
    queue.start()
    queue.play(45)
    assert evaluation_rows(tmp_path) == [] and queue.batches == []
    queue.play(10)
    [row] = evaluation_rows(tmp_path)
    assert (row["eval/n"], row["eval/lost"], row["eval/not_graded"]) == (2, 1, 1)
    [lost] = read_jsonl(tmp_path / "rollouts" / "dropped_eval_before.jsonl")
    assert lost["reason"] == NOT_GRADED and "expert.eval.timeout_s = 50 is over" in lost["detail"]
    assert [batch.step for batch in queue.batches] == [0]
    # It takes up no room with the verifier. An answer that comes all the same has no place.
    assert "answers: v" not in queue.coordinator.describe(queue.now)
    [late] = [request for request in queue.requests if request.text == "h1/0"]
    queue.coordinator.handle("verify", "v", ScoreDone(late.request_id, RIGHT), queue.now)
    queue.play(2)
    assert len(evaluation_rows(tmp_path)) == 1


@pytest.mark.parametrize("in_time", [1, 4])
def test_evaluation_whose_completions_come_too_late_ends_itself_and_not_training(
    tmp_path: Path, in_time: int
) -> None:
    queue = PlayedQueue(
        tmp_path,
        lambda prompt, index: differing(index) if prompt.startswith("p") else RIGHT,
        held_out=9,
        eval={"prompts": 9, "timeout_s": 5.0},
    )
    queue.start()
    queue.play(in_time, is_slow=True)
    assert evaluation_rows(tmp_path) == []
    # Nothing comes for longer than it may take.
    queue.now += 6.0
    queue.coordinator.tick(queue.now)
    queue.play(10)
    [row] = evaluation_rows(tmp_path)
    assert (row["eval/n"], row["eval/lost"]) == (in_time, 9 - in_time)
    assert [batch.step for batch in queue.batches] == [0]


def test_evaluation_that_is_all_there_is_to_do_ends_the_run_when_it_is_late(
    tmp_path: Path,
) -> None:
    queue = PlayedQueue(
        tmp_path,
        lambda prompt, index: RIGHT,
        held_out=9,
        eval={"prompts": 9, "timeout_s": 5.0},
        evaluate_only="sft_baseline",
    )
    queue.serve()
    with pytest.raises(DeadlineExceeded, match="expert.eval.timeout_s = 5 is over"):
        queue.play(20, is_slow=True)


def test_group_with_lost_completions_is_generated_again_whole_after_a_restart(
    tmp_path: Path,
) -> None:
    def judge(prompt: str, index: int) -> Score | str:
        return UNGRADABLE if index == 0 else differing(index)

    settings = {"queue": {"max_attempts": 1}, "train": {"steps": 4, "prompts_per_batch": 2}}
    queue = PlayedQueue(tmp_path, judge, **settings)
    queue.start()
    queue.play(20)
    assert [batch.step for batch in queue.batches] == [0]
    done = trained(tmp_path)
    assert all(indices == [1, 2, 3] for indices in done.values())
    queue.coordinator.handle("batches", "t", WeightsSynced(1), queue.now)
    queue.coordinator.handle("batches", "t", SaveState(1), queue.now)
    [state] = [
        outgoing.message for outgoing in queue.coordinator.outgoing(queue.now)
        if outgoing.endpoint == "batches"
    ]  # fmt: skip
    unfinished = {(group.number, group.prompt_id) for group in state.unfinished}
    assert unfinished and not {number for number, _ in unfinished} & set(done)
    again = PlayedQueue(tmp_path, lambda prompt, index: differing(index), **settings)
    again.coordinator.resume(state)
    again.start(version=1)
    again.play(20)
    taken = trained(tmp_path, 1)
    assert set(taken) <= {number for number, _ in unfinished}
    assert all(indices == [0, 1, 2, 3] for indices in taken.values())


def test_completion_whose_grading_takes_long_holds_up_no_batch_for_long(tmp_path: Path) -> None:
    def judge(prompt: str, index: int) -> Score | str:
        if prompt != queue.leased[0][0] or index != 2:
            return differing(index)
        queue.now += 400
        return UNGRADABLE

    queue = PlayedQueue(tmp_path, judge, queue={"max_attempts": 9, "max_staleness": 0})
    queue.start()
    queue.play(4)
    # Asked for once, and not generated again: with nine tries of 400 s the trainer had given up.
    assert [batch.step for batch in queue.batches] == [0]
    prompt = queue.leased[0][0]
    assert queue.leased.count((prompt, 2)) == queue.graded.count(f"{prompt}/2") == 1
    assert sorted(map(len, trained(tmp_path).values())) == [3, 4]


def test_verifiers_that_answer_without_a_grade_are_alive(tmp_path: Path) -> None:
    def judge(prompt: str, index: int) -> Score | str:
        queue.now += 10
        return NOT_GRADED

    # Eight completions are asked for at once, and answered within 80 s, three times over.
    queue = PlayedQueue(
        tmp_path, judge, train={"batch_timeout_s": 100.0}, queue={"max_attempts": 3}
    )
    queue.start()
    queue.play(8)
    assert max(collections.Counter(queue.graded).values()) >= 3
