import pytest

from megatron_rl.evaluation.breakdown import OF_QUESTION, set_report
from megatron_rl.evaluation.samples import of_records
from megatron_rl.protocol.rollout_files import RolloutRecord
from tests.evaluation.makers import make_problem


def test_figures_of_each_task_and_language_are_over_its_problems() -> None:
    report = set_report([
        make_problem([1, 1], name="a", task="math"),
        make_problem([1, 0], name="b", task="math", language="fr"),
        make_problem([0, 0], name="c", task="code"),
    ])  # fmt: skip
    assert report["problems"] == 3 and report["completions"] == 6 and report["samples"] == 2
    assert report["accuracy"]["value"] == pytest.approx(0.5)
    math_ = report["by_task"]["math"]
    assert math_["accuracy"] == pytest.approx(
        # Deviations of 1/4 each: variance 2/16 / (2 - 1), over 2 problems.
        {"value": 0.75, "se": 0.25, "problems": 2}
    )
    assert math_["pass_at"]["2"]["value"] == 1.0
    assert report["by_task"]["code"]["accuracy"]["value"] == 0.0
    assert list(report["by_language"]) == ["fr", OF_QUESTION]
    assert report["by_language"]["fr"]["accuracy"]["value"] == 0.5
    assert report["maj_at"] == {} and report["without_classes"] == 3


def test_completions_fall_into_quarters_by_length() -> None:
    report = set_report([
        make_problem([1, 1, 0, 0], name="a", tokens=[1, 2, 7, 8]),
        make_problem([1, 1, 1, 0], name="b", tokens=[3, 4, 5, 6]),
    ])  # fmt: skip
    bins = report["by_length"]
    spans = [(b["tokens_from"], b["tokens_to"], b["completions"]) for b in bins]
    assert spans == [(1, 2, 2), (3, 4, 2), (5, 6, 2), (7, 8, 2)]
    assert [b["accuracy"]["value"] for b in bins] == [1.0, 1.0, 0.5, 0.0]
    # Both of the third quarter are of one problem, which has no spread over problems.
    assert bins[2]["accuracy"]["se"] is None and bins[2]["accuracy"]["problems"] == 1
    # Shares 1/2 and 3/4.
    assert report["accuracy"]["se"] == pytest.approx(0.125)


def test_equal_lengths_stay_together() -> None:
    bins = set_report([make_problem([1, 0, 1, 0])])["by_length"]
    assert [(b["tokens_from"], b["completions"]) for b in bins] == [(3, 4)]


def test_completions_that_were_cut_are_told_apart() -> None:
    report = set_report([make_problem([1, 1, 0, 0], is_cut=[0, 0, 0, 1])])
    assert report["truncated"]["value"] == 0.25
    assert report["by_truncation"]["finished"]["completions"] == 3
    assert report["by_truncation"]["finished"]["accuracy"]["value"] == pytest.approx(2 / 3)
    assert report["by_truncation"]["cut"]["accuracy"]["value"] == 0.0
    assert "cut" not in set_report([make_problem([1])])["by_truncation"]


def record(
    prompt: str, index: int, *, reward: float | None = 1.0, reason: str = "correct",
    answer_class: int | None = None,
) -> RolloutRecord:  # fmt: skip
    return RolloutRecord(
        prompt_id=prompt, group=0, index=index, task="math", problem="q", language="", text="t",
        answer="1", reward=reward, parts={"format": 0.1} if reward else {}, reason=reason,
        tokens=5, versions=[0], finish_reason="length" if index else "stop", seed=0,
        prompt_tail="", answer_class=answer_class,
    )  # fmt: skip


def test_records_become_problems_without_what_was_not_graded() -> None:
    [first, second] = of_records([
        record("a", 1, reward=0.0, reason="no_boxed", answer_class=-1),
        record("a", 2, reward=None, reason="ungradable"),
        record("a", 0, answer_class=0),
        record("b", 0),
        record("c", 0, reward=None, reason="ungradable"),
    ])  # fmt: skip
    assert first.is_correct.tolist() == [True, False] and first.classes.tolist() == [0, -1]
    assert first.is_well_formed.tolist() == [True, False] and first.is_cut.tolist() == [False, True]
    assert (first.n, first.right, first.accuracy) == (2, 1, 0.5)
    assert second.prompt_id == "b" and second.classes is None
