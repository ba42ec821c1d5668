"""Trainer ranks of many layouts weight sync to SGLang servers of many layouts; all processes are
real.

Tests are ordered by the server that they need, because starting one takes most of the time. The
tests of two generators and of failures use the last one of the matrix, and end it.
"""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megatron_rl.config.tree import ParallelConfig
from tests.generation.exchange_ranks import Blow, Script
from tests.generation.fleet import (
    MID_TRANSFER,
    MODELS,
    TENSOR,
    Fleet,
    check_drop,
    kept_fleets,
    sync,
)
from tests.generation.inspected_engine import pauses_path

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(300)]
DENSE = {
    "tp1": ParallelConfig(),
    "tp2": ParallelConfig(tensor=2),
    "pp2": ParallelConfig(pipeline=2),
    "tp2-pp2": ParallelConfig(tensor=2, pipeline=2),
    "dp2": ParallelConfig(data=2),
}
MIXTURE = {
    "tp1": ParallelConfig(),
    "ep2": ParallelConfig(data=2, expert=2),
    "pp2": ParallelConfig(pipeline=2),
    "tp2": ParallelConfig(tensor=2, sequence=True),
    "tp2-ep2": ParallelConfig(tensor=2, expert=2, sequence=True),
    "tp2-pp2-ep2": ParallelConfig(tensor=2, pipeline=2, expert=2, sequence=True),
    "pp2-ep2": ParallelConfig(pipeline=2, data=2, expert=2),
}


def replicas(kind: str) -> int:
    """SGLang, and with some models also the hf engine, which knows no latent attention."""
    return 1 if kind.startswith(("qwen", "deepseek", "gpt-oss")) or kind == "glm4-moe-lite" else 2


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, int], Fleet]]:
    """The fleet of a model and an engine layout; the one before is closed."""
    torch.set_num_threads(1)
    with kept_fleets(tmp_path_factory.mktemp) as find:
        yield lambda kind, tensor_parallel: find(kind, tensor_parallel, replicas(kind))


# A test a fleet, whose start takes longer than the weight syncs of all layouts.
@pytest.mark.timeout(500)
@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("kind", MODELS)
def test_every_engine_parameter_equals_the_export_bit_for_bit(
    fleet: Callable[[str, int], Fleet], kind: str, tensor_parallel: int, tmp_path: Path
) -> None:
    one = fleet(kind, tensor_parallel)
    for number, (name, layout) in enumerate((MIXTURE if "moe" in kind else DENSE).items()):
        print(f"trainer: {name}")
        export = tmp_path / name
        # Each layout has weights of its own: a weight sync that does nothing leaves the former.
        (synced,) = sync(one, layout, Script((export,), salt=0.01 * (1 + number)))
        assert synced.metrics["weight_sync/generators"] == replicas(kind)
        assert synced.metrics["weight_sync/damaged_parcels"] == 0
        one.check_parameters(export)
        for index in range(replicas(kind)):
            one.check_logprobs(index, export, version=0)


def test_servers_hand_a_version_on_to_each_other(tmp_path: Path) -> None:
    """Three servers in a row: each receives every byte once, whoever sends it."""
    servers = {"tensor_parallel": 1, "replicas": 3, "sglang_servers": 3}
    exports = (tmp_path / "0", tmp_path / "1")
    with Fleet(tmp_path / "fleet", "llama-tied", **servers) as one:
        found = sync(one, TENSOR, Script(exports, salt=0.1))
        for synced in found:
            assert synced.metrics["weight_sync/generators"] == 3
            assert synced.metrics["weight_sync/damaged_parcels"] == 0
        for index in range(3):
            one.check_logprobs(index, exports[-1], version=1)


@pytest.mark.parametrize("method", ["folder", "ipc"])
def test_other_methods_reach_engines_of_different_layouts(
    fleet: Callable[[str, int], Fleet], method: str, tmp_path: Path
) -> None:
    one = fleet("llama-tied", 2)
    # The second syncer counts versions anew.
    for turn, versions in enumerate((3, 2)):
        folders = tuple(tmp_path / f"{turn}-{version}" for version in range(versions))
        salt = 0.05 * turn + len(method) / 100
        found = sync(one, TENSOR, Script(folders, salt=salt), method=method)
        assert all(each.metrics["weight_sync/generators"] == 2 for each in found)
        one.check_parameters(folders[-1])
        for index in range(2):
            one.check_logprobs(index, folders[-1], version=versions - 1)


def test_one_generator_goes_on_while_another_takes_its_transfer(
    fleet: Callable[[str, int], Fleet], tmp_path: Path
) -> None:
    one = fleet("llama-tied", 2)
    is_over = threading.Event()
    slow = Script((tmp_path / "1",), salt=0.2, parcel_s=0.05, slow_receiver=3)
    sync(one, TENSOR, Script((tmp_path / "0",), salt=0.1))
    # Engines of two kinds have a transfer each. Receiver 3 is the second rank of SGLang's.
    serving = threading.Thread(target=one.serve_for, args=(is_over,))
    serving.start()
    try:
        (synced,) = sync(one, TENSOR, slow)
    finally:
        is_over.set()
        serving.join()
    assert synced.metrics["weight_sync/generators"] == 2
    notes = pauses_path(one.config.run.dir / "logs").read_text()
    pause = json.loads(notes.splitlines()[-1])
    amid = [peer for at, peer, _ in one.arrivals if pause["from"] + 0.2 < at < pause["to"] - 0.2]
    assert pause["to"] - pause["from"] > 1
    assert set(amid) == {"generator-1"} and len(amid) > 3
    one.await_rollouts(16)
    for index in range(2):
        one.check_logprobs(index, tmp_path / "1", version=0)


def test_a_refused_order_and_a_kill_amid_a_transfer_end_at_once(
    fleet: Callable[[str, int], Fleet], tmp_path: Path
) -> None:
    one = fleet("llama-tied", 2)
    at_most_s = one.config.weights.deadline_s / 2
    # SGLang was not told to begin an update, so it answers the loader's call by an error.
    skip = one.config.run.dir / "logs" / "skip-begin"
    skip.touch()
    (refused,) = sync(one, TENSOR, Script((tmp_path / "0",), salt=0.3))
    check_drop(refused, at_most_s)
    one.check_logprobs(1, tmp_path / "0", version=0)
    skip.unlink()
    folders = tuple(tmp_path / name for name in ("whole", "killed", "after"))
    blow = Blow(1, (one.pid(0),), after_parcels=MID_TRANSFER)
    whole, killed, after = sync(one, TENSOR, Script(folders, salt=0.01, blows=(blow,)))
    assert whole.metrics["weight_sync/generators"] == 2
    check_drop(killed, at_most_s)
    check_drop(after, at_most_s)
    one.check_logprobs(1, folders[2], version=2)
