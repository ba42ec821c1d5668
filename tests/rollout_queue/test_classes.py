"""A group that needs answer classes is trained on once the verifier has found them."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from megatron_rl.algorithms.advantage_estimators import GroupView
from megatron_rl.config.algorithm import AdvantageEstimatorConfig
from megatron_rl.config.reward import RewardConfig, TaskConfig
from megatron_rl.config.tree import QueueConfig
from megatron_rl.protocol.metrics import read_jsonl
from megatron_rl.protocol.types import (
    NOT_GRADED,
    UNGRADABLE,
    ClassDone,
    ClassRequest,
    Lease,
    RankBatch,
    Rollout,
    Sampling,
    Score,
    ScoreDone,
    ScoredRollout,
    ScoreFailed,
    VerifierReady,
    WeightsSynced,
)
from megatron_rl.protocol.wire import DeadlineExceeded, WireError
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.rollout_queue.scoring import Scoring, find_without_asking
from tests.rollout_queue.makers import (
    FORMAT_FAILURE,
    RIGHT,
    WRONG,
    lose_request,
    make_prompt,
    make_rollout,
    make_score,
    mixed,
)
from tests.rollout_queue.played_queue import Classify, PlayedQueue, TokenScore

MAJORITY = {"preset": "majority", "advantage_estimator": {"k": 3}}


def advantages(batch: RankBatch) -> list[list[float]]:
    """Of each group, by member."""
    sequences = [s for share in batch.minibatches for micro in share.microbatches for s in micro]
    found: dict[int, dict[int, float]] = {}
    for sequence in sequences:
        found.setdefault(sequence.group, {})[sequence.member] = sequence.advantage
    return [[group[member] for member in sorted(group)] for _, group in sorted(found.items())]


def play(
    folder: Path,
    judge: TokenScore = mixed,
    classify: Classify = lambda request: [0, 0, -1],
    **more: dict,
) -> PlayedQueue:
    queue = PlayedQueue(folder, judge, classify=classify, **{"algorithm": MAJORITY, **more})
    queue.start()
    return queue


# --- the way of a group -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        # Of the 4 subsets of 3: with both wrong ones the vote is lost, without one of them it is a
        # tie; with one of them it is a tie, won without it, lost without the right one.
        ([0, 0, -1], [1 / 4, -1 / 4, -1 / 4, 0.0]),
        # Apart, both wrong ones and the right one tie: 1/3, and 1/2 without one of the wrong.
        ([0, 1, -1], [1 / 3, -1 / 6, -1 / 6, 0.0]),
    ],
)
def test_advantages_are_of_the_classes_that_the_verifier_found(
    tmp_path: Path, classes: list[int], expected: list[float]
) -> None:
    queue = play(tmp_path, classify=lambda request: classes)
    queue.play(8)
    found = advantages(queue.batches[0])
    np.testing.assert_allclose(found, [expected] * 2, atol=1e-12)
    asked = queue.class_requests[0]
    prompt = asked.texts[0].split("/")[0]
    # The right one is not compared with the others.
    assert asked.texts == [f"{prompt}/{index}" for index in (1, 2, 3)]
    assert (asked.task, asked.problem, asked.entry) == ("math", f"question {prompt}", "")


OUT_OF_TOKENS = Score(0.0, {"environment": 0.0}, "out_of_tokens", is_outcome=True)


class Conversations(PlayedQueue):
    """The verifier grades conversations, but not the last of each group, which ran out of room."""

    def _rollout(self, lease: Lease, index: int) -> Rollout:
        rollout = super()._rollout(lease, index)
        score = OUT_OF_TOKENS if index == 3 else None
        return msgspec.structs.replace(rollout, score=score, to_grade=rollout.text)


def test_conversation_that_ran_out_of_room_has_no_vote(tmp_path: Path) -> None:
    queue = Conversations(
        tmp_path,
        mixed,
        classify=lambda request: [0] * len(request.texts),
        algorithm=MAJORITY,
        reward={"tasks": {"math": {"compare": "math", "environment": "games:solve"}}},
    )
    queue.start()
    queue.play(8)
    # As with a completion without an answer.
    expected = [[1 / 4, -1 / 4, -1 / 4, 0.0]] * 2
    np.testing.assert_allclose(advantages(queue.batches[0]), expected, atol=1e-12)
    asked = queue.class_requests[0]
    assert [text.split("/")[1] for text in asked.texts] == ["1", "2"]


@pytest.mark.parametrize("evaluation", ["", "aime"])
def test_nobody_is_asked_where_no_conversation_has_an_answer(evaluation: str) -> None:
    group = Group(0, make_prompt(), Sampling(8, 1.0), 2, 0, needs_classes=True)
    group.evaluation = evaluation
    for index in range(2):
        rollout = msgspec.structs.replace(make_rollout(index), score=OUT_OF_TOKENS)
        group.add(ScoredRollout(rollout, OUT_OF_TOKENS), 0.0)
    assert find_without_asking(group)
    # An evaluation has no vote then; training has votes without answers.
    assert group.classes == ({} if evaluation else {0: -1, 1: -1})


def test_a_group_waits_for_its_classes(tmp_path: Path) -> None:
    queue = play(tmp_path, classify=lambda request: None)
    queue.play(20)
    assert queue.batches == [] and len(queue.class_requests) >= 2
    assert "0 complete of 2 for a batch" in queue.coordinator.describe(queue.now)
    queue.classify = lambda request: [0, 1, 2]
    for request in queue.class_requests[:2]:
        queue.answer_classes(request)
    queue.play(1)
    assert len(queue.batches) == 1


def test_other_advantage_estimators_ask_for_no_classes(tmp_path: Path) -> None:
    queue = play(tmp_path, algorithm={})
    queue.play(8)
    assert queue.batches and queue.class_requests == []


def test_groups_of_one_verdict_are_flat_whatever_else_they_earn(tmp_path: Path) -> None:
    verdicts = {0: mixed, 1: lambda p, i: RIGHT, 2: lambda p, i: FORMAT_FAILURE if i else WRONG}
    queue = play(tmp_path, lambda prompt, index: verdicts[int(prompt[1:]) % 3](prompt, index))
    queue.play(20)
    [batch] = queue.batches
    flat = batch.metrics["queue/groups_dropped_zero_variance"][0]
    assert flat >= 2
    # Nobody asks for the classes of what is dropped.
    assert {int(r.texts[0].split("/")[0][1:]) % 3 for r in queue.class_requests} == {0}
    dropped = read_jsonl(tmp_path / "rollouts" / "dropped_000000.jsonl")
    by_prompt = {line["prompt_id"]: line["dropped"] for line in dropped}
    assert len(by_prompt) == flat and set(by_prompt.values()) == {"zero_variance"}


def test_flat_groups_that_are_kept_have_classes_too(tmp_path: Path) -> None:
    queue = play(
        tmp_path,
        lambda prompt, index: RIGHT if int(prompt[1:]) % 2 else WRONG,
        lambda request: [0] * len(request.texts),
        algorithm=MAJORITY | {"zero_variance_groups": "keep"},
    )
    queue.play(8)
    assert not np.any(advantages(queue.batches[0]))
    # Where all are right there is nothing to compare.
    assert {int(r.texts[0].split("/")[0][1:]) % 2 for r in queue.class_requests} == {0}


def test_classes_belong_to_the_completions_that_could_be_graded(tmp_path: Path) -> None:
    queue = play(
        tmp_path,
        lambda prompt, index: UNGRADABLE if index == 1 else mixed(prompt, index),
        lambda request: [0, -1],
        queue={"max_attempts": 1, "max_replacements": 0},
    )
    queue.play(8)
    # Of all three, one right, one wrong, one without an answer: a tie.
    np.testing.assert_allclose(advantages(queue.batches[0]), [[0.5, -0.5, 0.0]] * 2, atol=1e-12)
    assert [text.split("/")[1] for text in queue.class_requests[0].texts] == ["2", "3"]


def by_class(group: GroupView, cfg: AdvantageEstimatorConfig) -> np.ndarray:
    """An advantage estimator of a user's own that reads rewards and classes."""
    return group.rewards + 10.0 * group.classes


