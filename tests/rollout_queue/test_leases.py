import dataclasses

import msgspec
import pytest

from megatron_rl.config.tree import QueueConfig
from megatron_rl.protocol.generator_messages import PROMPT_UNRENDERABLE
from megatron_rl.protocol.types import Cancel, GeneratorReady, RolloutFailed, Sampling
from megatron_rl.protocol.wire import WireError
from megatron_rl.rollout_queue.admission import LeaseRules
from megatron_rl.rollout_queue.drop_reasons import ATTEMPTS_EXHAUSTED
from megatron_rl.rollout_queue.faults import FaultyRollout
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.rollout_queue.leases import Leases
from tests.rollout_queue.makers import make_prompt, make_rollout

CONFIG = QueueConfig(heartbeat_timeout_s=10, lease_timeout_s=40, max_attempts=2)


def new_group(size: int = 4, number: int = 0) -> Group:
    return Group(number, make_prompt(f"p{number}"), Sampling(8, 1.0), size, 0)


def leases_with(*generators: str, capacity: int = 8, version: int = 0) -> Leases:
    leases = Leases(CONFIG)
    for name in generators:
        leases.announce(name, GeneratorReady(capacity, version, session=1), now=0.0)
    return leases


def rules(synced: int = 0) -> LeaseRules:
    return LeaseRules(synced, max_staleness=0, is_strict=False)


def has_room(leases: Leases, version: int) -> bool:
    """For a training completion, in a generator of that version or a later one."""
    return leases.can_take(rules(version), is_evaluation=False)


def issue(
    leases: Leases, *fresh: Group, now: float = 0.0, synced: int = 0
) -> tuple[str, int, list[int]] | None:
    """(generator, lease, indices); `fresh`: groups that may be opened."""
    waiting = list(fresh)
    open_group = lambda: waiting.pop(0) if waiting else None  # noqa: E731
    issued = leases.issue(rules(synced), open_group, now)
    return (issued[0], issued[1].lease_id, issued[1].indices) if issued else None


def issue_group(leases: Leases, group: Group, now: float = 0.0) -> tuple[str, int, list[int]]:
    issued = issue(leases, group, now=now)
    assert issued is not None
    return issued


def give_back(leases: Leases, name: str, lease_id: int, *indices: int) -> None:
    for index in indices:
        assert leases.take_rollout(name, make_rollout(index, lease_id=lease_id), 1.0) is not None


def test_capacity_counts_what_is_leased_and_not_returned() -> None:
    leases, group = leases_with("g"), new_group(8)
    _, lease_id, indices = issue_group(leases, group)
    assert indices == list(range(8)) and not has_room(leases, 0)
    assert leases.take_rollout("g", make_rollout(5, lease_id=lease_id), 1.0) is group
    assert has_room(leases, 0) and leases.outstanding == 7


def test_group_goes_whole_to_the_generator_with_most_room() -> None:
    leases = leases_with("a", "b")
    assert [issue_group(leases, new_group(number=n))[0] for n in range(4)] in (
        ["a", "b", "a", "b"], ["a", "b", "b", "a"],
    )  # fmt: skip
    assert not has_room(leases, 0)


def test_group_larger_than_any_generator_is_leased_one_by_one_as_slots_come_free() -> None:
    leases, group = leases_with("g", capacity=3), new_group(5)
    _, first, indices = issue_group(leases, group)
    assert indices == [0, 1, 2] and issue(leases) is None and leases.waiting == 2
    give_back(leases, "g", first, 1)
    issued = issue(leases)
    assert issued is not None and issued[2] == [3]
    give_back(leases, "g", first, 0, 2)
    # What can be leased at one moment to one generator is one lease.
    issued = issue(leases, new_group(5, number=1))
    assert issued is not None and issued[2] == [4]
    issued = issue(leases, new_group(5, number=1))
    assert issued is not None and issued[2] == [0]


