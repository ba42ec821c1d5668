"""Generators that fail and come back amid weight syncs; trainer ranks and generators are real.

Tests share the generators while all of them are alive; the one that leaves a dead one is the last.
"""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.generation.exchange_ranks import Blow, Script
from tests.generation.fleet import (
    MID_TRANSFER,
    TENSOR,
    Fleet,
    check_drop,
    kept_fleets,
    sync,
)

pytestmark = [pytest.mark.timeout(300), pytest.mark.exhaustive]
MARGIN_S = 30.0


@pytest.fixture(scope="module")
def find_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Fleet]]:
    torch.set_num_threads(1)
    with kept_fleets(tmp_path_factory.mktemp) as find:
        yield find


@pytest.fixture
def fleet(find_fleet: Callable[..., Fleet]) -> Fleet:
    """An SGLang generator of two ranks, and an hf generator that goes on when it fails."""
    return find_fleet("llama-tied", 2, 2)


def exports(folder: Path, count: int) -> tuple[Path, ...]:
    return tuple(folder / str(version) for version in range(count))


@pytest.mark.parametrize("after_parcels", [0, 1, MID_TRANSFER])
def test_a_killed_generator_costs_at_most_the_deadline_and_is_served_when_it_is_back(
    after_parcels: int, fleet: Fleet, tmp_path: Path
) -> None:
    folders = exports(tmp_path, 2)
    blow = Blow(1, (fleet.pid(0),), after_parcels=after_parcels)
    script = Script(folders, salt=after_parcels / 10_000, blows=(blow,), admits_until=2)
    with fleet.restarting(0):
        first, killed, _ = sync(fleet, TENSOR, script)
    assert first.metrics["weight_sync/generators"] == 2
    check_drop(killed, fleet.config.weights.deadline_s + MARGIN_S)
    fleet.check_parameters(folders[1])
    for index in range(2):
        fleet.check_logprobs(index, folders[1], version=1)


def test_a_stopped_rank_costs_the_deadline_and_its_generator_is_served_after_a_restart(
    fleet: Fleet, tmp_path: Path
) -> None:
    folders = exports(tmp_path, 3)
    deadline_s = fleet.config.weights.deadline_s
    stop = Blow(1, tuple(fleet.schedulers()[:1]), signal.SIGSTOP, after_parcels=MID_TRANSFER)
    kill = Blow(2, (fleet.pid(0),))
    script = Script(folders, salt=0.005, blows=(stop, kill), admits_until=2)
    with fleet.restarting(0):
        _, stopped, after, _ = sync(fleet, TENSOR, script)
    assert stopped.seconds > deadline_s - 1
    check_drop(stopped, deadline_s + MARGIN_S)
    check_drop(after, deadline_s - 1)
    fleet.check_parameters(folders[2])
    fleet.check_logprobs(0, folders[2], version=2)


def test_a_rank_that_was_stopped_and_goes_on_is_served_without_a_restart(
    fleet: Fleet, tmp_path: Path
) -> None:
    folders = exports(tmp_path, 3)
    pids = tuple(fleet.schedulers()[:1])
    stop = Blow(1, pids, signal.SIGSTOP, after_parcels=MID_TRANSFER)
    go_on = Blow(2, pids, signal.SIGCONT)
    script = Script(folders, salt=0.006, blows=(stop, go_on), admits_until=2)
    sync(fleet, TENSOR, script)
    fleet.check_parameters(folders[2])
    fleet.check_logprobs(0, folders[2], version=2)


def test_a_generator_that_is_killed_after_its_transfer_is_missed_at_the_next_weight_sync(
    fleet: Fleet, tmp_path: Path
) -> None:
    folders = exports(tmp_path, 3)
    # Before the first parcel of version 2.
    blow = Blow(2, (fleet.pid(0),))
    _, killed, after = sync(fleet, TENSOR, Script(folders, salt=0.007, blows=(blow,)))
    assert killed.metrics["weight_sync/generators"] == 2
    check_drop(after, fleet.config.weights.deadline_s + MARGIN_S)
    fleet.check_logprobs(1, folders[2], version=2)
