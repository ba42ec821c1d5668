"""The benchmark of weight sync: its figures on samples written by hand, what it compares with."""

import json
import os
import socket
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_rl.config.tree import Config
from megatron_rl.weights.exchange.group_transport import GroupTransport
from megatron_rl.weights.exchange.orders import Call
from megatron_rl.weights.exchange.parcels import incoming, outgoing
from megatron_rl.weights.exchange.plan import Move, Parcel, Plan
from tests.distributed import run_ranks
from tools.bench.measuring import rounded
from tools.bench.weights import (
    METHODS,
    against_limit,
    combine,
    figures,
    growth,
    scaling,
)
from tools.bench.weights_exchanges import (
    FLOOR,
    GLOO,
    RAW,
    RECEIVE,
    SEND,
    limit_connections,
)
from tools.bench.weights_peer import OVERLAP, RESHARD, Sample

CFG = Config.model_validate({"weights": {"bucket_bytes": 50}})


def sample(method: str, seconds: float, transfer_s: float) -> Sample:
    return Sample(
        method=method,
        seconds=seconds,
        transfers_s=[transfer_s, transfer_s],
        pauses_s=[transfer_s + 0.25, transfer_s + 0.5],
        wire_bytes=100,
        loopback_bytes=110,
        minimum_bytes=100,
        trainer_peak_bytes=20,
        engine_peak_bytes=90,
        trainer_growth_bytes=7,
    )


SAMPLES = [
    sample(method, seconds * repeat, transfer_s * repeat)
    for repeat in (1, 2, 3)
    for method, seconds, transfer_s in zip(
        METHODS,
        (1.0, 1.6, 2.0, 4.0, 3.0),
        (0.5, 0.6, 0.75, 0.25, 1.0),
        strict=True,
    )
]


def test_figures_compare_the_methods_of_one_repeat() -> None:
    found = figures(SAMPLES, CFG)
    assert found["time_over_raw"] == 1.5 and found["ipc_time_over_raw"] == 0.5
    assert found["folder_time_over_raw"] == 2.0
    assert found["floor_over_raw"] == pytest.approx(1.2)
    assert found["time_over_floor"] == found["sync_over_floor"] == pytest.approx(1.25)
    assert found["wire_bytes_over_minimum"] == 1.0
    assert found["loopback_bytes_over_minimum"] == 1.1
    assert found["pause_overhead_ms"] == 375
    assert found["trainer_over_two_buckets"] == 0.2
    assert found["engine_over_two_buckets"] == 0.9


def test_methods_that_were_left_out_have_no_figures() -> None:
    few = [each for each in SAMPLES if each.method in (RAW, RESHARD)]
    left_out = {
        "floor_over_raw", "time_over_floor", "sync_over_floor", "folder_time_over_raw",
        "ipc_time_over_raw",
    }  # fmt: skip
    everything = figures(SAMPLES, CFG)
    assert figures(few, CFG) == {
        name: value for name, value in everything.items() if name not in left_out
    }


def test_the_worst_layout_counts() -> None:
    good = {"time_over_raw": 1.1, "pause_ms_p50": 10.0}
    bad = {"time_over_raw": 1.4, "pause_ms_p50": 30.0}
    assert combine({"a": good, "b": bad}) == {
        "time_over_raw": 1.4,
        "pause_ms_p50": 20.0,
    }


