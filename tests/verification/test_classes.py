"""Classes of answers: the clustering by itself, then with comparisons in real grading processes."""

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from megatron_rl.config.reward import TaskConfig, VerifierConfig, WorkerPoolConfig
from megatron_rl.protocol.types import NOT_GRADED, ClassDone, ClassRequest, ScoreFailed
from tests.verification.requests import boxed, make_rules
from verification.classes import MAX_FAULTS, PAIRS_A_TURN, Answered, ClassDesk, Clustering, Pair
from verification.pool.pool import Pool
from verification.verdict import GradingError

HOSTILE = "tests.verification.pool.hostile_tasks"
MINE = ("obey", "hang", "exit_at_once", "return_nothing", "hang_on_bombs", "recurse")
RULES = make_rules(tasks={name: TaskConfig(compare=f"{HOSTILE}:{name}") for name in MINE})
NO_BOX = "<think>I do not know.</think>It is seven."
TIMEOUT_S = 0.5


def cluster(
    answers: list[str | None], compare: Callable[[str, str], bool | None]
) -> tuple[list[int], list[Pair]]:
    """(classes, pairs that were compared); compare: None for a limit that is exceeded."""
    clustering, pairs = Clustering(answers), []
    while (pair := clustering.advance()) is not None:
        pairs.append(pair)
        is_same = compare(answers[pair.answer], answers[pair.founder])
        if is_same is None:
            clustering.note_fault()
        else:
            clustering.note(is_same=is_same)
    return clustering.classes, pairs


# --- the clustering ----------------------------------------------------------------------------


def test_classes_are_those_of_an_equivalence_and_bound_the_comparisons() -> None:
    rng = random.Random(0)
    for _ in range(200):
        # Numbers are the same that leave the same rest; several texts of one number.
        rest = rng.randint(1, 6)
        answers = [str(rng.randint(0, 30)) for _ in range(rng.randint(0, 20))]
        found, pairs = cluster(answers, lambda a, b, m=rest: int(a) % m == int(b) % m)
        first: dict[int, int] = {}
        assert found == [first.setdefault(int(a) % rest, len(first)) for a in answers]
        assert len(pairs) <= len(set(answers)) * len(first)
        assert len(pairs) == len(set(pairs))


def test_an_answer_is_compared_with_the_first_of_each_class_and_equal_texts_never() -> None:
    found, pairs = cluster(["1", None, "2", "1", "2", None, "3"], lambda a, b: False)
    assert found == [0, -1, 1, 0, 1, -1, 2]
    assert pairs == [Pair(2, 0), Pair(6, 0), Pair(6, 2)]


def test_where_sameness_is_not_transitive_the_order_decides() -> None:
    # 5 is 5 m and 5 s, as a missing unit is accepted.
    def same(a: str, b: str) -> bool:
        return a == "5" or b == "5"

    assert cluster(["5", "5 m", "5 s"], same)[0] == [0, 0, 0]
    assert cluster(["5 m", "5 s", "5"], same)[0] == [0, 1, 0]


def test_texts_decide_where_nothing_is_compared() -> None:
    clustering = Clustering(["a", "b", "a", None], compares=False)
    assert clustering.advance() is None
    assert clustering.classes == [0, 1, 0, -1]


def test_comparisons_that_exceed_a_limit_are_few_however_many_answers_make_them() -> None:
    for n in (2, 5, 64):
        bombs = [f"bomb {number}" for number in range(n)]
        found, pairs = cluster(bombs, lambda a, b: None)
        assert found == list(range(n)) and len(pairs) <= n
    # The worst: half of all pairs hang.
    rng = random.Random(1)
    hangs = {(str(a), str(b)): rng.random() < 0.5 for a in range(64) for b in range(64)}
    answers = [str(number) for number in range(64)]
    _, pairs = cluster(answers, lambda a, b: None if hangs[a, b] else False)
    faults = [p for p in pairs if hangs[answers[p.answer], answers[p.founder]]]
    assert 64 < len(faults) <= MAX_FAULTS * 64