by_class.needs_classes = True


def test_an_advantage_estimator_of_ones_own_gets_classes_when_it_says_so(tmp_path: Path) -> None:
    own = {"preset": "majority", "advantage_estimator": {"name": f"{__name__}:by_class"}}
    queue = play(tmp_path, classify=lambda request: [0, 1, -1], algorithm=own)
    queue.play(8)
    # The class of the right answers is 0, those of the others follow.
    found = advantages(queue.batches[0])
    np.testing.assert_allclose(found, [[1.0, 10.1, 20.1, -10.0]] * 2, atol=1e-12)


# --- what goes wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [UNGRADABLE, NOT_GRADED])
def test_a_group_without_classes_is_dropped_and_counted(tmp_path: Path, kind: str) -> None:
    doomed: list[str] = []

    def classify(request: ClassRequest) -> list[int] | str:
        """None of the first two groups."""
        if len(doomed) < 2 and request.texts[0] not in doomed:
            doomed.append(request.texts[0])
        return kind if request.texts[0] in doomed else [0, 0, -1]

    queue = play(tmp_path, classify=classify, queue={"max_attempts": 2})
    queue.play(20)
    reason = f"classes_{kind}"
    [batch] = queue.batches
    count = batch.metrics[f"queue/groups_dropped_{reason}"][0]
    assert count == 2
    lines = read_jsonl(tmp_path / "rollouts" / "dropped_000000.jsonl")
    lost = {line["group"] for line in lines if line["dropped"] == reason}
    assert len(lost) == count
    trained = read_jsonl(tmp_path / "rollouts" / "step_000000.jsonl")
    assert lost.isdisjoint({line["group"] for line in trained})
    asked = [request.texts[0] for request in queue.class_requests]
    assert [asked.count(text) for text in doomed] == [2, 2]


