import random

import pytest

from megatron_rl.rollout_queue.admission import (
    LeaseRules,
    UntrainedGroup,
    choose_batch,
    is_group_needed,
    may_open_group,
)  # fmt: skip


def test_groups_open_up_to_max_staleness_plus_one_batches() -> None:
    assert may_open_group(11, max_staleness=2, prompts_per_batch=4)
    assert not may_open_group(12, max_staleness=2, prompts_per_batch=4)


def test_no_more_groups_open_than_the_rest_of_the_run_needs() -> None:
    assert is_group_needed(7, next_step=8, steps=10, prompts_per_batch=4)
    assert not is_group_needed(8, next_step=8, steps=10, prompts_per_batch=4)
    assert not is_group_needed(0, next_step=10, steps=10, prompts_per_batch=4)


def test_lagging_generator_gets_no_leases() -> None:
    assert LeaseRules(5, 2, is_strict=False).oldest_version(is_evaluation=False) == 3
    assert LeaseRules(5, 2, is_strict=True).oldest_version(is_evaluation=False) == 5
    assert LeaseRules(1, 2, is_strict=False).oldest_version(is_evaluation=False) == 0


def test_an_evaluation_measures_the_synced_version_or_that_of_its_evaluators() -> None:
    assert LeaseRules(5, 2, is_strict=False).oldest_version(is_evaluation=True) == 5
    lagging = LeaseRules(5, 2, is_strict=False, evaluators=frozenset({"g"}), evaluated=3)
    assert lagging.oldest_version(is_evaluation=True) == 3


def test_oldest_complete_groups_are_trained_first() -> None:
    groups = [
        UntrainedGroup(1, 9, True), UntrainedGroup(0, 3, True), UntrainedGroup(0, 2, False),
        UntrainedGroup(1, 4, True),
    ]  # fmt: skip
    chosen = choose_batch(groups, step=1, prompts_per_batch=2, max_staleness=2, is_strict=False)
    assert chosen == [3, 4]


def test_strict_batch_waits_for_a_group_that_is_due() -> None:
    groups = [UntrainedGroup(0, 0, False), UntrainedGroup(2, 1, True)]
    batch = {"step": 2, "prompts_per_batch": 1, "max_staleness": 2}
    assert choose_batch(groups, **batch, is_strict=True) is None
    assert choose_batch(groups, **batch, is_strict=False) == [1]


def test_strict_batch_waits_when_later_batches_could_not_hold_the_slow_groups() -> None:
    # Four slow groups are due by batch 2; batch 1 of two newer groups leaves one batch for them.
    slow = [UntrainedGroup(0, n, False) for n in range(4)]
    fast = [UntrainedGroup(1, n, True) for n in (4, 5)]
    batch = {"step": 1, "prompts_per_batch": 2, "max_staleness": 2, "is_strict": True}
    assert choose_batch(slow + fast, **batch) is None
    # With one of them complete it would be taken first; still three are left for two places.
    assert choose_batch([UntrainedGroup(0, 0, True), *slow[1:], *fast], **batch) is None
    two_done = [UntrainedGroup(0, 0, True), UntrainedGroup(0, 1, True), *slow[2:], *fast]
    assert choose_batch(two_done, **batch) == [0, 1]


def simulate(seed: int, *, is_strict: bool) -> tuple[int, int]:
    """(largest staleness - max_staleness, batches trained) of a run with random durations."""
    chance = random.Random(seed)
    staleness, per_batch = chance.randint(0, 3), chance.randint(1, 5)
    steps, slow_share, zero_variance_share = (
        30,
        chance.choice([0.0, 0.2, 0.5]),
        chance.choice([0.0, 0.4]),
    )
    synced, formed, number, excess = 0, 0, 0, -staleness
    untaken: dict[int, UntrainedGroup] = {}
    in_training: list[UntrainedGroup] = []
    for _ in range(200_000):
        event = chance.random()
        if event < 0.4:
            untrained = len(untaken) + len(in_training)
            if may_open_group(untrained, max_staleness=staleness, prompts_per_batch=per_batch):
                untaken[number] = UntrainedGroup(synced, number, False)
                number += 1
        elif event < 0.8:
            running = [g for g in untaken.values() if not g.is_complete]
            if running:
                # Mostly one of the newest: slow groups stay behind.
                group = running[-1] if chance.random() > slow_share else chance.choice(running)
                if chance.random() < zero_variance_share:
                    del untaken[group.number]
                else:
                    untaken[group.number] = group._replace(is_complete=True)
        elif in_training:
            in_training, synced = [], synced + 1
        elif formed == synced:
            chosen = choose_batch(
                untaken.values(),
                step=formed,
                prompts_per_batch=per_batch,
                max_staleness=staleness,
                is_strict=is_strict,
            )
            if chosen is not None:
                in_training = [untaken.pop(n) for n in chosen]
                oldest = min(group.opened_version for group in in_training)
                excess = max(excess, formed - oldest - staleness)
                formed += 1
                if formed == steps:
                    break
    return excess, formed


def test_strict_staleness_never_exceeds_its_bound_and_never_blocks() -> None:
    for seed in range(150):
        excess, formed = simulate(seed, is_strict=True)
        assert excess <= 0, f"seed {seed}"
        assert formed == 30, f"seed {seed}"


def test_the_simulation_finds_stale_groups_when_not_strict() -> None:
    assert max(simulate(seed, is_strict=False)[0] for seed in range(150)) > 0


@pytest.mark.parametrize("synced", [0, 3])
def test_synchronous_mode_opens_nothing_while_a_batch_is_in_training(synced: int) -> None:
    assert not may_open_group(4, max_staleness=0, prompts_per_batch=4)
    assert LeaseRules(synced, 0, is_strict=False).oldest_version(is_evaluation=False) == synced
