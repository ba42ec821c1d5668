"""Which model of a cold start is chosen, and how that is told; numbers worked out by hand."""

from typing import Any

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.observe.choice import (
    CHOSEN,
    SET,
    Candidate,
    candidates_of,
    choice_lines,
    choose,
    difference_of,
    ranked,
    summarize_choice,
)


def row(label: str, accuracy: float, se: float = 0.03) -> dict[str, Any]:
    return {"source": "queue", "step": 0, "label": label, "eval/accuracy": accuracy,
            "eval/accuracy_se": se, "eval/n": 64}  # fmt: skip


ROWS = [
    row("cold_start_step_30", 0.5, 0.04),
    row("cold_start_step_10", 0.2, 0.06),
    # Interrupted, and made again: the later one counts.
    row("cold_start_step_20", 0.9),
    row("cold_start_step_20", 0.5, 0.03),
    row("cold_start_step_10.few", 0.75),
    row("cold_start_step_20.few", 0.25),
    row("cold_start_step_30.few", 0.5),
    row("before", 0.99),
    row("cold_start_step_x", 0.99),
]


def test_the_most_accurate_is_chosen_and_of_equal_ones_that_of_fewer_steps() -> None:
    assert list(candidates_of(ROWS, "")) == [10, 20, 30]
    assert choose(ROWS, [10, 20, 30], "") == Candidate(20, 0.5, 0.03, 64)
    assert choose(ROWS, [10, 30], "").step == 30
    assert choose(ROWS, [10, 20, 30], "few").step == 10
    assert [one.step for one in ranked(candidates_of(ROWS, "few").values())] == [10, 30, 20]


def test_what_was_not_measured_is_no_choice() -> None:
    with pytest.raises(InputError, match="cold_start_step_40 on held-out prompts"):
        choose(ROWS, [10, 20, 40], "")
    with pytest.raises(InputError, match="cold_start_step_10 on the set 'many'"):
        choose(ROWS, [10], "many")


def test_the_choice_is_told_in_standard_errors() -> None:
    assert summarize_choice(ROWS) is None and choice_lines(None) == []
    made = {"source": "launch", "step": 0, CHOSEN: 10, SET: "few"}
    choice = summarize_choice([*ROWS, made])
    assert choice is not None
    assert (choice["chosen_step"], choice["next_best_step"]) == (10, 30)
    assert choice["candidates"]["20"] == {"accuracy": 0.25, "se": 0.03, "n": 64}
    assert choice["ahead_of_next_best"] == pytest.approx(0.25)
    # hypot(0.03, 0.03) = 0.0424264
    assert choice["ahead_of_next_best_standard_errors"] == pytest.approx(0.25 / 0.0424264, rel=1e-6)
    assert choice_lines(choice) == [
        "Cold start          on few: step 10: 0.750 +- 0.030, step 20: 0.250 +- 0.030, "
        "step 30: 0.500 +- 0.030",
        "  chosen            step 10, +0.250 to step 30, +5.9 combined standard errors",
    ]
    assert difference_of((0.25, 0.03), (0.5, None)) == (0.25, None)
    equal = summarize_choice([*ROWS, made | {CHOSEN: 20, SET: ""}])
    assert choice_lines(equal)[1] == (
        "  chosen            step 20, +0.000 to step 30, +0.0 combined standard errors: too "
        "little to tell from chance"
    )
