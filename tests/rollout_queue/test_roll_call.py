"""Who is there and who is missing, as rows that come when that changes."""

from megatron_rl.rollout_queue.peer_rows import RollCall


def counts(row: dict | None) -> list[object]:
    """(generators, of how many, verifiers, of how many, missing)."""
    assert row is not None
    names = ("generators", "generators_wanted", "verifiers", "verifiers_wanted", "missing")
    return [row[f"peers/{name}"] for name in names]


def test_who_was_there_and_is_not_is_missing_until_it_is_back() -> None:
    call = RollCall(replicas=2)
    assert call.take_row([], []) is None
    assert counts(call.take_row(["generator-0"], [])) == [1, 2, 0, 0, ""]
    assert counts(call.take_row(["generator-1", "generator-0"], ["verifier"])) == [2, 2, 1, 1, ""]
    assert call.take_row(["generator-0", "generator-1"], ["verifier"]) is None
    row = call.take_row(["generator-0"], [])
    assert counts(row) == [1, 2, 0, 1, "generator-1 verifier"]
    row = call.take_row(["generator-0"], ["verifier", "verifier-1"])
    assert counts(row) == [1, 2, 2, 2, "generator-1"]
    row = call.take_row(["generator-0", "generator-1"], ["verifier", "verifier-1"])
    assert counts(row) == [2, 2, 2, 2, ""]
