import json

from megatron_rl.config.reward import RewardConfig, TaskConfig, VerifierConfig, WorkerPoolConfig
from megatron_rl.config.tree import Config
from megatron_rl.protocol.types import ClassRequest, Score, ScoreFailed
from tests.verification.requests import boxed
from verification.library import MAX_PENDING, Grading, Sample

CASES = [{"stdin": "1\n", "stdout": "2\n"}, {"stdin": "5\n", "stdout": "6\n"}]
ENTRY = json.dumps({"cases": CASES})


def _program(source: str) -> str:
    return f"<think>Add one.</think>\n```python\n{source}\n```"


def test_samples_of_all_kinds_are_scored_in_order() -> None:
    samples = [
        Sample(text=boxed("7"), answer="7"),
        Sample(text=boxed("(x+1)(x-1)"), answer="x^2-1"),
        Sample(text=_program("print(int(input()) + 1)"), task="code", entry=ENTRY),
        Sample(text=boxed("(x+1)(x-2)"), answer="x^2-1"),
        Sample(text=_program("print(2)"), task="code", entry=ENTRY),
        Sample(text="7", answer="7"),
        Sample(text=boxed("7"), answer="7", task="no_such_task"),
    ]
    with Grading() as grading:
        scores = grading.score(samples)
    assert [score.reason for score in scores[:6]] == [
        "correct", "correct", "correct", "wrong_answer", "wrong_output", "no_think_start",
    ]  # fmt: skip
    assert isinstance(scores[6], ScoreFailed) and "unknown task" in scores[6].reason


def test_an_answer_is_a_text_a_number_or_a_list_of_these() -> None:
    answers = ("7", 7, 7.0, ["8", 7], [8], [])
    with Grading() as grading:
        scores = grading.score(Sample(text=boxed("7"), answer=answer) for answer in answers)
    assert [score.reason == "correct" for score in scores] == [True] * 4 + [False] * 2


def test_more_samples_than_the_pool_takes_at_once_all_come_back() -> None:
    count = MAX_PENDING + 200
    samples = (
        Sample(text=boxed(f"(x+{i})(x-1)"), answer=f"x^2+({i}-1)x-{i + i % 2}")
        for i in range(count)
    )
    with Grading() as grading:
        scores = grading.score(samples)
    # Every second reference is off by one.
    assert [isinstance(s, Score) and s.is_correct for s in scores] == [True, False] * (count // 2)


def test_classes_of_answers_come_in_the_order_of_the_requests() -> None:
    def request(*answers: str, task: str = "math") -> ClassRequest:
        texts = [boxed(answer) for answer in answers]
        return ClassRequest(0, task, texts, prompt_tails=[""] * len(texts))

    polynomials = [request(f"(x+{i})(x-1)", f"x^2+{i - 1}x-{i}", "x^2", "7") for i in range(1, 60)]
    with Grading() as grading:
        first = grading.classes([*polynomials, request("1/2", "0.5", "2"), request(task="no")])
        [again] = grading.classes([request("2", "x", "2.0")])
        [score] = grading.score([Sample(text=boxed("7"), answer="7")])
    assert [found.classes for found in first[:-2]] == [[0, 0, 1, 2]] * 59
    assert first[-2].classes == [0, 0, 1]
    assert isinstance(first[-1], ScoreFailed) and "unknown task" in first[-1].reason
    assert again.classes == [0, 1, 0] and score.reason == "correct"


def test_length_penalty_and_settings_apply() -> None:
    reward = RewardConfig(
        length_margin_tokens=40,
        accept_missing_unit=False,
        tasks={"short": TaskConfig(format_check="none", compare="exact")},
    )
    verifier = VerifierConfig(answers=WorkerPoolConfig(workers=2))
    samples = [
        Sample(text=boxed("7"), answer="7", tokens=80),
        Sample(text=boxed("5"), answer="5\\text{ cm}"),
        Sample(text="7", answer="7", task="short"),
    ]
    with Grading(reward, verifier, max_tokens=100) as grading:
        first, second, third = grading.score(samples)
    assert first.parts["length"] == -0.05
    assert not second.is_correct
    assert third.is_correct


def test_grading_of_a_configuration_has_its_length_tags_and_limits() -> None:
    sleep = "tests.verification.pool.hostile_tasks:sleep"
    config = Config.model_validate(
        {
            "sampling": {"max_new_tokens": 100},
            "reward": {
                "length_margin_tokens": 40,
                "tasks": {"slow": {"format_check": "none", "compare": sleep}},
            },
            "render": {"thinking": {"open": "[THINK]", "close": "[/THINK]"}},
            "verifier": {"custom": {"timeout_s": 0.5}},
        }
    )
    samples = [
        Sample(text="[THINK]So.[/THINK]\\boxed{7}", answer="7", tokens=80),
        Sample(text="7", answer="7", task="slow", entry="600"),
    ]
    with Grading.of(config) as grading:
        first, second = grading.score(samples)
    assert first.is_correct and first.parts["length"] == -0.05
    assert isinstance(second, ScoreFailed) and "timeout_s=0.5" in second.reason
