import msgspec
import pytest

from megatron_rl.config.reward import ExtraReward, RewardConfig
from megatron_rl.config.tree import QueueConfig
from megatron_rl.protocol.types import (
    NOT_GRADED,
    UNGRADABLE,
    Sampling,
    ScoreDone,
    ScoreFailed,
    ScoreRequest,
    VerifierReady,
)
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.rollout_queue.scoring import Scoring
from tests.rollout_queue.makers import lose_request, make_prompt, make_rollout, make_score

CONFIG = QueueConfig(heartbeat_timeout_s=10, score_timeout_s=15, max_attempts=2)


def new_group(task: str = "math") -> Group:
    return Group(0, make_prompt(task=task), Sampling(8, 1.0), 4, 0)


def scoring_with(*verifiers: str, capacity: int = 4) -> Scoring:
    scoring = Scoring(CONFIG, RewardConfig())
    for name in verifiers:
        scoring.announce(name, VerifierReady({"answers": capacity}, session=1), 0.0)
    return scoring


def test_verifier_is_asked_for_no_more_than_its_capacity() -> None:
    scoring, group = scoring_with("v", capacity=2), new_group()
    for index in range(3):
        scoring.submit(group, make_rollout(index))
    first, second = scoring.next_request(0.0), scoring.next_request(0.0)
    assert first and second and scoring.next_request(0.0) is None
    found = scoring.take_score("v", ScoreDone(second[1].request_id, make_score(1.0)), 1.0)
    assert found is not None and found[1].rollout.index == 1 and found[0] is group
    assert scoring.next_request(1.0) is not None and scoring.outstanding == 2


def test_truncated_completion_is_asked_about_as_unfinished() -> None:
    scoring = scoring_with("v")
    scoring.submit(new_group(), make_rollout(0, finish_reason="length"))
    asked = scoring.next_request(0.0)
    assert asked is not None and not asked[1].is_finished and asked[1].completion_tokens == 3


def test_of_a_conversation_the_text_to_grade_is_sent() -> None:
    scoring = scoring_with("v")
    for text in ("x", "", None):
        rollout = make_rollout(0, text="all turns")
        scoring.submit(new_group(), msgspec.structs.replace(rollout, to_grade=text))
    asked = [scoring.next_request(0.0) for _ in range(3)]
    assert [found and found[1].text for found in asked] == ["x", "", "all turns"]


def test_every_accepted_answer_is_sent() -> None:
    scoring, group = scoring_with("v"), new_group()
    group.prompt = msgspec.structs.replace(group.prompt, other_answers=["3.5", "7/2"])
    scoring.submit(group, make_rollout(0))
    asked = scoring.next_request(0.0)
    assert asked is not None
    assert (asked[1].answer, asked[1].other_answers) == ("1", ["3.5", "7/2"])


def test_full_pool_of_programs_does_not_hold_up_answers() -> None:
    scoring = Scoring(CONFIG, RewardConfig())
    scoring.announce("v", VerifierReady({"answers": 2, "code": 1}, session=1), 0.0)
    for index in range(3):
        scoring.submit(new_group("code"), make_rollout(index))
    for index in range(2):
        scoring.submit(new_group("math"), make_rollout(index))
    asked = []
    while (request := scoring.next_request(0.0)) is not None:
        asked.append(request[1])
    assert sorted(request.task for request in asked) == ["code", "math", "math"]
    [program] = [request for request in asked if request.task == "code"]
    assert scoring.take_score("v", ScoreDone(program.request_id, make_score(1.0)), 1.0) is not None
    following = scoring.next_request(1.0)
    assert following is not None and following[1].task == "code"
    assert scoring.next_request(1.0) is None


def _ask_all(scoring: Scoring, now: float = 0.0) -> list[str]:
    """Tasks of all requests that can be handed out now."""
    asked = []
    while (request := scoring.next_request(now)) is not None:
        asked.append(request[1].task)
    return asked


