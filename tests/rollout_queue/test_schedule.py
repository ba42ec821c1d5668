"""When stages begin, against cases worked out by hand."""

from typing import Any

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.protocol.types import RankBatch
from megatron_rl.rollout_queue.schedule import Schedule, has_plateaued, length_rule

PLATEAU = {"metric": "rollout/correct", "window": 2, "min_gain": 0.1}


def schedule(*stages: dict[str, Any], steps: int = 20) -> Schedule:
    train = {"steps": steps, "prompts_per_batch": 4}
    return Schedule(Config.model_validate({"train": train, "stages": stages}))


def note(found: Schedule, step: int, value: float, untaken: int = 0) -> None:
    found.note_batch(RankBatch(step, 0, [], {"rollout/correct": (value * 8, 8, "mean")}), untaken)


@pytest.mark.parametrize(
    ("values", "is_plateau"),
    [
        ([0.1, 0.2, 0.3], False),  # two windows take four values
        ([0.1, 0.3, 0.2, 0.4], False),  # 0.3 - 0.2 is the gain asked for
        ([0.1, 0.3, 0.2, 0.38], True),  # 0.29 - 0.2
        ([0.0, 0.0, 0.5, 0.5, 0.6, 0.4], True),  # 0.5 - 0.5; what was before does not count
        ([0.9, 0.9, 0.1, 0.1], True),  # a loss is no gain
    ],
)
def test_a_plateau_is_a_gain_between_windows_that_is_too_small(
    values: list[float], is_plateau: bool
) -> None:
    assert has_plateaued(values, window=2, min_gain=0.1 - 1e-12) is is_plateau


def test_stages_begin_with_their_batches() -> None:
    found = schedule({"at_step": 3}, {"at_step": 5, "sampling": {"max_new_tokens": 9}})
    assert [found.stage_at(step) for step in range(7)] == [0, 0, 0, 1, 1, 2, 2]
    assert [found.end_step(stage) for stage in range(3)] == [3, 5, 20]
    assert (list(found.open_stages(3)), found.open_stages(3)[0]) == ([1, 2], 1)
    assert [stage.sampling.max_new_tokens for stage in found.stages] == [1024, 1024, 9]
    assert length_rule(found.stages[2]).max_tokens == 9


def test_a_stage_follows_a_plateau_once_its_open_groups_fill_their_batches() -> None:
    found = schedule({"plateau": PLATEAU}, {"at_step": 8})
    for step, value in enumerate([0.2, 0.2, 0.4, 0.4]):
        note(found, step, value, untaken=9)
    assert found.first_step(1) is None and found.end_step(0) == 20
    note(found, 4, 0.6)
    # 0.45 - 0.4 is below 0.1; 9 open groups fill three batches of 4: those of steps 6, 7 and 8.
    note(found, 5, 0.3, untaken=9)
    assert [found.first_step(stage) for stage in range(3)] == [0, 9, 10]
    assert found.stage_at(8) == 0 and found.stage_at(9) == 1 and found.stage_at(10) == 2


def test_a_plateau_with_nothing_open_begins_the_stage_at_once() -> None:
    found = schedule({"plateau": PLATEAU}, {"plateau": PLATEAU})
    for step in range(4):
        note(found, step, 0.5)
    assert found.first_step(1) == 4
    # The next window is of the new stage alone.
    for step in range(4, 7):
        note(found, step, 0.5)
        assert found.first_step(2) is None
    note(found, 7, 0.5)
    assert found.first_step(2) == 8
    note(found, 8, 0.5)


def test_batches_without_a_sample_do_not_count() -> None:
    found = schedule({"plateau": PLATEAU})
    for step in range(9):
        found.note_batch(RankBatch(step, 0, [], {"rollout/correct": (0.0, 0, "mean")}), 0)
    assert found.first_step(1) is None


def test_a_restored_schedule_goes_on_with_its_values_and_decisions() -> None:
    one = schedule({"plateau": PLATEAU}, {"at_step": 15})
    for step in range(3):
        note(one, step, 0.5, untaken=5)
    two = schedule({"plateau": PLATEAU}, {"at_step": 15})
    two.restore(one.state(), 3)
    for found in (one, two):
        note(found, 3, 0.5, untaken=5)
        assert [found.first_step(stage) for stage in range(3)] == [0, 6, 15]
    # The batch of step 4 is still of stage 0, but what is decided stays so.
    three = schedule({"plateau": PLATEAU}, {"at_step": 15})
    three.restore(two.state(), 4)
    assert three.state() == two.state() and three.stage_at(4) == 0
    # A stage that has not begun follows the configuration that is given now.
    later = schedule({"plateau": PLATEAU}, {"at_step": 17})
    later.restore(two.state(), 7)
    assert later.state().first_steps == [0, 6, 17] and later.stage_at(7) == 1


def test_a_plateau_of_a_changed_configuration_is_judged_by_its_own_metric() -> None:
    flat = {"plateau": PLATEAU}
    # The saved run would have begun stage 1 at step 15 whatever was measured.
    found = schedule(flat)
    found.restore(schedule({"at_step": 15}).state(), 2)
    assert found.first_step(1) is None
    for step in range(2, 6):
        note(found, step, 0.5)
    assert found.first_step(1) == 6
    # Neither values nor the decision of another metric's plateau count: 0.1 a batch is a gain.
    other = {"plateau": PLATEAU | {"metric": "rollout/reward"}}
    for batches, begins in ((3, None), (4, 6)):
        saved = schedule(other)
        for step in range(batches):
            rewards = {"rollout/reward": (8 * 0.9, 8, "mean")}
            saved.note_batch(RankBatch(step, 0, [], rewards), untaken=5)
        assert saved.first_step(1) == begins
        found = schedule(flat)
        found.restore(saved.state(), batches)
        for step in range(batches, batches + 6):
            note(found, step, step / 10)
        assert found.first_step(1) is None
        # A plateau of the same metric keeps both.
        same = schedule(other)
        same.restore(saved.state(), batches)
        assert same.state() == saved.state()


def test_a_run_in_a_stage_that_the_configuration_lacks_is_refused() -> None:
    state = schedule({"at_step": 3}, {"at_step": 5}).state()
    with pytest.raises(InputError, match="was in stage 2, but .* only 1 .*stages"):
        schedule({"at_step": 3}).restore(state, 6)
    schedule({"at_step": 3}).restore(state, 4)
