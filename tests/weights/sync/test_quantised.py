"""Parameters that a library keeps quantised are synced as their values, dequantised once."""

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.weights.exchange.parcels import (
    PlainParameters,
    is_quantised,
    outgoing,
    payload_bytes,
)
from megatron_rl.weights.exchange.plan import Move, Parcel
from megatron_rl.weights.sync.reshard import Reshard
from tests.distributed import run_ranks
from tests.ports import free_port
from tests.weights import peers
from tests.weights.plays import SLACK_S, versions
from tests.weights.quantised import Quantised
from tests.weights.scripted_generators import Generator

ROWS, COLUMNS, SLICES = 512, 4096, 8
FAULT = "out of memory, as it were"


def quantised(rows: int = ROWS, columns: int = COLUMNS) -> Quantised:
    codes = (torch.arange(rows * columns).view(rows, columns) * 7 % 251 - 125).to(torch.int8)
    return Quantised(codes, 0.25, torch.float32)


def test_slices_are_values_and_cost_one_dequantising() -> None:
    held, plain = quantised(), torch.full((4, 4), 2.0)
    rows = ROWS // SLICES
    moves = [Move(rows, COLUMNS, "q", n * rows, 0, "t", n * rows, 0) for n in range(SLICES)]
    parcels = [[Parcel(0, 1, (move,))] for move in moves]
    parcels.append([Parcel(0, 1, (Move(4, 4, "p", 0, 0, "p", 0, 0),))])
    parameters = PlainParameters({"q": held, "p": plain})
    # Twice, as for two generators.
    for _ in range(2):
        ends = outgoing(parcels, parameters, torch.float32)
    assert held.times == 1
    assert payload_bytes(ends, torch.float32) == 4 * (ROWS * COLUMNS + 16)
    places = [place for [end] in ends[:-1] for packet in end.packets for place in packet.places]
    assert torch.equal(torch.cat(places), held.codes.float() / 4)
    # Each is sent from where it lies: its bytes are those of the values, not the codes.
    sent = [packet.data for [end] in ends[:-1] for packet in end.packets if packet.data is not None]
    assert torch.equal(torch.cat(sent).view(torch.float32).view(ROWS, COLUMNS), torch.cat(places))
    assert parameters["p"] is plain


def test_two_threads_that_ask_at_once_cost_one_dequantising() -> None:
    held = quantised(2, 2)
    parameters = PlainParameters({"q": held})
    with ThreadPoolExecutor(1) as pool:
        other: list[Future[Tensor]] = []

        def ask_again(times: int) -> None:
            if times == 1:
                other.append(pool.submit(parameters.__getitem__, "q"))
                # Time to find the parameter missing, and to wait.
                time.sleep(0.05)

        held.before_dequantising = ask_again
        found = parameters["q"]
        assert other[0].result(SLACK_S) is found and held.times == 1


def test_torchs_own_parameters_are_plain() -> None:
    assert not is_quantised(torch.nn.Parameter(torch.zeros(2)))
    assert not is_quantised(torch.zeros(2, dtype=torch.bfloat16))
    assert is_quantised(quantised(2, 2))


class Following(Quantised):
    """Whose values are those that another tensor has at the time."""

    def dequantize(self) -> Tensor:
        super().dequantize()
        return self.codes.clone()


class QuantisedReshard(Reshard):
    """On the second rank, the first parameter cannot be dequantised in the second weight sync."""

    made: list[Following]

    def __init__(self, parameters: dict[str, Tensor], *args: Any, **options: Any) -> None:
        held = {name: Following(p, 1.0, p.dtype) for name, p in parameters.items()}
        type(self).made = list(held.values())
        if os.environ["RANK"] == "1":
            type(self).made[0].before_dequantising = fail_the_second_time
        super().__init__(held, *args, **options)


def fail_the_second_time(times: int) -> None:
    if times == 2:
        raise torch.OutOfMemoryError(FAULT)


def play(setup: peers.Setup, folder: Path) -> Any:
    """As in `peers.py`, and how often each parameter of a trainer rank was dequantised."""
    peers.Reshard = QuantisedReshard
    found = peers.play(setup, folder)
    is_trainer = int(os.environ["RANK"]) < setup.trainers
    return (found, [p.times for p in QuantisedReshard.made]) if is_trainer else found


def test_a_rank_that_cannot_dequantise_costs_a_weight_sync_and_not_the_run(tmp_path: Path) -> None:
    script = ("sync 0", "sync 1", "admit 2", "sync 2")
    setup = peers.Setup(free_port(), (Generator("a", 2), Generator("b", 1)), script, tensor=2)
    (first, first_times), (second, second_times), *notes = run_ranks(
        play, 4, setup, tmp_path, timeout_s=90
    )
    for steps in (first, second):
        # Nothing is sent to either, and both are served at the next attempt.
        assert set(steps[1].failed) == {"a", "b"}
        for name, reason in steps[1].failed.items():
            assert reason == f"{name}: trainer rank 1 could not prepare its slices: {FAULT}"
        assert steps[1].seconds < SLACK_S
        held = [step.held for step in steps]
        assert held[0] == {"a": 0, "b": 0} and held[2:] == [{"a": 1, "b": 1}, {"a": 2, "b": 2}]
    for name, lines in zip("ab", notes, strict=True):
        assert all(line["is_right"] for line in lines), name
        assert [version for version in versions(lines) if version >= 0] == [0, 1, 2]
    # Once for both kinds of engines in each weight sync, of which the one to who came back first
    # may serve one of them alone.
    assert second_times[0] in (4, 5) and set(first_times) <= {0, 3, 4, 5}