def test_lease_carries_no_tests_of_programs() -> None:
    leases = leases_with("g")
    prompt = msgspec.structs.replace(make_prompt(task="code"), entry="[many tests]")
    issued = leases.issue(rules(), lambda: Group(0, prompt, Sampling(8, 1.0), 4, 0), 0.0)
    assert issued is not None and issued[1].prompt == msgspec.structs.replace(prompt, entry="")


def two_full_generators() -> tuple[Leases, dict[str, int]]:
    """Group 0 is at home at a, group 1 at b; both have one completion without a slot."""
    leases = leases_with("a", "b", capacity=3)
    held = {}
    for number in range(2):
        name, lease_id, indices = issue_group(leases, new_group(number=number))
        assert indices == [0, 1, 2]
        held[name] = lease_id
    assert list(held) == ["a", "b"] and leases.waiting == 2
    return leases, held


def test_free_slot_takes_what_remains_of_its_own_group_then_a_new_one_then_any() -> None:
    leases, held = two_full_generators()
    give_back(leases, "b", held["b"], 0, 1, 2)
    name, _, indices = issue_group(leases, new_group(number=2))
    assert (name, indices) == ("b", [3])  # of group 1, although group 0 is older
    name, _, indices = issue_group(leases, new_group(2, number=2))
    assert (name, indices) == ("b", [0, 1])  # a new group rather than to divide group 0
    give_back(leases, "b", 3, 0)
    issued = issue(leases)
    assert issued is not None and (issued[0], issued[2]) == ("b", [3])  # group 0: nothing is new
    assert leases.waiting == 0


@pytest.mark.parametrize("versions", [(1, 1), (0, 1)])
def test_what_remains_of_a_group_of_an_older_version_goes_to_any_free_slot(
    versions: tuple[int, int],
) -> None:
    leases, held = two_full_generators()
    for name, version in zip("ab", versions, strict=True):
        leases.announce(name, GeneratorReady(3, version, session=1), now=0.0)
    give_back(leases, "b", held["b"], 0, 1)
    order = []
    while (issued := leases.issue(rules(1), lambda: None, 0.0)) is not None:
        order.append((issued[0], issued[1].prompt.id))
    # Group 0, the oldest, does not wait for its home.
    assert order == [("b", "p0"), ("b", "p1")]


def test_what_remains_of_an_evaluation_comes_first() -> None:
    leases = leases_with("g", capacity=3)
    _, lease_id, _ = issue_group(leases, new_group(number=0))
    leases.add(dataclasses.replace(new_group(number=1), evaluation="before"))
    give_back(leases, "g", lease_id, 0)
    assert issue_group(leases, new_group(number=2))[2] == [0]
    assert leases.waiting == 1 + 3


def test_generator_of_an_older_version_gets_nothing() -> None:
    leases = leases_with("g", version=2)
    assert has_room(leases, 2) and not has_room(leases, 3)
    assert issue(leases, new_group(), synced=3) is None


def test_restarted_generator_loses_its_leases_to_another_try() -> None:
    leases, group = leases_with("g"), new_group()
    _, lease_id, _ = issue_group(leases, group)
    leases.take_rollout("g", make_rollout(2, lease_id=lease_id), 1.0)
    leases.announce("g", GeneratorReady(8, 0, session=2), 2.0)
    issued = issue(leases, now=2.0)
    assert issued is not None and issued[2] == [0, 1, 3]
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
    assert leases.waiting == 0
    leases.announce(other, GeneratorReady(8, 0, session=1), 18.0)
    leases.expire(20.0)
    assert leases.generators == [other]
    issued = issue(leases, now=20.0)
    assert issued is not None and issued[0] == other and issued[2] == [0, 1, 2, 3]


