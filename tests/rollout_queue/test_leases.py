import pytest

from megatron_rl.protocol.config import QueueConfig
from megatron_rl.protocol.types import GeneratorReady, RolloutFailed, Sampling
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.rollout_queue.leases import AttemptsExhausted, Leases
from tests.rollout_queue.makers import make_prompt, make_rollout

CONFIG = QueueConfig(heartbeat_timeout_s=10, lease_timeout_s=40, max_attempts=2)


def new_group(size: int = 4, number: int = 0) -> Group:
    return Group(number, make_prompt(), Sampling(8, 1.0), size, 0)


def leases_with(*generators: str, capacity: int = 8, version: int = 0) -> Leases:
    leases = Leases(CONFIG)
    for name in generators:
        leases.announce(name, GeneratorReady(capacity, version, session=1), now=0.0)
    return leases


def issue_group(leases: Leases, group: Group, now: float = 0.0) -> tuple[str, int, list[int]]:
    issued = leases.issue((group, list(range(group.size))), 0, now)
    assert issued is not None
    return issued[0], issued[1].lease_id, issued[1].indices


def test_capacity_counts_what_is_leased_and_not_returned() -> None:
    leases, group = leases_with("g"), new_group(6)
    _, lease_id, indices = issue_group(leases, group)
    assert indices == list(range(6)) and not leases.has_room(3, 0) and leases.has_room(2, 0)
    assert leases.take_rollout("g", make_rollout(5, lease_id=lease_id), 1.0) is group
    assert leases.has_room(3, 0) and leases.outstanding == 5


def test_group_goes_whole_to_the_generator_with_most_room() -> None:
    leases = leases_with("a", "b")
    assert [issue_group(leases, new_group(number=n))[0] for n in range(4)] in (
        ["a", "b", "a", "b"], ["a", "b", "b", "a"],
    )  # fmt: skip
    assert not leases.has_room(4, 0)


def test_group_larger_than_any_generator_is_leased_in_parts() -> None:
    leases, group = leases_with("g", capacity=3), new_group(4)
    _, first, indices = issue_group(leases, group)
    assert indices == [0, 1, 2] and leases.issue(None, 0, 0.0) is None
    leases.take_rollout("g", make_rollout(1, lease_id=first), 1.0)
    issued = leases.issue(None, 0, 1.0)
    assert issued is not None and issued[1].indices == [3]


def test_generator_of_an_older_version_gets_nothing() -> None:
    leases = leases_with("g", version=2)
    assert leases.has_room(1, 2) and not leases.has_room(1, 3)


def test_restarted_generator_loses_its_leases_to_another_try() -> None:
    leases, group = leases_with("g"), new_group()
    _, lease_id, _ = issue_group(leases, group)
    leases.take_rollout("g", make_rollout(2, lease_id=lease_id), 1.0)
    leases.announce("g", GeneratorReady(8, 0, session=2), 2.0)
    issued = leases.issue(None, 0, 2.0)
    assert issued is not None and issued[1].indices == [0, 1, 3]
    # What the earlier session still sent is late.
    assert leases.take_rollout("g", make_rollout(0, lease_id=lease_id), 3.0) is None
    assert leases.late_rollouts == 1


def test_silent_generator_loses_its_leases_and_heartbeats_prevent_it() -> None:
    leases, group = leases_with("a", "b"), new_group()
    holder, _, _ = issue_group(leases, group)
    other = "b" if holder == "a" else "a"
    for name in ("a", "b"):
        leases.announce(name, GeneratorReady(8, 0, session=1), 9.0)
    leases.expire(18.0)
    assert not leases.has_repeats
    leases.announce(other, GeneratorReady(8, 0, session=1), 18.0)
    leases.expire(20.0)
    assert leases.generators == [other]
    issued = leases.issue(None, 0, 20.0)
    assert issued is not None and issued[0] == other and issued[1].indices == [0, 1, 2, 3]


def test_lease_that_returns_nothing_for_long_is_issued_again() -> None:
    leases, group = leases_with("g"), new_group()
    _, lease_id, _ = issue_group(leases, group)
    leases.take_rollout("g", make_rollout(0, lease_id=lease_id), 30.0)
    leases.announce("g", GeneratorReady(8, 0, session=1), 69.0)
    leases.expire(69.0)
    assert not leases.has_repeats
    leases.announce("g", GeneratorReady(8, 0, session=1), 71.0)
    leases.expire(71.0)
    assert leases.has_repeats and leases.has_room(8, 0)


def test_failed_and_faulty_completions_are_tried_again_up_to_the_limit() -> None:
    leases, group = leases_with("g"), new_group(1)
    _, lease_id, _ = issue_group(leases, group)
    leases.take_failure("g", RolloutFailed(lease_id, 0, "engine error"), 1.0)
    issued = leases.issue(None, 0, 1.0)
    assert issued is not None
    faulty = make_rollout(0, lease_id=issued[1].lease_id, tokens=0)
    with pytest.raises(AttemptsExhausted, match="tried 2 times .* 0 completion tokens"):
        leases.take_rollout("g", faulty, 2.0)
