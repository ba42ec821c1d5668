"""Export gives back what was loaded, and a folder that transformers can load."""

import json
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import distributed_c10d

from megatron_rl.config.tree import ParallelConfig
from megatron_rl.protocol.disk_room import WriteFailed, write_when_room
from megatron_rl.protocol.wire import DeadlineExceeded
from megatron_rl.weights.folders import export
from megatron_rl.weights.folders.export import ExportCalls, export_tensors, save_hf, senders
from megatron_rl.weights.folders.hf_folder import bucketed, write_tensors
from megatron_rl.weights.folders.model_files import copy_files
from megatron_rl.weights.layout.place import Place
from megatron_rl.weights.layout.ranks import place_of
from megatron_rl.weights.layout.shape import read_shape
from megatron_rl.weights.layout.slices import Share, as_matrix
from megatron_rl.weights.layout.trainer_layout import hf_shapes, trainer_slices
from tests.distributed import run_ranks
from tests.full_disk import fill_disk
from tests.tiny_models import (
    CORRECTION,
    GLM4_MOE,
    GPT_OSS,
    LATENT,
    QWEN3_MOE,
    VOCAB,
    full_logits,
    load_on_rank,
    write_model,
)


def exported(folder: Path, parallel: ParallelConfig, dtype: str) -> list[tuple[str, Tensor]]:
    loaded = load_on_rank(folder, parallel, dtype)
    return list(export_tensors(loaded.model, loaded.shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(tensor=2),
        ParallelConfig(pipeline=2),
        ParallelConfig(pipeline=2, first_stage_layers=3),
        ParallelConfig(data=2),
        ParallelConfig(tensor=2, pipeline=2, virtual_stages=2),
        ParallelConfig(context=2),
    ],
)
def test_export_equals_the_loaded_tensors_bit_for_bit(
    parallel: ParallelConfig, dtype: torch.dtype, tmp_path: Path
) -> None:
    is_tied = dtype is torch.bfloat16
    write_model(tmp_path / "m", is_tied=is_tied, dtype=dtype)
    expected = load_file(tmp_path / "m" / "model.safetensors")
    name = str(dtype).removeprefix("torch.")
    first, *others = run_ranks(exported, parallel.world_size, tmp_path / "m", parallel, name)
    assert not any(others)
    assert len(first) == len(expected) and ("lm_head.weight" in expected) is not is_tied
    for key, tensor in first:
        assert tensor.dtype == dtype and torch.equal(tensor, expected[key]), key


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Phi3", "Olmo2"])
def test_biases_query_norms_and_fused_tensors_are_exported(family: str, tmp_path: Path) -> None:
    write_model(tmp_path / "m", family=family)
    expected = load_file(tmp_path / "m" / "model.safetensors")
    first = dict(run_ranks(exported, 2, tmp_path / "m", ParallelConfig(tensor=2), "float32")[0])
    assert first.keys() == expected.keys()
    assert all(torch.equal(first[key], expected[key]) for key in expected)


def save_and_wait(source: Path, target: Path, parallel: ParallelConfig, dtype: str) -> None:
    loaded = load_on_rank(source, parallel, dtype)
    save_hf(target, loaded.model, loaded.shape, source=source)