def test_a_generator_without_weights_for_long_gives_its_leases_to_another() -> None:
    leases = leases_with("a", "b")
    holder, lease_id, _ = issue_group(leases, new_group())
    other = "b" if holder == "a" else "a"
    leases.fence_grace_s = 15.0

    def look(now: float, version: int) -> int:
        leases.announce(holder, GeneratorReady(8, version, session=1), now)
        leases.announce(other, GeneratorReady(8, 0, session=1), now)
        leases.expire(now)
        return leases.waiting

    # A weight sync that serves it in time ends the fence: 13 s, and from 14 s on another one.
    assert [look(now, -1) for now in (1.0, 9.0, 13.0)] == [0, 0, 0] and look(13.5, 0) == 0
    assert [look(now, -1) for now in (14.0, 22.0, 29.0)] == [0, 0, 0]
    assert look(29.5, -1) == 4
    assert leases.pop_cancels() == [(holder, Cancel(lease_id))]
    issued = issue(leases, now=29.5)
    assert issued is not None and (issued[0], issued[2]) == (other, [0, 1, 2, 3])
    assert leases.pop_failures() == []


def test_lease_that_returns_nothing_for_long_is_issued_again() -> None:
    leases, group = leases_with("g"), new_group()
    _, lease_id, _ = issue_group(leases, group)
    leases.take_rollout("g", make_rollout(0, lease_id=lease_id), 30.0)
    leases.announce("g", GeneratorReady(8, 0, session=1), 69.0)
    leases.expire(69.0)
    assert leases.waiting == 0
    leases.announce("g", GeneratorReady(8, 0, session=1), 71.0)
    leases.expire(71.0)
    assert leases.waiting == 3 and has_room(leases, 0)


def test_failed_and_faulty_completions_are_tried_again_up_to_the_limit() -> None:
    leases, group = leases_with("g"), new_group(2)
    _, lease_id, _ = issue_group(leases, group)
    leases.take_failure("g", RolloutFailed(lease_id, 0, "engine error"), 1.0)
    issued = issue(leases, now=1.0)
    assert issued is not None and issued[2] == [0] and leases.pop_failures() == []
    faulty = make_rollout(0, lease_id=issued[1], tokens=0)
    with pytest.raises(FaultyRollout, match=f"completion 0 of lease {issued[1]} has 2 prompt tok"):
        leases.take_rollout("g", faulty, 2.0)
    [failure] = leases.pop_failures()
    assert failure.group is group and failure.reason == ATTEMPTS_EXHAUSTED
    assert "completions [0] were tried 2 times" in failure.detail
    assert "0 completion tokens" in failure.detail
    # Nobody waits for the other completion of the group any more.
    assert leases.pop_cancels() == [("g", Cancel(lease_id))]
    assert leases.outstanding == 0 and leases.pop_failures() == []
    give_back_late = make_rollout(1, lease_id=lease_id)
    assert leases.take_rollout("g", give_back_late, 3.0) is None and leases.late_rollouts == 1
    assert issue(leases, new_group(8, number=1)) == ("g", 2, list(range(8)))


def test_another_generator_tries_what_one_failed() -> None:
    leases = leases_with("a", "b")
    name, lease_id, _ = issue_group(leases, new_group(2))
    leases.take_failure(name, RolloutFailed(lease_id, 1, "engine error"), 1.0)
    # The one that failed has as much room again; were it broken, it would always have the most.
    leases.take_failure(name, RolloutFailed(lease_id, 0, "engine error"), 1.0)
    issued = issue(leases)
    assert issued is not None and issued[0] != name and issued[2] == [0, 1]


def test_failure_that_must_repeat_itself_drops_the_group_at_once() -> None:
    leases, group = leases_with("g"), new_group()
    _, lease_id, _ = issue_group(leases, group)
    for index in range(4):
        failure = RolloutFailed(lease_id, index, "9 tokens", drop_as=PROMPT_UNRENDERABLE)
        leases.take_failure("g", failure, 1.0)
    [failed] = leases.pop_failures()
    assert (failed.reason, failed.detail) == ("prompt_unrenderable", "9 tokens")
    assert leases.outstanding == 0 and issue(leases) is None


def test_a_reason_to_drop_that_is_not_in_the_table_is_refused() -> None:
    leases, group = leases_with("g"), new_group()
    _, lease_id, _ = issue_group(leases, group)
    with pytest.raises(WireError, match="dropped as 'bored'; allowed are .*'prompt_unrenderable'"):
        leases.take_failure("g", RolloutFailed(lease_id, 0, "no", drop_as="bored"), 1.0)
    assert leases.pop_failures() == [] and not group.is_abandoned