def test_request_takes_room_in_every_pool_that_its_steps_need() -> None:
    extra = ExtraReward(name="bonus", function="a:b", tasks=["code", "exact"])
    scoring = Scoring(CONFIG, RewardConfig(extra=[extra]))
    room = {"answers": 5, "language": 5, "code": 5, "custom": 2}
    scoring.announce("v", VerifierReady(room, session=1), 0.0)
    for task in ("exact", "code", "code", "math", "exact"):
        scoring.submit(new_group(task), make_rollout(0))
    # Two of those with an extra reward, whatever judges them; math needs no room of theirs.
    assert _ask_all(scoring) == ["exact", "code", "math"]
    assert scoring.take_score("v", ScoreDone(0, make_score(1.0)), 1.0) is not None
    assert _ask_all(scoring) == ["code"]
    # What a restart loses is lost in two worker pools, and asked for once.
    scoring.announce("v", VerifierReady(room, session=2), 1.0)
    assert sorted(_ask_all(scoring)) == ["code", "code", "math"]
    assert scoring.outstanding == 4


def test_requests_that_share_a_pool_are_asked_in_turn() -> None:
    extra = ExtraReward(name="bonus", function="a:b", tasks=["exact"])
    scoring = Scoring(CONFIG, RewardConfig(extra=[extra]))
    scoring.announce("v", VerifierReady({"answers": 1, "custom": 9}, session=1), 0.0)
    for task in ("math", "exact", "math"):
        scoring.submit(new_group(task), make_rollout(0))
    asked = []
    for number in range(3):
        asked += _ask_all(scoring)
        assert scoring.take_score("v", ScoreDone(number, make_score(1.0)), 1.0) is not None
    assert asked == ["math", "exact", "math"]


@pytest.mark.parametrize("how", ["restart", "silence", "failure", "timeout", "unreachable"])
def test_lost_score_is_asked_for_again_and_its_late_answer_ignored(how: str) -> None:
    scoring = scoring_with("v")
    scoring.submit(new_group(), make_rollout(0))
    asked = scoring.next_request(0.0)
    assert asked is not None
    request_id = asked[1].request_id
    lose_request(scoring, request_id, how)
    assert scoring.take_score("v", ScoreDone(request_id, make_score(1.0)), 17.0) is None
    scoring.announce("w", VerifierReady({"answers": 4}, session=1), 17.0)
    again = scoring.next_request(17.0)
    assert again is not None and again[1].request_id == request_id
    assert scoring.pop_failures() == []
    scoring.take_failure(again[0], ScoreFailed(request_id, "pool died"), 18.0)
    if how in ("restart", "silence", "unreachable"):
        # What a verifier lost was no attempt.
        assert scoring.pop_failures() == []
        again = scoring.next_request(18.0)
        scoring.take_failure(again[0], ScoreFailed(request_id, "pool died"), 18.0)
    [failure] = scoring.pop_failures()
    assert failure.reason == "ungradable" and scoring.outstanding == 0
    tried = "grading was tried 2 times (expert.queue.max_attempts)"
    assert failure.detail == f"{tried}; last: {again[0]} failed: pool died"


def test_nobody_is_asked_to_grade_what_is_left_of_a_dropped_group() -> None:
    scoring, dropped, other = scoring_with("v", capacity=1), new_group(), new_group()
    scoring.submit(dropped, make_rollout(0))
    asked = scoring.next_request(0.0)
    assert asked is not None
    scoring.submit(dropped, make_rollout(1))
    scoring.submit(other, make_rollout(2))
    dropped.is_abandoned = True
    scoring.cancel(dropped)
    assert scoring.outstanding == 2
    # What was asked for holds its place until it is answered, and is not asked for again.
    scoring.take_failure("v", ScoreFailed(asked[1].request_id, "pool died"), 1.0)
    following = scoring.next_request(1.0)
    assert following is not None and scoring.outstanding == 1
    found = scoring.take_score("v", ScoreDone(following[1].request_id, make_score(1.0)), 2.0)
    assert found is not None and found[0] is other and scoring.pop_failures() == []


