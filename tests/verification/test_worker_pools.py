"""Worker pools: which processes take which step, and how much of it is under way at once."""

import itertools
import json
import time
from multiprocessing.connection import wait

import pytest

from megatron_rl.config.reward import (
    WORKER_POOLS,
    ExtraReward,
    RewardConfig,
    TaskConfig,
    VerifierConfig,
    WorkerPoolConfig,
)
from megatron_rl.config.thinking import ThinkTags
from megatron_rl.config.tree import QueueConfig
from megatron_rl.protocol.types import Sampling, Score, ScoreDone, VerifierReady
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.rollout_queue.scoring import Scoring
from tests.rollout_queue.makers import make_prompt, make_rollout
from tests.verification.requests import boxed, make_request, make_rules
from verification.draft import Draft
from verification.format import FORMAT_CHECKS, FormatResult
from verification.library import Grading, Sample
from verification.pool.pool import Pool
from verification.rules import RewardRules
from verification.score import screen

PLUG_INS = "tests.verification.pool.hostile_tasks"
# "7" has one of two characters, the program below more: see hostile_tasks.half.
HALF = ExtraReward(name="half", function=f"{PLUG_INS}:half", weight=0.2)
PRODUCT = boxed("(x+1)(x-1)")
PROGRAM = """#include <bits/stdc++.h>
int main() { int a; std::cin >> a; std::cout << a + STEP; }"""


def _program(step: int) -> Sample:
    source = PROGRAM.replace("STEP", str(step))
    tests = {"cases": [{"stdin": "1\n", "stdout": "2\n"}, {"stdin": "5\n", "stdout": "6\n"}]}
    text = f"<think>Add one.</think>\n```cpp\n{source}\n```"
    return Sample(text=text, task="code", entry=json.dumps(tests))


def test_compiled_program_is_graded_and_earns_its_extra_reward() -> None:
    with Grading(RewardConfig(extra=[HALF])) as grading:
        right, wrong = grading.score([_program(1), _program(2)])
    assert isinstance(right, Score) and isinstance(wrong, Score)
    # The format check's answer is the source with its final line break: 0.2 x its length / 2.
    bonus = 0.1 * (len(PROGRAM.replace("STEP", "1")) + 1)
    assert right.parts == pytest.approx({"format": 0.1, "correct": 0.9, "length": 0, "half": bonus})
    assert right.reward == pytest.approx(1.0 + bonus)
    assert wrong.reason == "wrong_output"
    assert wrong.parts == pytest.approx({"format": 0.1, "correct": 0, "length": 0, "half": bonus})


def _rewards() -> list[RewardConfig]:
    tasks = {"mine": TaskConfig(compare=f"{PLUG_INS}:obey")}
    extras = ([], [HALF], [ExtraReward(name="half", function=HALF.function, tasks=["code"])])
    return [
        RewardConfig(language=language, extra=extra, tasks=tasks)
        for language, extra in itertools.product((0.0, 0.1), extras)
    ]


@pytest.mark.parametrize("reward", _rewards(), ids=lambda r: f"{r.language}-{len(r.extra)}")
def test_what_is_left_to_grade_needs_only_pools_that_the_queue_kept(reward: RewardConfig) -> None:
    program = "<think>a</think>\n```python\nprint(7)\n```"
    texts = {"math": PRODUCT, "exact": boxed("7"), "code": program, "mine": boxed("7")}
    rules = RewardRules(reward=reward, max_tokens=100)
    for task, text in texts.items():
        found = screen(make_request(text, task=task), rules)
        left = found.steps if isinstance(found, Draft) else ()
        steps = reward.steps_of(task)
        assert steps[len(steps) - len(left) :] == left
        assert bool(reward.extras_of(task)) == (steps[-1].kind == "extras")


def test_format_check_and_quick_comparison_run_once_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    format_check = FORMAT_CHECKS["think_box"]

    def counted(text: str, prompt_tail: str, tags: ThinkTags) -> FormatResult:
        seen.append(text)
        return format_check(text, prompt_tail, tags)

    monkeypatch.setitem(FORMAT_CHECKS, "think_box", counted)
    with Grading(RewardConfig(language=0.1)) as grading:
        [score] = grading.score([Sample(text=PRODUCT, answer="x^2-1")])
    assert isinstance(score, Score) and score.is_correct
    assert seen == [PRODUCT]


def test_a_question_carries_text_only_where_it_is_read() -> None:
    rules = make_rules(language=0.1, extra=[HALF])
    draft = screen(make_request(PRODUCT, answer="x^2-1", problem="Why?"), rules)
    assert isinstance(draft, Draft)
    by_kind = {}
    for number in range(3):
        left = Draft(draft.request, draft.checked, draft.steps[number:])
        by_kind[left.question.kind] = left.question
    judged, language, extras = (by_kind[kind] for kind in ("judge", "language", "extras"))
    assert (judged.request.text, judged.checked.thoughts) == ("", "")
    assert (language.request.text, language.checked.thoughts) == ("", "Let me see.")
    assert (extras.request.text, extras.checked.answer) == (PRODUCT, "(x+1)(x-1)")


def test_each_pool_holds_no_more_than_its_max_pending() -> None:
    """The queue's count of room and the real pools, with more requests than a pool takes."""
    room = {"answers": 3, "language": 2, "code": 1, "custom": 2}
    reward = RewardConfig(
        language=0.1,
        tasks={"mine": TaskConfig(compare=f"{PLUG_INS}:obey")},
        extra=[ExtraReward(name="half", function=HALF.function, tasks=["exact", "mine"])],
    )
    scoring = Scoring(QueueConfig(), reward)
    scoring.announce("v", VerifierReady(room, session=1), 0.0)
    answers = {"math": "(x+1)(x-1)", "exact": "x^2-1", "mine": "x^2-1"}
    for index in range(24):
        task = list(answers)[index % 3]
        group = Group(0, make_prompt(task=task, answer="x^2-1"), Sampling(8, 1.0), 24, 0)
        scoring.submit(group, make_rollout(index, text=boxed(answers[task])))
    rules = RewardRules(reward=reward, max_tokens=100)
    cfg = VerifierConfig(
        **{pool: WorkerPoolConfig(max_pending=room[pool]) for pool in WORKER_POOLS}
    )
    most = dict.fromkeys(WORKER_POOLS, 0)
    with Pool(cfg, rules) as pool:
        deadline_s = time.monotonic() + 60
        while scoring.outstanding:
            assert time.monotonic() < deadline_s
            while (asked := scoring.next_request(0.0)) is not None:
                draft = screen(asked[1], rules)
                assert isinstance(draft, Draft)
                pool.submit(draft)
            for name in WORKER_POOLS:
                assert pool.pools[name].pending <= pool.taken[name] <= room[name]
                most[name] = max(most[name], pool.taken[name])
            wait([pool], 0.05)
            for done in pool.collect():
                assert isinstance(done, ScoreDone) and done.score.is_correct
                assert scoring.take_score("v", done, 0.0) is not None
        assert not +pool.taken
    # Every request needs the language worker pool, which is the narrowest and was full.
    assert most["language"] == room["language"]