@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        ("Qwen3Moe", ParallelConfig()),
        ("Qwen3Moe", ParallelConfig(tensor=2, sequence=True)),
        ("Qwen3Moe", ParallelConfig(pipeline=2)),
        ("Qwen3Moe", ParallelConfig(data=2, expert=2)),
        ("Qwen3Moe", ParallelConfig(tensor=2, sequence=True, expert=2)),
        ("Qwen3Moe", ParallelConfig(tensor=2, sequence=True, data=2, expert=4)),
        ("Qwen3Moe", ParallelConfig(pipeline=2, data=2, expert=2)),
        ("Qwen3Moe", ParallelConfig(context=2, data=2, expert=2, expert_tensor=2)),
        ("Mixtral", ParallelConfig(data=2, expert=2)),
        ("Glm4Moe", ParallelConfig(tensor=2, sequence=True)),
        ("Glm4Moe", ParallelConfig(pipeline=2)),
        ("Glm4Moe", ParallelConfig(data=2, expert=2)),
        ("DeepseekV3", ParallelConfig(tensor=2, sequence=True)),
        ("DeepseekV3", ParallelConfig(pipeline=2)),
        ("DeepseekV3", ParallelConfig(data=2, expert=2)),
        ("Glm4MoeLite", ParallelConfig(tensor=2, sequence=True)),
        ("GptOss", ParallelConfig(tensor=2, sequence=True)),
        ("GptOss", ParallelConfig(pipeline=2, data=2, expert=2)),
    ],
)
def test_saved_mixture_equals_the_loaded_one_bit_for_bit(
    family: str, parallel: ParallelConfig, tmp_path: Path
) -> None:
    given = {"Qwen3Moe": QWEN3_MOE, "Glm4Moe": GLM4_MOE, "DeepseekV3": LATENT}
    given["GptOss"] = GPT_OSS
    given["Glm4MoeLite"] = {**LATENT, "q_lora_rank": None}
    options = given.get(family, {"num_local_experts": 4})
    is_tied = parallel.pipeline > 1
    write_model(tmp_path / "m", family=family, is_tied=is_tied, dtype=torch.bfloat16, **options)
    run_ranks(
        save_and_wait, parallel.world_size, tmp_path / "m", tmp_path / "out", parallel, "bfloat16"
    )
    expected = load_file(tmp_path / "m" / "model.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys() and len(found) > (48 if family != "GptOss" else 4 * 17)
    for name, tensor in expected.items():
        dtype = torch.float32 if name.endswith(CORRECTION) else torch.bfloat16
        assert found[name].dtype == dtype and torch.equal(found[name], tensor), name


def test_each_element_is_sent_once_and_rank_0_gives_what_it_has(tmp_path: Path) -> None:
    write_model(tmp_path / "m", family="Qwen3Moe", **QWEN3_MOE)
    shape = read_shape(tmp_path / "m")
    like = Place(Share(0, 2), Share(0, 2), Share(0, 4))
    places = tuple(place_of(rank, 16, like) for rank in range(16))
    sent = senders(shape, places)
    for name, size in hf_shapes(shape).items():
        count = torch.zeros(size, dtype=torch.int64)
        for rank, parts in sent[name].items():
            for part in parts:
                assert part in trainer_slices(shape, places[rank])
                area = as_matrix(count)[part.row : part.row + part.rows]
                area[:, part.column : part.column + part.columns] += 1
        assert (count == 1).all(), name
    assert set(sent["model.layers.0.mlp.gate.weight"]) == {0}
    assert set(sent["model.layers.0.mlp.experts.3.up_proj.weight"]) == {3}
    assert set(sent["model.layers.2.self_attn.o_proj.weight"]) == {8, 9}


def alone(*_: Any, **__: Any) -> None:
    raise AssertionError("NCCL would make a communicator of its own for this pair")


def traced_export(folder: Path, parallel: ParallelConfig) -> tuple[dict[str, Tensor], int, int]:
    """(tensors, transfers in batches, keys that are left in the store)."""
    loaded = load_on_rank(folder, parallel)
    store, transfers, batch = distributed_c10d._get_default_store(), [], dist.batch_isend_irecv

    def noted(ops: list[dist.P2POp]) -> list[dist.Work]:
        transfers.extend(ops)
        return batch(ops)

    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    dist.send = dist.recv = alone
    dist.batch_isend_irecv = noted
    found = dict(export_tensors(loaded.model, loaded.shape))
    save_hf(folder / "out", loaded.model, loaded.shape, source=folder)
    dist.barrier()
    left = store.num_keys() - before
    # The store ends with rank 0.
    dist.barrier()
    return found, len(transfers), left


def test_what_travels_goes_in_batches_and_leaves_no_keys(tmp_path: Path) -> None:
    write_model(tmp_path / "m", family="Qwen3Moe", **QWEN3_MOE)
    expected = load_file(tmp_path / "m" / "model.safetensors")
    parallel = ParallelConfig(data=2, expert=2)
    first, second = run_ranks(traced_export, 2, tmp_path / "m", parallel)
    assert first[0].keys() == expected.keys() and not second[0]
    assert all(torch.equal(first[0][name], expected[name]) for name in expected)
    # Of each tensor of the experts that only the second rank has, in two exports.
    experts = len(
        {name.split(".experts.")[1].split(".")[0] for name in expected if ".experts." in name}
    )
    own = sum(
        int(name.split(".experts.")[1].split(".")[0]) >= experts // 2
        for name in expected
        if ".experts." in name
    )
    assert first[1] == second[1] == 2 * own > 0
    assert first[2] == second[2] == 0


def test_shards_wait_for_room_and_are_whole(small_disk: Path) -> None:
    tensors = {f"{n}": torch.full([20_000], float(n)) for n in range(8)}
    timer = threading.Timer(1.0, fill_disk(small_disk, left_bytes=200_000).unlink)
    started = time.monotonic()
    timer.start()
    write_tensors(small_disk, tensors.items(), 160_000, limit_s=60.0)
    assert time.monotonic() - started >= 1.0
    names = sorted(path.name for path in small_disk.iterdir())
    shards = [f"model-{n}-of-00004.safetensors" for n in ("00001", "00002", "00003", "00004")]
    assert names == [*shards, "model.safetensors.index.json"]
    found = {
        name: tensor for shard in shards for name, tensor in load_file(small_disk / shard).items()
    }
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    fill_disk(small_disk, left_bytes=50_000)
    with pytest.raises(WriteFailed, match=r"part-0.safetensors could not .*: No space left on"):
        write_tensors(small_disk, tensors.items(), 160_000)
    assert sorted(path.name for path in small_disk.iterdir()) == ["filler", *names]


def test_files_of_a_model_and_its_folders_wait_for_room(small_disk: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    contents = {"a.txt": 60_000, "figures/b.png": 150_000, "figures/more/c.png": 90_000}
    for name, size in contents.items():
        (source / name).parent.mkdir(exist_ok=True, parents=True)
        (source / name).write_bytes(name[-5].encode() * size)
    filler = fill_disk(small_disk, left_bytes=200_000)
    tries = []

    def write() -> None:
        if len(tries) == 1:
            filler.unlink()
        tries.append(time.monotonic())
        copy_files(sorted(source.iterdir()), small_disk)

    write_when_room(small_disk, write, limit_s=60.0)
    assert len(tries) == 2
    found = {name: (small_disk / name).read_bytes() for name in contents}
    assert found == {name: name[-5].encode() * size for name, size in contents.items()}


def slow_export(folder: Path, pause_s: float, patience_s: float) -> str:
    """Rank 0 takes long between two tensors and long at the end."""
    real = export.write_tensors

    def slow(staging: Path, tensors: Any, shard_bytes: int, **known: float) -> None:
        def delayed() -> Iterator[tuple[str, Tensor]]:
            for number, named in enumerate(tensors):
                if number == 3:
                    time.sleep(pause_s)
                yield named

        real(staging, delayed(), shard_bytes, **known)
        time.sleep(pause_s)

    export.write_tensors = slow
    loaded = load_on_rank(folder, ParallelConfig(tensor=2))
    # For collectives from here on, as expert.train.collective_timeout_s sets it for all.
    distributed_c10d._set_pg_timeout(timedelta(seconds=COLLECTIVE_S), dist.group.WORLD)
    started = time.monotonic()
    try:
        save_hf(folder / "out", loaded.model, loaded.shape, source=folder, patience_s=patience_s)
    except DeadlineExceeded as error:
        return f"{error}; after {time.monotonic() - started:.1f} s"
    return ""


COLLECTIVE_S = 1.0


def test_the_others_wait_for_a_slow_disk_longer_than_for_a_collective(tmp_path: Path) -> None:
    write_model(tmp_path / "m")
    assert run_ranks(slow_export, 2, tmp_path / "m", 2.5 * COLLECTIVE_S, 60.0) == ["", ""]
    expected = load_file(tmp_path / "m" / "model.safetensors")
    found = load_file(tmp_path / "m" / "out" / "model.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def wait_alone(patience_s: float) -> list[str]:
    dist.init_process_group("gloo")
    turns, found = ExportCalls(patience_s), []
    if dist.get_rank() == 1:
        for wait in (lambda: turns.await_call("a.weight", 1), turns.end):
            started = time.monotonic()
            with pytest.raises(DeadlineExceeded) as caught:
                wait()
            assert patience_s <= time.monotonic() - started < patience_s + 30
            found.append(str(caught.value))
    dist.barrier()
    return found


def test_their_patience_ends(tmp_path: Path) -> None:
    _, (call, end) = run_ranks(wait_alone, 2, 1.0)
    assert call == "trainer rank 0 did not ask for its slices of a.weight within 1 s"
    assert end == "trainer rank 0 did not finish the export within 1 s"


def test_buckets_keep_order_and_size() -> None:
    sizes = [1, 2, 5, 1, 1, 1]
    tensors = [(str(i), torch.zeros(size, dtype=torch.uint8)) for i, size in enumerate(sizes)]
    buckets = [
        [name for name, _ in bucket]
        for bucket in bucketed(tensors, lambda named: named[1].nbytes, 3)
    ]
    assert buckets == [["0", "1"], ["2"], ["3", "4", "5"]]
    assert list(bucketed([], len, 3)) == []


def save_and_logits(
    source: Path, target: Path, parallel: ParallelConfig, ids: Tensor
) -> Tensor | None:
    loaded = load_on_rank(source, parallel)
    with torch.no_grad():
        for parameter in loaded.model[0].parameters():
            parameter.mul_(1.25)
    save_hf(target, loaded.model, loaded.shape, source=source, shard_bytes=200_000)
    return full_logits(loaded, ids)


@pytest.mark.parametrize("parallel", [ParallelConfig(tensor=2), ParallelConfig(pipeline=2)])
def test_saved_folder_has_the_trainers_logits(parallel: ParallelConfig, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source, target = tmp_path / "source", tmp_path / "out" / "final"
    write_model(source)
    (source / "tokenizer.json").write_text("{}")
    ids = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(2))
    logits = run_ranks(save_and_logits, 2, source, target, parallel, ids)[-1]
    with torch.no_grad():
        saved = AutoModelForCausalLM.from_pretrained(target)(ids).logits
    # Sums in another order round otherwise in float32.
    torch.testing.assert_close(saved, logits, rtol=0, atol=5e-5)
    assert (target / "tokenizer.json").read_text() == "{}"
    assert json.loads((target / "config.json").read_text())["dtype"] == "float32"
    assert [path.name for path in target.parent.iterdir()] == ["final"]
    assert len(list(target.glob("*.safetensors"))) > 1