def test_a_run_in_which_no_classes_are_found_ends(tmp_path: Path) -> None:
    queue = play(tmp_path, classify=lambda r: UNGRADABLE, queue={"max_attempts": 1})
    with pytest.raises(DeadlineExceeded, match="16 groups failed.*as classes_ungradable.*verif"):
        queue.play(60)


def test_a_crowded_host_ends_no_run(tmp_path: Path) -> None:
    queue = play(tmp_path, classify=lambda r: NOT_GRADED, queue={"max_attempts": 1})
    queue.play(60)
    assert queue.batches == [] and len(queue.class_requests) > 20


def test_groups_that_are_not_needed_any_more_are_withdrawn(tmp_path: Path) -> None:
    queue = play(tmp_path, classify=lambda request: None)
    queue.play(10)
    asked = len(queue.class_requests)
    assert asked
    queue.coordinator._leases.limits.note_version(4)
    queue.coordinator.handle("batches", "t", WeightsSynced(4, is_final=True), queue.now)
    queue.classify = lambda request: [0, 0, -1]
    for request in queue.class_requests[:asked]:
        queue.answer_classes(request)
    scoring = queue.coordinator._scoring
    assert scoring.outstanding == 0 and scoring.pop_failures() == []


# --- requests -----------------------------------------------------------------------------------


def scored_group(task: str = "math", entry: str = "") -> Group:
    prompt = make_prompt(task=task)
    if entry:
        fields = {f: getattr(prompt, f) for f in prompt.__struct_fields__}
        prompt = type(prompt)(**(fields | {"entry": entry}))
    group = Group(0, prompt, Sampling(8, 1.0), 3, 0, needs_classes=True)
    for index, reward in enumerate((1.0, 0.1, 0.1)):
        rollout = make_rollout(index, text=f"text {index}")
        group.add(ScoredRollout(rollout, make_score(reward)), 0.0)
    return group


def scoring_with(*names: str, **config: float) -> Scoring:
    limits = {"heartbeat_timeout_s": 10, "score_timeout_s": 15, "max_attempts": 2} | config
    scoring = Scoring(QueueConfig(**limits), RewardConfig())
    for name in names:
        scoring.announce(name, VerifierReady({"answers": 1}, session=1), 0.0)
    return scoring


@pytest.mark.parametrize("how", ["restart", "silence", "failure", "timeout", "unreachable"])
def test_lost_classes_are_asked_for_again_and_their_late_answer_ignored(how: str) -> None:
    scoring, group = scoring_with("v"), scored_group()
    scoring.submit_classes(group)
    asked = scoring.next_request(0.0)
    assert asked is not None and asked[1].texts == ["text 1", "text 2"]
    done = ClassDone(asked[1].request_id, [0, 0])
    lose_request(scoring, done.request_id, how)
    assert scoring.take_classes("v", done, 17.0) is None
    assert not group.is_complete
    scoring.announce("w", VerifierReady({"answers": 4}, session=1), 17.0)
    again = scoring.next_request(17.0)
    assert again is not None and again[1] == asked[1]
    assert scoring.take_classes(again[0], done, 18.0) is group
    assert group.is_complete and group.classes == {0: 0, 1: 1, 2: 1}
    assert scoring.outstanding == 0


