"""Ranks' events played against each other, by hand."""

import pytest

from megatron_rl.rehearsal.events import Event, Trace
from megatron_rl.rehearsal.match import find_faults

ALL, PAIR = "world [0,1,2]", "pair [0,1]"
GROUPS = {ALL: [0, 1, 2], PAIR: [0, 1]}


def trace(rank: int, *events: Event) -> Trace:
    groups = {name: ranks for name, ranks in GROUPS.items() if rank in ranks}
    return Trace(
        rank=rank, name=f"rank {rank}", groups=groups, events=list(events),
        stacks=[(f"a.py:{rank} f",)], reads=[], peak_bytes=0, peaks={}, peak_parts={}, host_bytes=0,
        copied_bytes={}, flops=0, kernels={}, microbatches=1, parameters=0, seconds=0.0,
    )  # fmt: skip


def reduced(group: str, size: int = 4, dtype: str = "float32") -> Event:
    return Event(kind="all_reduce", group=group, bytes=size, dtype=dtype)


def sent(peer: int, size: int = 4, batch: int = 0, *, group: str = ALL, waited: int = 0) -> Event:
    return pair("send", peer, size, batch, group=group, waited=waited)


def received(
    peer: int, size: int = 4, batch: int = 0, *, group: str = ALL, waited: int = 0
) -> Event:
    return pair("recv", peer, size, batch, group=group, waited=waited)


def pair(kind: str, peer: int, size: int, batch: int, *, group: str, waited: int) -> Event:
    return Event(kind=kind, group=group, bytes=size, dtype="float32", peer=peer, batch=batch,
                 waited=waited)  # fmt: skip


def test_the_same_collectives_in_the_same_order_end() -> None:
    both = (reduced(PAIR), reduced(ALL))
    assert find_faults([trace(0, *both), trace(1, *both), trace(2, reduced(ALL))]) == []


def test_another_size_or_dtype_is_named_once_and_the_rest_still_compared() -> None:
    first = trace(0, reduced(PAIR, 4), reduced(PAIR, dtype="bfloat16"))
    [size, dtype] = find_faults([first, trace(1, reduced(PAIR, 8), reduced(PAIR))])
    assert "all_reduce of 4 bytes of float32, all_reduce of 8 bytes of float32" in size
    assert "bfloat16" in dtype


def test_two_groups_in_another_order_are_a_deadlock() -> None:
    [found] = find_faults([
        trace(0, reduced(PAIR), reduced(ALL)), trace(1, reduced(ALL), reduced(PAIR)),
        trace(2, reduced(ALL)),
    ])  # fmt: skip
    assert found.startswith("deadlock: rank ") and PAIR in found and ALL in found
    assert "a.py:0 f" in found and "a.py:1 f" in found


def test_a_rank_that_ends_early_is_awaited() -> None:
    [found] = find_faults([trace(0, reduced(PAIR)), trace(1)])
    assert "rank 0 waits" in found and "rank 1, which has ended its step" in found


def test_a_batch_ends_when_all_of_it_has_a_counterpart() -> None:
    around = [
        trace(rank, sent((rank + 1) % 3, batch=1), received((rank - 1) % 3, batch=1))
        for rank in range(3)
    ]
    assert find_faults(around) == []


def test_receives_of_their_own_before_sends_wait_for_each_other() -> None:
    [found] = find_faults([trace(0, received(1), sent(1)), trace(1, received(0), sent(0))])
    assert found.startswith("deadlock: rank ")


def test_sends_are_taken_in_their_order_and_their_sizes_compared() -> None:
    one = trace(0, sent(1, 4), sent(1, 8))
    assert find_faults([one, trace(1, received(0, 4), received(0, 8))]) == []
    assert len(find_faults([one, trace(1, received(0, 8), received(0, 4))])) == 2


def test_ranks_that_were_not_rehearsed_are_taken_to_do_their_part() -> None:
    assert find_faults([trace(0, reduced(ALL), sent(2), received(2))]) == []