def test_expired_lease_is_cancelled_in_its_engine() -> None:
    leases, group = leases_with("a"), new_group()
    _, lease_id, _ = issue_group(leases, group)
    leases.announce("a", GeneratorReady(8, 0, session=1), 41.0)
    leases.expire(41.0)
    assert leases.pop_cancels() == [("a", Cancel(lease_id))] and leases.pop_cancels() == []
    assert leases.waiting == 4 and has_room(leases, 0)


def test_silent_generator_is_told_to_stop_should_it_come_back() -> None:
    leases, group = leases_with("a"), new_group()
    _, lease_id, _ = issue_group(leases, group)
    leases.expire(11.0)
    assert leases.pop_cancels() == [("a", Cancel(lease_id))]


@pytest.mark.parametrize("how", ["restart", "silence", "timeout", "unreachable"])
def test_leases_of_one_group_that_are_lost_together_fail_it_once(how: str) -> None:
    limits = {"max_attempts": 1, "max_lost_attempts": 1}
    leases = Leases(CONFIG.model_copy(update=limits))
    leases.announce("g", GeneratorReady(2, 0, session=1), 0.0)
    group = new_group(3)
    _, lease_id, indices = issue_group(leases, group)
    assert indices == [0, 1]
    give_back(leases, "g", lease_id, 0)
    second = issue(leases)
    assert second is not None and second[1:] == (lease_id + 1, [2])
    if how == "restart":
        leases.announce("g", GeneratorReady(2, 0, session=2), 2.0)
    elif how == "unreachable":
        leases.drop_generator("g")
    else:
        if how == "timeout":
            leases.announce("g", GeneratorReady(2, 0, session=1), 50.0)
        leases.expire(50.0)
    [failure] = leases.pop_failures()
    reason = "attempts_exhausted" if how == "timeout" else "losses_exhausted"
    assert (failure.group, failure.reason) == (group, reason)
    assert leases.outstanding == 0
    leases.announce("g", GeneratorReady(2, 0, session=2), 51.0)
    assert issue(leases, new_group(number=1), now=51.0) is not None


def test_group_finds_a_new_home_where_its_first_one_failed_it() -> None:
    leases = leases_with("a", "b", "c", capacity=4)
    name, lease_id, _ = issue_group(leases, new_group(4))
    for index in (0, 1):
        leases.take_failure(name, RolloutFailed(lease_id, index, "engine error"), 1.0)
    issued = issue(leases)
    assert issued is not None and issued[0] != name and issued[2] == [0, 1]
    leases.take_failure(name, RolloutFailed(lease_id, 2, "engine error"), 1.0)
    # Not to the third generator, although that has more room.
    again = issue(leases)
    assert again is not None and (again[0], again[2]) == (issued[0], [2])


@pytest.mark.parametrize("is_last", [False, True])
def test_replacement_of_a_completion_is_leased_with_all_its_attempts(is_last: bool) -> None:
    leases, group = leases_with("g"), new_group(3)
    _, lease_id, _ = issue_group(leases, group)
    leases.take_failure("g", RolloutFailed(lease_id, 1, "engine error"), 1.0)
    _, again, indices = issue(leases)
    assert indices == [1]
    give_back(leases, "g", again, 1)
    if is_last:
        give_back(leases, "g", lease_id, 0, 2)
    leases.replace(group, 1)
    name, replacing, indices = issue(leases)
    assert indices == [1] and leases.outstanding == (1 if is_last else 3)
    # The completion that came back and could not be graded is no second one of this.
    assert leases.take_rollout("g", make_rollout(1, lease_id=again), 1.0) is None
    leases.take_failure("g", RolloutFailed(replacing, 1, "engine error"), 1.0)
    assert leases.pop_failures() == []
    _, replacing, _ = issue(leases)
    give_back(leases, "g", replacing, 1)
    if not is_last:
        give_back(leases, "g", lease_id, 0, 2)
    assert leases.outstanding == 0 and issue(leases) is None
