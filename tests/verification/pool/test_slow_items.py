"""Slow items: bombs hold up nobody, what is slow loses nothing, a crowded host fails none."""

import json
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from megatron_rl.config.reward import TaskConfig, VerifierConfig, WorkerPoolConfig
from megatron_rl.protocol.types import NOT_GRADED, ScoreDone, ScoreFailed, ScoreRequest
from tests.verification.crowd import crowded
from tests.verification.pool import hostile_tasks
from tests.verification.requests import boxed, collect, make_request, make_rules
from verification.draft import Draft
from verification.pool.faults import HOST, TIMEOUT, WAITED, Outcome, judge, judge_unfinished
from verification.pool.pool import Pool
from verification.pool.suspects import FIRST_SLICE_S, OVERDUE_S, Turn, choose, level, slice_left_s
from verification.pool.worker_pool import Finished
from verification.score import screen

PLUG_INS = hostile_tasks.__name__
FUNCTIONS = ("compute", "sleep", "obey", "wait", "hang_in_a_child")
TASKS = {name: TaskConfig(compare=f"{PLUG_INS}:{name}") for name in FUNCTIONS}
RULES = make_rules(tasks=TASKS)
BOMB = "\\prod_{n=1}^{9999} (1+\\frac{1}{n^2})"


def _pool(**verifier: object) -> Pool:
    return Pool(VerifierConfig(**verifier), RULES)


def _submit(pool: Pool, request: ScoreRequest) -> None:
    draft = screen(request, RULES)
    assert isinstance(draft, Draft)
    pool.submit(draft)


def _integral(number: int) -> ScoreRequest:
    """A right answer that takes a twentieth to a third of a second."""
    box = f"\\int_{{{number}}}^{{{number + 1}}} \\frac{{dx}}{{x}}"
    answer = f"\\ln\\frac{{{number + 1}}}{{{number}}}"
    return make_request(boxed(box), answer=answer, request_id=number)


def _bomb(number: int) -> ScoreRequest:
    return make_request(boxed(BOMB), answer="\\sqrt{2}+x", request_id=number)


def _assert_right(finished: dict[int, Finished], numbers: range) -> None:
    for number in numbers:
        reply = finished[number]
        assert isinstance(reply, ScoreDone) and reply.score.is_correct, (number, reply)


def test_thirty_slow_items_take_no_kill() -> None:
    with _pool() as pool:
        for number in range(1, 31):
            _submit(pool, _integral(number))
        _assert_right(collect(pool, 120), range(1, 31))
        assert (pool.kills, pool.deaths) == (0, 0)


def test_slow_items_overtake_the_bombs_before_them() -> None:
    with _pool(answers=WorkerPoolConfig(timeout_s=1.0)) as pool:
        for number in range(101, 104):
            _submit(pool, _bomb(number))
        # Every bomb has begun, and used more than any of the others will.
        answers = pool.pools["answers"]
        deadline = time.monotonic() + 60
        while sum(process.used_s > 0.35 for process in answers.suspects.processes) < 3:
            assert time.monotonic() < deadline and answers.pending == 3
            wait([pool], 0.02)
            pool.collect()
        for number in range(1, 11):
            _submit(pool, _integral(number))
        finished = collect(pool, 120)
    _assert_right(finished, range(1, 11))
    assert set(list(finished)[-3:]) == {101, 102, 103}
    for number in range(101, 104):
        reply = finished[number]
        assert isinstance(reply, ScoreDone) and reply.score.reason == "grading_timeout"
    assert pool.kills == 6


def test_more_slow_items_than_may_be_held_are_right_all_the_same() -> None:
    with _pool(answers=WorkerPoolConfig(held_slow=3)) as pool:
        for number in range(1, 13):
            _submit(pool, _integral(number))
        _assert_right(collect(pool, 120, most_held=3), range(1, 13))


