"""A completion is kept until the queue confirms it, and sent again for a limited time."""

from generation.unconfirmed import AGAIN_S, MOST_SENDS, Unconfirmed
from megatron_rl.protocol.types import RolloutDone
from tests.rollout_queue.makers import make_rollout


def test_only_what_is_not_confirmed_is_sent_again() -> None:
    kept = Unconfirmed()
    done = [RolloutDone(make_rollout(index, lease_id=7)) for index in range(3)]
    for number, message in enumerate(done):
        kept.note_sent(message, 100.0 + number)
    kept.confirm([(7, 1), (8, 0)])
    kept.confirm([(7, 1)])
    assert kept.late_leases(102.0) == set() and kept.late_leases(103.1) == {7}
    assert kept.pop_due(100.0 + AGAIN_S - 0.1) == []
    assert kept.pop_due(102.0 + AGAIN_S) == [done[0], done[2]]
    assert kept.pop_due(102.0 + 2 * AGAIN_S) == []
    kept.confirm([(7, 0), (7, 2)])
    assert kept.late_leases(1e9) == set() and kept.pop_due(1e9) == []


def test_sends_become_rarer_and_end() -> None:
    kept = Unconfirmed()
    message = RolloutDone(make_rollout(0, lease_id=1))
    kept.note_sent(message, 0.0)
    # After 6, 12 more, 24 more ... seconds: the last send is 6 * (1 + 2 + ... + 64) s later.
    times = [second for second in range(2000) if kept.pop_due(float(second))]
    assert times == [6, 18, 42, 90, 186, 378, 762]
    assert len(times) == MOST_SENDS - 1
    assert kept.late_leases(1e9) == set()