def test_answers_that_hang_cost_no_others_their_class() -> None:
    answers = ["1", "bomb a", "one", "2", "bomb b", "bomb c", "two", "1.0"]
    values = {"1": 1, "one": 1, "1.0": 1, "2": 2, "two": 2}

    def same(a: str, b: str) -> bool | None:
        return None if "bomb" in a + b else values[a] == values[b]

    assert cluster(answers, same)[0] == [0, 1, 0, 2, 3, 4, 2, 0]
    # Two that come first cost the first honest one its class, and no more.
    answers = ["bomb a", "bomb b", "1", "one", "2", "1.0", "two"]
    assert cluster(answers, same)[0] == [0, 1, 2, 3, 4, 3, 4]


# --- with real processes -----------------------------------------------------------------------


@contextmanager
def desk_of(
    timeout_s: float = TIMEOUT_S, within_s: float = 60.0
) -> Iterator[tuple[ClassDesk, Pool]]:
    pool = WorkerPoolConfig(timeout_s=timeout_s)
    config = VerifierConfig(answers=pool, custom=pool, language=pool)
    with Pool(config, RULES) as pool:
        yield ClassDesk(pool, RULES, answer_within_s=within_s), pool


def finish(desk: ClassDesk, pool: Pool, limit_s: float = 60.0) -> dict[int, Answered]:
    """Answers by request."""
    answered: dict[int, Answered] = {}
    deadline = time.monotonic() + limit_s
    while desk.pending:
        assert time.monotonic() < deadline, f"{desk.pending} requests are late"
        if not desk.has_work:
            wait([pool], 0.05)
        found = [a for finished in pool.collect() for a in desk.take_verdict(finished)]
        found += desk.advance(time.monotonic())
        answered |= {answer.request_id: answer for answer in found}
    return answered


def request(
    answers: list[str], *, task: str = "math", request_id: int = 0, checked: bool = True
) -> ClassRequest:
    texts = [boxed(answer) for answer in answers] if checked else answers
    return ClassRequest(request_id, task, texts, [""] * len(texts))


def classes_of(*requests: ClassRequest) -> list[list[int]]:
    with desk_of() as (desk, pool):
        for asked in requests:
            desk.take(asked)
        answered = finish(desk, pool)
    found = [answered[asked.request_id] for asked in requests]
    assert all(isinstance(answer, ClassDone) for answer in found), found
    return [answer.classes for answer in found]


def test_answers_of_the_same_mathematics_are_one_class() -> None:
    halves = request(["1/2", "0.5", "\\frac{1}{2}", "2/3", "0.50"], request_id=1)
    mixed = ["3", "x+1", "3.0", "1+x", "\\frac{6}{2}", "(x-1)(x+1)", "x^2-1", "x^2+1", "3"]
    assert classes_of(halves, request(mixed, request_id=2)) == [
        [0, 0, 0, 1, 0],
        [0, 1, 0, 1, 0, 2, 2, 3, 0],
    ]


def test_an_answer_is_what_it_means_whether_it_is_worked_out_or_not() -> None:
    asked = ClassRequest(
        0, "math", [boxed("\\cos 60^\\circ"), boxed("1/2")], ["", ""], problem="\\cos 60^\\circ?"
    )
    assert classes_of(asked) == [[0, 0]]


def test_a_response_that_its_format_check_refuses_has_no_answer() -> None:
    opened = "Let me see.</think>It is \\boxed{4}."
    asked = ClassRequest(0, "math", [boxed("4"), NO_BOX, opened, ""], ["", "", "<think>\n", ""])
    assert classes_of(asked) == [[0, -1, 0, -1]]


def test_texts_decide_about_exact_answers_puzzles_and_programs() -> None:
    exact = request(["cat", " cat", "Cat", "c at"], task="exact", request_id=1)
    puzzle = request(["1 2\n3 4", "1 2 3 4", "1 2 3 5"], task="reasoning_gym", request_id=2)
    # Indentation is meant.
    sources = ["if a:\n  b()\nc()\n", "if a:\n  b()\nc()\n\n", "if a:\n  b()\n  c()\n"]
    programs = [f"<think>a</think>\n```python\n{source}```" for source in sources]
    code = request(programs, task="code", request_id=3, checked=False)
    assert classes_of(exact, puzzle, code) == [[0, 0, 1, 2], [0, 0, 1], [0, 0, 1]]


def test_a_comparison_of_the_users_own_is_asked_with_the_other_answer_as_reference() -> None:
    assert classes_of(request(["a", "b", "a"], task="obey")) == [[0, 1, 0]]