def _fail(scoring: Scoring, asked: tuple[str, ScoreRequest], kind: str = UNGRADABLE) -> None:
    name, request = asked
    scoring.take_failure(name, ScoreFailed(request.request_id, "broken", kind), 1.0)


def test_what_one_verifier_cannot_grade_another_one_tries() -> None:
    config = QueueConfig(max_attempts=3)
    scoring = Scoring(config, RewardConfig())
    for name in ("v", "w"):
        scoring.announce(name, VerifierReady({"answers": 8}, session=1), 0.0)
    tried = []
    scoring.submit(new_group(), make_rollout(0))
    while (asked := scoring.next_request(0.0)) is not None:
        # One that fails at once has more room than the others.
        tried.append(asked[0])
        _fail(scoring, asked)
    assert sorted(tried[:2]) == ["v", "w"] and len(tried) == 3


def test_request_waits_for_no_other_verifier_than_those_that_have_failed_it() -> None:
    scoring = scoring_with("v")
    scoring.submit(new_group(), make_rollout(0))
    _fail(scoring, scoring.next_request(0.0))
    again = scoring.next_request(0.0)
    assert again is not None and again[0] == "v"


def test_retry_that_waits_for_another_verifier_holds_up_nobody() -> None:
    scoring = scoring_with("v", "w", capacity=1)
    for index in range(3):
        scoring.submit(new_group(), make_rollout(index))
    first, second = scoring.next_request(0.0), scoring.next_request(0.0)
    assert first is not None and second is not None
    _fail(scoring, first)
    fresh = scoring.next_request(0.0)
    assert fresh is not None and (fresh[0], fresh[1].request_id) == (first[0], 2)
    # The one that failed it has room again, the other has none: it waits for that one.
    scoring.take_score(fresh[0], ScoreDone(fresh[1].request_id, make_score(1.0)), 1.0)
    assert scoring.next_request(1.0) is None
    scoring.take_score(second[0], ScoreDone(second[1].request_id, make_score(1.0)), 1.0)
    again = scoring.next_request(1.0)
    assert again is not None and (again[0], again[1].request_id) == (second[0], 0)


def test_retries_wait_behind_what_was_there_when_they_failed() -> None:
    extra = ExtraReward(name="bonus", function="a:b", tasks=["exact"])
    scoring = Scoring(QueueConfig(max_attempts=4), RewardConfig(extra=[extra]))
    scoring.announce("v", VerifierReady({"answers": 1, "custom": 9}, session=1), 0.0)
    # Two lines, of math and exact, that share the worker pool of answers.
    for task in ("math", "exact", "exact"):
        scoring.submit(new_group(task), make_rollout(0))
    asked = []
    while (request := scoring.next_request(0.0)) is not None:
        asked.append(request[1].request_id)
        if request[1].task == "math":
            _fail(scoring, request)
        else:
            scoring.take_score("v", ScoreDone(request[1].request_id, make_score(1.0)), 1.0)
    assert asked == [0, 1, 2, 0, 0, 0]


def test_score_that_has_taken_too_long_already_is_not_tried_again() -> None:
    config = QueueConfig(max_attempts=9, score_patience_s=100)
    scoring = Scoring(config, RewardConfig())
    scoring.announce("v", VerifierReady({"answers": 4}, session=1), 0.0)
    scoring.submit(new_group(), make_rollout(0))
    # It waited for long until it was asked for: that says nothing about it.
    for now in (500.0, 560.0, 599.0):
        asked = scoring.next_request(now)
        assert asked is not None and scoring.pop_failures() == []
        scoring.take_failure("v", ScoreFailed(asked[1].request_id, "slow", NOT_GRADED), now)
    asked = scoring.next_request(599.0)
    assert asked is not None
    scoring.take_failure("v", ScoreFailed(asked[1].request_id, "slow", NOT_GRADED), 601.0)
    [failure] = scoring.pop_failures()
    assert (failure.reason, failure.is_late) == (NOT_GRADED, True)
    assert (
        "tried 4 times" in failure.detail
        and "101 s (expert.queue.score_patience_s)" in failure.detail
    )
    assert scoring.outstanding == 0