def test_classes_that_fail_for_good_fail_their_group_with_what_was_said() -> None:
    scoring, group = scoring_with("v"), scored_group()
    scoring.submit_classes(group)
    for _ in range(2):
        name, request = scoring.next_request(0.0)
        scoring.take_failure(name, ScoreFailed(request.request_id, "pool died"), 1.0)
    [failure] = scoring.pop_failures()
    assert failure.group is group and failure.reason == "classes_ungradable"
    assert "tried 2 times (expert.queue.max_attempts); last: v failed: pool died" in failure.detail
    assert scoring.pop_failures() == [] and scoring.outstanding == 0


def test_classes_take_room_of_their_pool_and_wait_their_turn_with_scores() -> None:
    scoring = scoring_with("v")
    scoring.submit(scored_group(), make_rollout(0))
    scoring.submit_classes(scored_group())
    scoring.submit(scored_group(), make_rollout(1))
    first = scoring.next_request(0.0)
    assert first is not None and scoring.next_request(0.0) is None
    scoring.take_score("v", ScoreDone(first[1].request_id, make_score(1.0)), 1.0)
    second = scoring.next_request(1.0)
    assert second is not None and isinstance(second[1], ClassRequest)
    assert scoring.next_request(1.0) is None
    scoring.take_classes("v", ClassDone(second[1].request_id, [0, 1]), 2.0)
    assert scoring.next_request(2.0) is not None


def test_nobody_is_asked_for_the_classes_of_a_dropped_group() -> None:
    scoring, group = scoring_with("v"), scored_group()
    scoring.submit_classes(group)
    group.is_abandoned = True
    scoring.cancel(group)
    assert scoring.next_request(0.0) is None and scoring.outstanding == 0


def test_an_entry_goes_to_comparisons_of_ones_own_alone() -> None:
    tasks = {"mine": TaskConfig(compare="a.b:c")}
    scoring = Scoring(QueueConfig(), RewardConfig(tasks=tasks))
    scoring.announce("v", VerifierReady({"answers": 4, "custom": 4}, session=1), 0.0)
    for task in ("code", "mine"):
        scoring.submit_classes(scored_group(task, entry='{"cases": []}'))
    requests = [scoring.next_request(0.0)[1] for _ in range(2)]
    assert {r.task: r.entry for r in requests} == {"code": "", "mine": '{"cases": []}'}


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        ([0, 1, 2], "sent 3 classes of the 2 answers of request 0"),
        ([0, 2], r"sent classes \[0, 2\] of request 0"),
        (None, "answered a request for classes with a score"),
    ],
)
def test_an_answer_to_another_question_is_refused_and_the_request_stays(
    classes: list[int] | None, words: str
) -> None:
    scoring = scoring_with("v", "w")
    scoring.submit_classes(scored_group())
    name, request = scoring.next_request(0.0)
    with pytest.raises(WireError, match=words):
        if classes is None:
            scoring.take_score(name, ScoreDone(request.request_id, make_score(1.0)), 1.0)
        else:
            scoring.take_classes(name, ClassDone(request.request_id, classes), 1.0)
    # As the server does after a refused message.
    scoring.drop_verifier(name)
    other, again = scoring.next_request(1.0)
    assert other != name and again == request
    assert scoring.take_classes(other, ClassDone(request.request_id, [0, 1]), 2.0) is not None


def test_classes_do_not_answer_a_request_for_a_score() -> None:
    scoring = scoring_with("v")
    scoring.submit(scored_group(), make_rollout())
    name, request = scoring.next_request(0.0)
    with pytest.raises(WireError, match="answered a request for a score with classes"):
        scoring.take_classes(name, ClassDone(request.request_id, []), 1.0)
    assert scoring.take_score(name, ScoreDone(request.request_id, make_score(1.0)), 2.0) is not None