def test_a_batch_is_one_kernel_so_its_sends_end_when_they_are_received() -> None:
    first = trace(0, sent(1, batch=1), reduced(PAIR))
    assert find_faults([first, trace(1, received(0, batch=1), reduced(PAIR))]) == []
    [found, unreceived] = find_faults([first, trace(1, reduced(PAIR), received(0, batch=1))])
    assert found.startswith("deadlock: rank 1 waits in all_reduce ")
    assert "and rank 0 in send of 4 bytes" in found and "never receives" in unreceived


def test_two_ranks_that_both_send_alone_first_in_a_group_wait_for_each_other() -> None:
    """A group bound to a device runs one operation after the other."""
    both = trace(0, sent(1), received(1)), trace(1, sent(0), received(0))
    [found, *unreceived] = find_faults(both)
    assert found.startswith("deadlock: rank ")
    assert found.count("in send of 4 bytes") == 2 and found.count(f"of {ALL}") == 2
    assert len(unreceived) == 2
    # One of them receives first, or both do both at once, or each way has a group.
    for others in (
        (received(0), sent(0)),
        (sent(0, group=PAIR), received(0)),
    ):
        first = trace(0, sent(1), received(1, group=others[0].group))
        assert find_faults([first, trace(1, *others)]) == []
    at_once = [trace(r, sent(1 - r, batch=1), received(1 - r, batch=1)) for r in (0, 1)]
    assert find_faults(at_once) == []


@pytest.mark.parametrize("then", [reduced(ALL), sent(1, batch=1)], ids=["reduction", "batch"])
def test_an_exchange_alone_holds_up_what_follows_in_its_group(then: Event) -> None:
    theirs = received(0, batch=1) if then.batch else then
    third = trace(2) if then.batch else trace(2, then)
    in_order = trace(1, received(0), theirs)
    assert find_faults([trace(0, sent(1), then), in_order, third]) == []
    [found, *_] = find_faults([trace(0, sent(1, 8), then), trace(1, theirs, received(0, 8)), third])
    # The batch of the second rank takes what was sent first: another size, and no deadlock.
    assert found.startswith("rank 0 sends" if then.batch else "deadlock: rank ")


@pytest.mark.parametrize("waited", [0, 1])
def test_another_group_goes_on_until_a_rank_waits_for_the_exchange(waited: int) -> None:
    second = trace(1, reduced(PAIR), received(0))
    found = find_faults([trace(0, sent(1, waited=waited), reduced(PAIR)), second])
    assert [text.partition(":")[0] for text in found[:1]] == ["deadlock"][:waited]
    # So does a receive.
    first = trace(0, received(1, waited=waited), reduced(PAIR))
    found = find_faults([first, trace(1, reduced(PAIR), sent(0))])
    assert [text.partition(":")[0] for text in found] == ["deadlock"][:waited]


def test_a_receive_that_nobody_sends_is_named_though_the_rank_has_nothing_else_to_do() -> None:
    [found] = find_faults([trace(0, received(1)), trace(1)])
    assert found.startswith("rank 0 waits in recv of 4 bytes")
    assert "rank 1, which has ended its step" in found


def test_a_send_to_shared_memory_waits_for_nobody_and_a_receive_at_once() -> None:
    memory = "SHARED_MEMORY"
    waits = received(1, 0, group=memory), reduced(PAIR)
    filled = [sent(1, group=memory), sent(1, group=memory), *waits]
    taken = [received(0, group=memory), sent(0, 0, group=memory), *filled[3:]]
    ends = [trace(0, *filled), trace(1, *taken, received(0, group=memory))]
    for each in ends:
        each.groups[memory] = []
    assert find_faults(ends) == []
    # The second rank gives memory back only after the reduction.
    ends[1].events[1:3] = ends[1].events[2:0:-1]
    [found, *_] = find_faults(ends)
    assert found.startswith("deadlock: rank ") and "rank 0 in recv of 0 bytes" in found
