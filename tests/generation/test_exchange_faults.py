"""Generators that fail and come back amid publishes; trainer ranks and generators are real."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.generation.exchange_ranks import Blow, Script
from tests.generation.fleet import MID_TRANSFER, TENSOR, Fleet, check_drop, publish

pytestmark = [pytest.mark.timeout(280), pytest.mark.exhaustive]
MARGIN_S = 8.0
AFTER_TRANSFER = 150
"""Parcels that rank 0 of TENSOR has packed when the first generator goes on; in all it has 166."""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """An SGLang generator of two ranks, and an hf generator that goes on when it fails."""
    torch.set_num_threads(1)
    with Fleet(tmp_path / "fleet", "llama-tied", tensor_parallel=2, replicas=2) as fleet:
        yield fleet


def exports(folder: Path, count: int) -> tuple[Path, ...]:
    return tuple(folder / str(version) for version in range(count))


@pytest.mark.parametrize("after_parcels", [0, 1, MID_TRANSFER])
def test_a_killed_generator_costs_at_most_the_deadline_and_is_served_when_it_is_back(
    after_parcels: int, fleet: Fleet, tmp_path: Path
) -> None:
    folders = exports(tmp_path, 2)
    blow = Blow(1, (fleet.pid(0),), after_parcels=after_parcels)
    script = Script(folders, blows=(blow,), admits_until=2)
    with fleet.restarting(0):
        first, killed, _ = publish(fleet, TENSOR, script)
    assert first.metrics["publish/generators"] == 2
    check_drop(killed, fleet.config.weights.deadline_s + MARGIN_S)
    fleet.check_parameters(folders[1])
    for index in range(2):
        fleet.check_logprobs(index, folders[1], version=1)


def test_a_generator_that_is_killed_after_its_transfer_is_missed_at_the_next_publish(
    fleet: Fleet, tmp_path: Path
) -> None:
    folders = exports(tmp_path, 3)
    blow = Blow(1, (fleet.pid(0),), after_parcels=AFTER_TRANSFER)
    _, killed, after = publish(fleet, TENSOR, Script(folders, blows=(blow,)))
    assert killed.metrics["publish/generators"] == 2
    check_drop(after, fleet.config.weights.deadline_s + MARGIN_S)
    fleet.check_logprobs(1, folders[2], version=2)


def test_a_stopped_rank_costs_the_deadline_and_its_generator_is_served_after_a_restart(
    fleet: Fleet, tmp_path: Path
) -> None:
    folders = exports(tmp_path, 3)
    deadline_s = fleet.config.weights.deadline_s
    stop = Blow(1, tuple(fleet.schedulers()[:1]), signal.SIGSTOP, after_parcels=MID_TRANSFER)
    kill = Blow(2, (fleet.pid(0),))
    script = Script(folders, blows=(stop, kill), admits_until=2)
    with fleet.restarting(0):
        _, stopped, after, _ = publish(fleet, TENSOR, script)
    assert stopped.seconds > deadline_s - 1
    check_drop(stopped, deadline_s + MARGIN_S)
    check_drop(after, deadline_s / 2)
    fleet.check_parameters(folders[2])
    fleet.check_logprobs(0, folders[2], version=2)


def test_a_rank_that_was_stopped_and_goes_on_is_served_without_a_restart(
    fleet: Fleet, tmp_path: Path
) -> None:
    folders = exports(tmp_path, 3)
    pids = tuple(fleet.schedulers()[:1])
    stop = Blow(1, pids, signal.SIGSTOP, after_parcels=MID_TRANSFER)
    go_on = Blow(2, pids, signal.SIGCONT)
    script = Script(folders, blows=(stop, go_on), admits_until=2)
    publish(fleet, TENSOR, script)
    fleet.check_parameters(folders[2])
    fleet.check_logprobs(0, folders[2], version=2)