def test_what_computes_within_its_limit_is_right_on_a_crowded_host() -> None:
    pool = WorkerPoolConfig(timeout_s=1.0)
    with crowded(4), _pool(custom=pool, answers=pool) as pool:
        request = make_request(boxed("7"), task="compute", entry="0.6", request_id=50)
        _submit(pool, request)
        _submit(pool, make_request(boxed("7"), task="sleep", entry="9", request_id=51))
        _submit(pool, _integral(1))
        finished = collect(pool, 100)
    _assert_right(finished, range(50, 51))
    _assert_right(finished, range(1, 2))
    slept = finished[51]
    assert isinstance(slept, ScoreFailed) and slept.kind == NOT_GRADED


def test_three_of_64_that_wait_are_tried_again_then_not_graded_and_never_earn_less(
    tmp_path: Path,
) -> None:
    """A judge over HTTP under load: it answers late once, or never."""
    waiting = {11: "once", 30: "once", 52: "ever"}
    limits = WorkerPoolConfig(workers=2, timeout_s=0.6)
    with _pool(custom=limits) as pool:
        for number in range(64):
            entry = f"{waiting.get(number, '')} {tmp_path / str(number)}"
            request = make_request(boxed("7"), task="wait", entry=entry, request_id=number)
            _submit(pool, request)
        finished = collect(pool, 120)
        # The two that answer at the second attempt take one kill each, the other takes two.
        assert pool.kills == 4
    lost = finished.pop(52)
    assert isinstance(lost, ScoreFailed) and lost.kind == NOT_GRADED
    assert "custom.timeout_s=0.6" in lost.reason and "computed for 0.0 s" in lost.reason
    _assert_right(finished, range(52))
    _assert_right(finished, range(53, 64))


@pytest.mark.parametrize(("task", "workers"), [("sleep", 1 + 3), ("compute", 1)])
def test_functions_that_wait_leave_their_core_to_others(task: str, workers: int) -> None:
    """A slow judge is asked for several answers at once; what computes has one process a core."""
    most = 0
    with _pool(custom=WorkerPoolConfig(workers=1, held_slow=3)) as pool:
        for number in range(5):
            _submit(pool, make_request(boxed("7"), task=task, entry="0.7", request_id=number))
        deadline = time.monotonic() + 60
        while pool.pending:
            assert time.monotonic() < deadline
            wait([pool], 0.02)
            most = max(most, len(pool.pools["custom"].workers))
            for one in pool.collect():
                assert isinstance(one, ScoreDone) and one.score.is_correct
    assert most == workers


def test_a_program_that_a_function_calls_and_that_never_ends_is_the_completions_fault() -> None:
    with _pool(custom=WorkerPoolConfig(timeout_s=1.6)) as pool:
        _submit(pool, make_request(boxed("7"), task="hang_in_a_child"))
        reply = collect(pool, 120)[1]
    assert isinstance(reply, ScoreDone) and reply.score.reason == "grading_timeout"


def test_a_host_without_time_leaves_an_answer_not_graded_and_never_wrong() -> None:
    pool = WorkerPoolConfig(timeout_s=0.4, max_elapsed_s=0.4)
    with crowded(6), _pool(answers=pool) as pool:
        _submit(pool, _bomb(1))
        reply = collect(pool, 120)[1]
    assert isinstance(reply, ScoreFailed)
    assert reply.kind == NOT_GRADED
    assert "it computed for 0." in reply.reason


def test_a_program_that_outlasts_its_pool_is_not_graded_after_a_second_try() -> None:
    text = "<think>a</think>\n```python\nimport time\ntime.sleep(3)\nprint(7)\n```"
    entry = json.dumps({"cases": [{"stdin": "", "stdout": "7"}]})
    with _pool(code=WorkerPoolConfig(timeout_s=1.0, memory_bytes=4 << 30)) as pool:
        _submit(pool, make_request(text, task="code", entry=entry))
        reply = collect(pool, 120)[1]
        assert pool.kills == 2
    assert isinstance(reply, ScoreFailed) and reply.kind == NOT_GRADED


