"""Plays of `peers.py`, and what holds in each of them."""

from pathlib import Path
from typing import Any

from tests.distributed import run_ranks
from tests.ports import free_port
from tests.weights.peers import Setup, Step, play
from tests.weights.scripted_generators import Generator

SLACK_S = 25.0
"""For processes that share two busy cores: far less than the deadlines of a play."""


def sync(
    folder: Path, generators: list[Generator], script: str, **options: Any
) -> tuple[list[Step], dict[str, list[dict]]]:
    """Steps that rank 0 saw, and what each generator noted.

    All ranks must see the same, and nobody may serve wrong weights as a version.
    """
    script_steps = tuple(step.strip() for step in script.split(","))
    setup = Setup(free_port(), tuple(generators), script_steps, **options)
    ranks = setup.trainers + len(generators)
    results = run_ranks(play, ranks, setup, folder, timeout_s=200)
    trainers, notes = results[: setup.trainers], results[setup.trainers :]
    for steps in trainers:
        assert [step.held for step in steps] == [step.held for step in trainers[0]]
        assert [step.failed for step in steps] == [step.failed for step in trainers[0]]
    for generator, lines in zip(generators, notes, strict=True):
        assert all(line["is_right"] for line in lines), generator.name
    return trainers[0], {g.name: lines for g, lines in zip(generators, notes, strict=True)}


def versions(lines: list[dict]) -> list[int]:
    """Versions that a generator served, one after the other; -1: it stood apart."""
    found = [line["version"] for line in lines]
    return [now for before, now in zip([None, *found], found, strict=False) if now != before]