def test_answers_that_make_comparisons_hang_end_by_the_limit_and_take_no_others_with_them() -> None:
    hanging = [f"bomb {number}" for number in range(4)]
    mixed = ["1", "bomb", "01", "2", "001", "02"]
    timeout_s = 2 * TIMEOUT_S
    with desk_of(timeout_s) as (desk, pool):
        desk.take(request(hanging, task="hang_on_bombs", request_id=1))
        desk.take(request(mixed, task="hang_on_bombs", request_id=2))
        desk.take(request(["3", "3.0", "x+1", "1+x"], request_id=3))
        start = time.monotonic()
        answered = finish(desk, pool)
        elapsed_s = time.monotonic() - start
    assert answered[1] == ClassDone(1, [0, 1, 2, 3])
    assert answered[2] == ClassDone(2, [0, 1, 0, 2, 0, 2])
    assert answered[3] == ClassDone(3, [0, 0, 1, 1])
    # Each comparison that hangs is tried twice.
    faults = MAX_FAULTS * (len(hanging) + 1)
    assert pool.kills <= 2 * faults
    assert elapsed_s < 2 * timeout_s * faults + 60


def test_mathematics_that_explodes_is_a_class_of_its_own_and_ends_soon() -> None:
    bombs = ["9^{9^{9^{9}}}", "1000000!", "\\int_0^{1} \\sin(x^x)^{x^x} dx", "(x+y+z)^{400}"]
    with desk_of() as (desk, pool):
        desk.take(request(["2", *bombs, "2.0"]))
        [found] = finish(desk, pool).values()
    assert found == ClassDone(0, [0, 1, 2, 3, 4, 0])


def test_a_fault_of_a_process_is_the_answers_and_a_bug_is_ours() -> None:
    with desk_of() as (desk, pool):
        desk.take(request(["a", "b"], task="recurse", request_id=1))
        desk.take(request(["a", "b"], task="exit_at_once", request_id=2))
        desk.take(request(["a", "b"], task="return_nothing", request_id=3))
        answered = finish(desk, pool)
    assert answered[1] == ClassDone(1, [0, 1])
    for number, reason in ((2, "exit code 7"), (3, "expected a bool")):
        failed = answered[number]
        assert isinstance(failed, ScoreFailed) and reason in failed.reason
        assert failed.kind == "ungradable"


def test_a_request_that_is_open_for_too_long_is_answered() -> None:
    with desk_of(timeout_s=60.0, within_s=1.5) as (desk, pool):
        desk.take(request(["a", "b"], task="hang"))
        start = time.monotonic()
        [failed] = finish(desk, pool).values()
        assert 1.5 <= time.monotonic() - start < 30
    assert isinstance(failed, ScoreFailed) and failed.kind == NOT_GRADED
    assert "open for over 2 s (expert.verifier.answer_within_s)" in failed.reason


def test_many_quick_comparisons_hold_up_no_other_request() -> None:
    with desk_of() as (desk, _):
        desk.take(request([str(number) for number in range(64)], request_id=1))
        desk.take(request(["3", "3.0"], request_id=2))
        turns = []
        while desk.pending:
            turns.append([answer.request_id for answer in desk.advance(time.monotonic())])
        # 64 * 63 / 2 comparisons of the first, in turn with those of the second.
        assert turns[0] == [2] and turns[-1] == [1]
        assert len(turns) >= 2016 // PAIRS_A_TURN


def test_an_unknown_task_is_refused() -> None:
    with desk_of() as (desk, _), pytest.raises(GradingError, match="unknown task 'no_such'"):
        desk.take(request(["a"], task="no_such"))


def test_a_comparison_of_the_users_own_is_never_loaded_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_comparison.py").write_text("def same(answer, request):\n    return True\n")
    monkeypatch.syspath_prepend(tmp_path)
    rules = make_rules(tasks={"mine": TaskConfig(compare="own_comparison:same")})
    with Pool(VerifierConfig(), rules) as pool:
        desk = ClassDesk(pool, rules, answer_within_s=600.0)
        desk.take(request(["a", "b"], task="mine"))
        [found] = finish(desk, pool).values()
    # A grading process has loaded it.
    assert found == ClassDone(0, [0, 0])
    assert "own_comparison" not in sys.modules
