"""Peers that leave: others get their work at once, as no attempt, and nobody misses them."""

from pathlib import Path

from megatron_rl.protocol.metrics import read_jsonl
from megatron_rl.protocol.types import (
    GeneratorReady,
    Lease,
    NextBatch,
    RolloutDone,
    ScoreDone,
    ScoreRequest,
    Stop,
    VerifierReady,
    WeightsSynced,
)
from megatron_rl.rollout_queue.coordinator import BATCHES, PROMPTS, VERIFY, Coordinator
from tests.rollout_queue.makers import make_rollout, make_score
from tests.rollout_queue.virtual import VERIFIER_ROOM, open_coordinator

# With these limits one counted attempt or loss would drop a group.
STRICT = {
    "train": {"prompts_per_batch": 2, "group_size": 4, "steps": 2},
    "queue": {"max_attempts": 1, "max_lost_attempts": 1, "max_staleness": 0},
}


def sent(queue: Coordinator, now: float, kind: type) -> list[tuple[str, object]]:
    return [(peer, one) for _, peer, one in list(queue.outgoing(now)) if isinstance(one, kind)]


def generator(
    queue: Coordinator, name: str, now: float, *leases: int, leaves: bool = False
) -> None:
    ready = GeneratorReady(8, 0, session=1, leases=list(leases), is_leaving=leaves)
    queue.handle(PROMPTS, name, ready, now)


def begin(queue: Coordinator) -> None:
    queue.handle(BATCHES, "t", WeightsSynced(0), 0.0)
    queue.handle(BATCHES, "t", NextBatch(0, 0, 1), 0.0)


def peers_rows(folder: Path) -> list[dict]:
    return [row for row in read_jsonl(folder / "metrics.jsonl") if "peers/missing" in row]


def verifier(queue: Coordinator, name: str) -> None:
    queue.handle(VERIFY, name, VerifierReady(VERIFIER_ROOM, 1), 0.0)


def test_a_peer_that_was_there_and_is_not_is_missing_until_it_is_back(tmp_path: Path) -> None:
    with open_coordinator(tmp_path, generator={"replicas": 2}) as queue:
        queue.tick(0.0)
        assert peers_rows(tmp_path) == []
        generator(queue, "generator-0", 0.0)
        queue.tick(0.0)
        generator(queue, "generator-1", 0.0)
        verifier(queue, "verifier")
        for _ in range(2):
            queue.tick(0.0)
        queue.lose(PROMPTS, "generator-1")
        queue.lose(VERIFY, "verifier")
        queue.tick(0.0)
        verifier(queue, "verifier")
        verifier(queue, "verifier-1")
        queue.tick(0.0)
        generator(queue, "generator-1", 0.0)
        queue.tick(0.0)
    names = ("generators", "generators_wanted", "verifiers", "verifiers_wanted", "missing")
    assert [[row[f"peers/{name}"] for name in names] for row in peers_rows(tmp_path)] == [
        [1, 2, 0, 0, ""],
        [2, 2, 1, 1, ""],
        [1, 2, 0, 1, "generator-1 verifier"],
        [1, 2, 2, 2, "generator-1"],
        [2, 2, 2, 2, ""],
    ]


def test_a_leaving_generator_finishes_what_it_names_and_gives_back_the_rest(tmp_path: Path) -> None:
    with open_coordinator(tmp_path, **STRICT) as queue:
        generator(queue, "generator-2", 0.0)
        begin(queue)
        leases = [one for _, one in sent(queue, 0.0, Lease)]
        assert [len(one.indices) for one in leases] == [4, 4]
        kept, given_back = leases
        generator(queue, "generator-0", 1.0)
        queue.tick(1.0)
        generator(queue, "generator-2", 1.0, kept.lease_id, leaves=True)
        # The other generator has them at once, and alone gets more.
        again = sent(queue, 1.0, Lease)
        assert {name for name, _ in again} == {"generator-0"}
        found = [(one.prompt.id, one.indices) for _, one in again]
        assert (given_back.prompt.id, given_back.indices) in found
        assert (kept.prompt.id, kept.indices) not in found
        for index in kept.indices:
            rollout = make_rollout(index, lease_id=kept.lease_id)
            queue.handle(PROMPTS, "generator-2", RolloutDone(rollout), 2.0)
        generator(queue, "generator-2", 2.0, leaves=True)
        assert sent(queue, 2.0, Stop) == [("generator-2", Stop("it has left the run"))]
        # Its Stop was lost: it asks again, and is no peer by that.
        generator(queue, "generator-2", 3.0, leaves=True)
        assert sent(queue, 3.0, Stop) == [("generator-2", Stop("it has left the run"))]
        queue.tick(3.0)
        assert queue.peers == {(PROMPTS, "generator-0")}
    rows = peers_rows(tmp_path)
    assert [row["peers/generators"] for row in rows] == [2, 1]
    assert [row["peers/missing"] for row in rows] == ["", ""]


def test_peers_of_an_earlier_launcher_are_not_missing_in_the_next(tmp_path: Path) -> None:
    with open_coordinator(tmp_path, **STRICT) as queue:
        generator(queue, "generator-0", 0.0)
        generator(queue, "generator-1", 0.0)
        verifier(queue, "verifier-1")
        queue.tick(0.0)
        queue.relaunch(1.0)
        queue.tick(1.0)
        generator(queue, "generator-0", 2.0)
        queue.tick(2.0)
    names = ("generators", "generators_wanted", "verifiers_wanted", "missing")
    told = [[row[f"peers/{name}"] for name in names] for row in peers_rows(tmp_path)]
    assert told == [[2, 2, 1, ""], [1, 1, 0, ""]]


def test_a_leaving_verifier_answers_what_it_names_and_others_get_the_rest(tmp_path: Path) -> None:
    with open_coordinator(tmp_path, **STRICT) as queue:
        generator(queue, "generator-0", 0.0)
        verifier(queue, "verifier-3")
        begin(queue)
        for _, lease in sent(queue, 0.0, Lease):
            for index in lease.indices:
                done = RolloutDone(make_rollout(index, lease_id=lease.lease_id))
                queue.handle(PROMPTS, "generator-0", done, 0.0)
        asked = [one.request_id for _, one in sent(queue, 0.0, ScoreRequest)]
        assert len(asked) == 8
        queue.handle(VERIFY, "verifier", VerifierReady(VERIFIER_ROOM, 1), 1.0)
        queue.tick(1.0)
        leaving = VerifierReady(VERIFIER_ROOM, 1, requests=asked[:1], is_leaving=True)
        queue.handle(VERIFY, "verifier-3", leaving, 1.0)
        again = sent(queue, 1.0, ScoreRequest)
        assert [(name, one.request_id) for name, one in again] == [
            ("verifier", request_id) for request_id in asked[1:]
        ]
        for name, request_id in [("verifier-3", asked[0]), *(("verifier", n) for n in asked[1:])]:
            queue.handle(VERIFY, name, ScoreDone(request_id, make_score(request_id % 2)), 2.0)
        leaving = VerifierReady(VERIFIER_ROOM, 1, requests=[], is_leaving=True)
        queue.handle(VERIFY, "verifier-3", leaving, 2.0)
        assert sent(queue, 2.0, Stop) == [("verifier-3", Stop("it has left the run"))]
        queue.tick(2.0)
        assert queue.requests.built_steps == 1 and (VERIFY, "verifier-3") not in queue.peers
    assert [row["peers/missing"] for row in peers_rows(tmp_path)] == ["", ""]
