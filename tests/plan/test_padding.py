"""Padding of microbatches and buffers of overlapped tensor ranks, by hand and by real packing."""

import io
import json
import random
from pathlib import Path

import pytest
from rich.console import Console

from megatron_rl.config.files import load_config
from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.plan.flops import product_flops
from megatron_rl.plan.padding import exchange_bytes, find_padding
from megatron_rl.plan.plan import Hardware, SizingPlan, make_plan
from megatron_rl.plan.report import as_tree, print_plan
from megatron_rl.protocol.packing import deal
from megatron_rl.weights.layout.shape import read_shape
from tests.plan.test_plan import LLAMA_8B, SHAPED
from tests.tiny_models import QWEN3_MOE, write_model

PADDED = ("expert.train.pad_microbatches=true", "expert.parallel.overlap_tensor=true")
BUDGET, HIDDEN = 8192, 4096
PASSES = 256 * 5000 / (2 * BUDGET)
"""Of each of two replicas, if microbatches could be filled by parts of sequences: 78.1."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def planned(folder: Path, *overrides: str, mean_tokens: int = 5000) -> SizingPlan:
    config = load_config(None, [f"model.path={folder}", *SHAPED, *overrides])
    return make_plan(config, Hardware(), mean_tokens)


@pytest.mark.parametrize(("recompute", "passes"), [("none", 3), ("full", 4)])
def test_positions_that_fill_cost_products_alone(folder: Path, recompute: str, passes: int) -> None:
    given = f"model.recompute={recompute}"
    plain, padded = planned(folder, given).step, planned(folder, given, *PADDED).step
    assert plain.padding.share == plain.padding.positions == 0
    assert padded.padding.share == pytest.approx(1 - PASSES / 79)
    filling = padded.padding.positions
    assert filling == pytest.approx(2 * BUDGET * (79 - PASSES), abs=1)
    assert padded.flops == plain.flops
    per_position = passes * product_flops(read_shape(folder))
    assert padded.hardware_flops - plain.hardware_flops == pytest.approx(filling * per_position)
    longer = 1 + 3 * filling * product_flops(read_shape(folder)) / plain.flops.total
    assert padded.seconds == pytest.approx(plain.seconds * longer)


def test_modules_are_recomputed_for_positions_that_fill(folder: Path) -> None:
    given = ["model.recompute=selective", 'model.recompute_modules=["mlp"]']
    plain, padded = planned(folder, *given).step, planned(folder, *given, *PADDED).step
    units = 2 * 32 * 3 * HIDDEN * 14336
    per_position = 3 * product_flops(read_shape(folder)) + units
    added = padded.hardware_flops - plain.hardware_flops
    assert added == padded.padding.positions * per_position


@pytest.mark.parametrize(
    ("overrides", "bytes_each"),
    [
        ((), 12 * 2),
        (("model.fp8=tensorwise",), 8 * 1 + 4 * 2),
        (("model.fp8=tensorwise", "expert.model.fp8_bf16_edge_layers=1"), 8 + 4 * 2 + 12 * 2),
    ],
)
def test_buffers_hold_every_position(
    folder: Path, overrides: tuple[str, ...], bytes_each: int
) -> None:
    plain, overlapped = planned(folder, *overrides), planned(folder, *overrides, *PADDED)
    assert plain.trainer.overlap_buffers == 0
    assert overlapped.trainer.overlap_buffers == bytes_each * BUDGET * HIDDEN
    assert overlapped.trainer.total - plain.trainer.total == bytes_each * BUDGET * HIDDEN


def test_placeholders_of_the_interleaved_schedule_are_padding(folder: Path) -> None:
    stages = ("parallel.pipeline=8", "parallel.virtual_stages=2", "parallel.data=1")
    # 156.25 microbatches of one replica, 160 with placeholders.
    assert planned(folder, *stages, *PADDED).step.padding.share == pytest.approx(1 - 156.25 / 160)


def test_tensor_ranks_exchange_ten_times_the_hidden_states_of_a_layer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    shape = read_shape(tmp_path)
    # Each of 4 ranks receives three quarters of them, of 32 layers in 2 stages, in two bytes.
    parallel = ParallelConfig(tensor=4, sequence=True, pipeline=2, data=2)
    expected = 10 * 3 / 4 * HIDDEN * 2 * 16 * 1000 / 2
    assert exchange_bytes(shape, parallel, tokens=1000) == expected
    # The products of experts exchange nothing among tensor ranks.
    folder = tmp_path / "mixture"
    write_model(folder, family="Qwen3Moe", **QWEN3_MOE)
    mixture = exchange_bytes(read_shape(folder), parallel, tokens=1000)
    assert mixture == 5 * 3 / 4 * 64 * 2 * 2 * 1000 / 2


def test_padding_that_costs_more_than_the_exchange_is_told(folder: Path) -> None:
    # 16 sequences of 700 tokens leave 32 % of two microbatches empty.
    few = ("train.prompts_per_batch=1", *PADDED)
    plan = planned(folder, *few, mean_tokens=700)
    [said] = [text for text in plan.advice if "pad_microbatches" in text]
    assert "at least 32% of all positions are padding" in said and "cannot pay" in said
    assert not [text for text in planned(folder, *PADDED).advice if "pad_microbatches" in text]
    assert not [
        text for text in planned(folder, few[0], mean_tokens=700).advice if "padding" in text
    ]


def test_padding_and_buffers_are_printed_where_there_are_any(folder: Path) -> None:
    for overrides, shown in (((), False), (PADDED, True)):
        page = io.StringIO()
        print_plan(planned(folder, *overrides), Console(file=page, width=120), as_json=False)
        text = page.getvalue()
        assert ("positions that are padding" in text) == shown
        assert ("buffers of overlap_tensor" in text and "0.75 GiB" in text) == shown
    tree = as_tree(planned(folder, *PADDED))
    assert tree["trainer"]["overlap_buffers"] == 24 * BUDGET * HIDDEN
    assert tree["step"]["padding"]["share"] == pytest.approx(1 - PASSES / 79)


@pytest.mark.parametrize("seed", range(5))
def test_real_packing_leaves_at_least_so_much(folder: Path, seed: int) -> None:
    chance = random.Random(seed)
    lengths = [chance.randint(50, BUDGET) for _ in range(chance.randint(1, 16) * 16)]
    config = load_config(None, [f"model.path={folder}", *SHAPED, *PADDED])
    ranks = deal(lengths, budget_tokens=BUDGET, dp_size=2)
    count = len(ranks[0])
    least = -(-sum(lengths) // (2 * BUDGET))
    found = find_padding(
        read_shape(folder), config, "h100-80g", tokens=sum(lengths), microbatches=least
    )
    left = 1 - sum(lengths) / (2 * count * BUDGET)
    assert found.share <= left + 1e-12