def test_growth_leaves_out_other_methods_and_the_first_of_a_rank(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    rows = [("raw-1", 900), ("reshard-1", 500), ("ipc-1", 800), ("reshard-1", 60)]
    text = "".join(json.dumps({"name": name, "bytes": size}) + "\n" for name, size in rows)
    (tmp_path / "logs" / "sglang-0.growth-7.jsonl").write_text(text)
    found = growth(SAMPLES, tmp_path)
    assert found == {"growth_bytes_trainer": 7, "growth_bytes_engine": 60}


def test_scaling_compares_with_raw_beside_it_and_with_the_fewest_replicas() -> None:
    def of(transfer_s: float, raw_s: float) -> list[Sample]:
        # Generators are served at the same time: the slowest counts.
        return [
            msgspec.structs.replace(
                sample(method, 9.0, seconds), transfers_s=[0.1, seconds], stall_s=0.03
            )
            for method, seconds in (
                (RAW, raw_s),
                (GLOO, 3 * raw_s),
                (RESHARD, transfer_s),
                (OVERLAP, 2 * transfer_s),
            )  # fmt: skip
        ]

    rows = rounded(scaling({4: of(0.9, 0.6), 1: of(0.3, 0.2)}))
    assert list(rows) == ["1", "4"]
    assert rows["4"]["time_over_one"] == 3.0 and rows["4"]["raw_over_one"] == 3.0
    assert rows["1"]["time_over_one"] == 1.0 and rows["4"]["time_over_raw"] == 1.5
    assert rows["4"]["time_over_gloo"] == 0.5
    assert rows["1"]["stall_over_transfer"] == 0.05 and rows["1"]["stall_ms"] == 30


def carried(method: str) -> tuple[list[list[float]], int]:
    """What a rank holds after an exchange of the benchmark's, and the bytes it reports.

    Rank 0 sends; the others are two engines, one behind the other.
    """
    rank = int(os.environ["RANK"])
    address = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=3)
    store = distributed_c10d._get_default_store()
    transport = GroupTransport(store, min(rank, 1), torch.device("cpu"), "gloo")
    # By itself and in one run; by itself, but in parts of rows at the receiver; with the trailer.
    alone, parts = Move(256, 256, "a", 0, 0, "a", 0, 0), Move(256, 256, "b", 0, 0, "b", 0, 8)
    rounds = [[Parcel(0, 1, (alone,))], [Parcel(0, 1, (parts, Move(2, 3, "c", 0, 1, "c", 0, 0)))]]
    held = {"a": torch.zeros(256, 256), "b": torch.zeros(256, 300), "c": torch.zeros(2, 4)}
    call = Call(0, group="lanes", replicas=("a", "b"), left_s=20.0, wait_s=20.0)
    transport.begin(call, Plan(tuple(map(tuple, rounds)), 4, 1), replica=("", "a", "b")[rank])
    options: dict[str, Any] = {"dtype": torch.float32, "version": 1}
    if rank == 0:
        held = {"a": numbers(256), "b": numbers(256) + 1, "c": torch.arange(8.0).view(2, 4)}
        SEND[method](outgoing(rounds, held, torch.float32), transport, **options)
        got = 0
    else:
        ends = incoming(rounds, held, torch.float32)
        got = RECEIVE[method](ends, transport, **options).payload_bytes
    dist.barrier()
    transport.close()
    dist.destroy_process_group()
    return [each.flatten().tolist() for each in held.values()], got


def numbers(columns: int) -> torch.Tensor:
    return torch.arange(256.0 * columns).view(256, columns)


@pytest.mark.parametrize("method", [RAW, FLOOR, GLOO])
def test_the_floor_brings_every_element_to_its_place_and_the_others_none(method: str) -> None:
    _, *engines = run_ranks(carried, 3, method)
    b, c = torch.zeros(256, 300), torch.zeros(2, 4)
    b[:, 8:264], c[:, :3] = numbers(256) + 1, torch.tensor([[1.0, 2, 3], [5, 6, 7]])
    expected = [numbers(256), b, c]
    for found, nbytes in engines:
        assert nbytes == 4 * (2 * 256 * 256 + 2 * 3)
        for values, wanted in zip(found, expected, strict=True):
            assert values == (wanted if method == FLOOR else 0 * wanted).flatten().tolist()


def test_links_are_compared_with_what_the_senders_carry_without_them() -> None:
    rows = {"1": {"transfer_s": 4.0}, "8": {"transfer_s": 4.2}}
    found = against_limit(rows, {"wire_mb": 1200.0, "transfer_s": 0.6}, 40)
    assert found["1"] == {
        "transfer_s": 4.0, "links_mb_s": 40, "senders_limit_mb_s": 2000, "links_over_limit": 0.02
    }  # fmt: skip
    assert found["8"]["links_mb_s"] == 320 and found["8"]["links_over_limit"] == 0.16


def test_a_limited_connection_carries_no_more_than_its_rate() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        closing(socket.create_connection(server.getsockname())) as sender,
    ):
        receiver, _ = server.accept()
        with receiver:
            assert limit_connections(10_000_000) >= 2
            started = time.monotonic()
            thread = threading.Thread(target=sender.sendall, args=(bytes(5_000_000),), daemon=True)
            thread.start()
            left = 5_000_000
            receiver.settimeout(60)
            while left:
                left -= len(receiver.recv(1 << 20))
            # TCP's first segments may go at once.
            assert time.monotonic() - started > 0.9 * 0.5
            thread.join(60)
