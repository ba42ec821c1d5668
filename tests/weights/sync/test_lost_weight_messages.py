"""The first message of every kind on the weights link is lost: generators serve right weights.

Syncer, generators' clients and sockets are the real ones; engines are made up.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.lossy_router import LINKS
from tests.weights.plays import sync
from tests.weights.scripted_generators import Generator

SCRIPT = "sync 1, admit 2, sync 2, admit 2, sync 3, admit 2, sync 4, admit 2"
TURNS = "sync 1, admit 2, release 0, sync 2, admit 2, release 0, sync 3, admit 2"
PLAYS: dict[str, tuple[tuple[str, ...], str, dict[str, Any]]] = {
    "reshard": (("Hello", "Pause", "Receive", "Fence", "Ack"), SCRIPT, {}),
    "resume": (("Resume",), SCRIPT, {}),
    "three": (("Failed", "Ping", "LeaveGroup"), SCRIPT, {}),
    "turns": (
        ("StartRequest", "MayStart", "Release", "Reclaim"), TURNS, {"takes_turns": True},
    ),
}  # fmt: skip
"""Kinds that are lost, steps of the trainer, and the setup."""


def test_every_kind_is_played() -> None:
    played = [kind for kinds, _, _ in PLAYS.values() for kind in kinds]
    assert sorted(played) == sorted(LINKS["weights"])


# Those that take longest are drawn by the commit.
_LONG = ("resume", "three")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.exhaustive) if n in _LONG else n for n in PLAYS],
)
def test_all_generators_serve_the_version_after_losses(tmp_path: Path, name: str) -> None:
    kinds, script, options = PLAYS[name]
    names = "abc" if name == "three" else "ab"
    script = script.replace("admit 2", f"admit {len(names)}")
    faults = ({1: "fail resume"},) if "Failed" in kinds else ({},)
    start_s = 0.1 if name == "turns" else -1.0
    generators = [Generator("a", 1, faults, start_s=start_s)]
    generators += [Generator(other, 1, start_s=start_s) for other in names[1:]]
    steps, notes = sync(tmp_path, generators, script, deadline_s=1.0, losing=kinds, **options)
    last = int(script.split()[-3].rstrip(","))
    assert steps[-1].held == dict.fromkeys(names, last), steps[-1].dropped
    for lines in notes.values():
        assert last in {line["version"] for line in lines}
    assert (tmp_path / "lost").read_text().split() == sorted(kinds)
