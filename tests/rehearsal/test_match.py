"""Ranks' events played against each other, by hand."""

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


def sent(peer: int, size: int = 4, batch: int = 0) -> Event:
    return Event(kind="send", group=ALL, bytes=size, dtype="float32", peer=peer, batch=batch)


def received(peer: int, size: int = 4, batch: int = 0) -> Event:
    return Event(kind="recv", group=ALL, bytes=size, dtype="float32", peer=peer, batch=batch)


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
    # A send outside a batch waits for nobody.
    alone = trace(0, sent(1), reduced(PAIR))
    assert find_faults([alone, trace(1, reduced(PAIR), received(0))]) == []