def test_everything_is_answered_within_its_time() -> None:
    pool = WorkerPoolConfig(timeout_s=2.0, max_elapsed_s=2.0)
    within_s = 3.0
    limits = {name: pool for name in ("answers", "language", "code", "custom")}
    with _pool(answer_within_s=within_s, **limits) as pool:
        started = time.monotonic()
        for number in range(1, 25):
            _submit(pool, _bomb(number))
        finished = collect(pool, 120)
        # Twenty-four bombs, twice two seconds each, on at most two cores: over 40 s.
        assert time.monotonic() - started < within_s + 20
    assert len(finished) == 24
    kinds = {reply.kind for reply in finished.values() if isinstance(reply, ScoreFailed)}
    assert kinds == {NOT_GRADED}
    for reply in finished.values():
        assert isinstance(reply, ScoreFailed) or reply.score.reason == "grading_timeout"


@pytest.mark.parametrize(
    ("faults", "outcome"),
    [
        ([TIMEOUT], Outcome.RETRY),
        ([TIMEOUT, TIMEOUT], Outcome.SCORE),
        ([HOST], Outcome.RETRY),
        ([HOST, HOST], Outcome.NOT_GRADED),
        ([HOST, TIMEOUT], Outcome.RETRY),
        ([HOST, TIMEOUT, TIMEOUT], Outcome.SCORE),
        ([TIMEOUT, HOST, "grading_memory"], Outcome.NOT_GRADED),
        ([WAITED], Outcome.RETRY),
        ([WAITED, WAITED], Outcome.NOT_GRADED),
        ([WAITED, TIMEOUT, TIMEOUT], Outcome.SCORE),
        ([TIMEOUT, WAITED, "grading_crash"], Outcome.NOT_GRADED),
        (["exit"], Outcome.RETRY),
        (["exit", "exit"], Outcome.FAILED),
        (["exit", TIMEOUT, "grading_depth"], Outcome.FAILED),
        (["grading_crash", HOST, "grading_crash"], Outcome.SCORE),
    ],
)
def test_faults_by_hand(faults: list[str], outcome: Outcome) -> None:
    assert judge(faults) is outcome


def test_who_runs_out_of_time_is_blamed_only_after_its_share_of_cpu_time() -> None:
    assert judge_unfinished([]) is Outcome.NOT_GRADED
    assert judge_unfinished([HOST]) is Outcome.NOT_GRADED
    assert judge_unfinished(["grading_crash"]) is Outcome.NOT_GRADED
    assert judge_unfinished([TIMEOUT]) is Outcome.SCORE


def test_levels_double() -> None:
    used = [0.0, 0.049, 0.05, 0.099, 0.1, 0.199, 0.2, 0.4, 3.0]
    assert [level(used_s) for used_s in used] == [0, 0, 1, 1, 2, 2, 3, 4, 6]
    assert slice_left_s(0.0) == FIRST_SLICE_S
    assert slice_left_s(0.06) == pytest.approx(0.04)
    assert slice_left_s(3.0) == pytest.approx(0.2)


def test_turns_go_to_the_youngest_and_change_only_for_a_lower_level() -> None:
    bombs = [Turn(1.0, 0.0, is_running=True), Turn(2.0, 0.0, is_running=True)]
    young, sibling = Turn(0.03, 5.0), Turn(0.04, 5.0, is_running=True)
    assert choose([*bombs, young], 2, 6.0) == [2, 0]
    assert choose([*bombs, young, sibling], 2, 6.0) == [3, 2]
    # Of one level: who runs goes on, and then who came first.
    assert choose([Turn(0.06, 1.0), Turn(0.09, 3.0, is_running=True), Turn(0.06, 2.0)], 2, 6.0) == [
        1,
        0,
    ]
    assert choose([], 2, 6.0) == []


def test_who_waits_too_long_has_one_of_the_turns() -> None:
    now = OVERDUE_S + 1
    old = [Turn(4.0, 0.5), Turn(3.0, 0.0)]
    assert choose([*old, Turn(0.01, now), Turn(0.02, now)], 2, now) == [1, 2]


def test_who_needs_quiet_runs_last_or_overdue_and_alone() -> None:
    quiet, bomb = Turn(0.1, 5.0, needs_quiet=True), Turn(3.0, 5.0, is_running=True)
    assert choose([quiet, bomb], 2, 6.0) == [1]
    assert choose([quiet], 2, 6.0) == [0]
    assert choose([quiet._replace(is_running=True), bomb], 2, 6.0) == [0]
    assert choose([quiet, bomb], 2, 5.0 + OVERDUE_S) == [0]
