"""What Megatron and the launcher are told of overlapped tensor ranks, and what is refused.

The buffers themselves: tests/gpu/test_tensor_overlap_cuda.py.
"""

import importlib.util
import inspect
import re
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.transformer import multi_latent_attention

from megatron_rl.backend.device import select_backend
from megatron_rl.backend.tensor_overlap import (
    buffers,
    check_host,
    check_shape,
    quantization_modes,
    transformer_fields,
)
from megatron_rl.config.errors import InputError
from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.config.trainer import ModelConfig
from megatron_rl.config.tree import Config
from tests.distributed import run_ranks

OVERLAPPED = ParallelConfig(tensor=2, sequence=True, overlap_tensor=True)


def extensions() -> str:
    """Source of Megatron's layers of TransformerEngine, which cannot be imported without CUDA."""
    spec = importlib.util.find_spec("megatron.core.extensions.transformer_engine")
    return Path(spec.origin).read_text()


def test_megatron_is_told_by_one_field() -> None:
    assert transformer_fields(OVERLAPPED) == {"tp_comm_overlap": True}
    assert transformer_fields(ParallelConfig(tensor=2)) == {"tp_comm_overlap": False}
    fields = ModelParallelConfig.__dataclass_fields__
    assert fields["tp_comm_overlap"].default is False
    # What else there is to overlap is on by Megatron's own defaults.
    for name in ("bulk_wgrad", "bulk_dgrad", "overlap_ag", "overlap_rs"):
        assert fields[f"tp_comm_{name}"].default is True


def test_megatron_opens_no_buffers_itself() -> None:
    folder = Path(inspect.getfile(ModelParallelConfig)).parent
    assert not [path for path in folder.rglob("*.py") if "initialize_ub" in path.read_text()]


def test_megatron_hands_the_field_to_the_layers_that_exchange_positions() -> None:
    source = extensions()
    for line in (
        'extra_kwargs["ub_bulk_wgrad"] = self.config.tp_comm_bulk_wgrad',
        'extra_kwargs["ub_bulk_dgrad"] = self.config.tp_comm_bulk_dgrad',
        'extra_kwargs["ub_overlap_ag"] = (',
        'extra_kwargs["ub_overlap_rs"] = (',
        'extra_kwargs["ub_name"] = tp_comm_buffer_name',
        # Experts exchange tokens by the dispatcher, whose counts differ.
        "# Disable ub overlap for experts.",
        # Of another name Megatron would turn it off for all layers built later.
        'tp_comm_buffer_name not in ["qkv", "proj", "fc1", "fc2"]',
    ):
        assert line in source, line


def tensor_ranks(parallel: ParallelConfig) -> list[int]:
    select_backend(ModelConfig()).init_distributed(parallel, seed=0, timeout_s=30)
    # A rank that ends closes its connections, and others may not have formed their groups yet.
    dist.barrier()
    return dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group())


@pytest.mark.parametrize("other", ["pipeline", "data"])
def test_tensor_ranks_are_the_neighbours_that_transformer_engine_takes_them_for(other: str) -> None:
    """It is given their count alone (base.py: ranks_per_domain_list)."""
    parallel = ParallelConfig(tensor=2, sequence=True, **{other: 2})
    assert run_ranks(tensor_ranks, 4, parallel) == [[0, 1], [0, 1], [2, 3], [2, 3]]


@pytest.mark.parametrize(
    ("hidden", "positions", "words"),
    [
        (96, 8192, "hidden size that 64 divides, and the model has 96"),
        (16384, 131072, "lower train.microbatch_tokens below 131072"),
    ],
)
def test_shapes_that_buffers_do_not_take_are_refused(
    hidden: int, positions: int, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        check_shape(hidden, positions, has_latent_attention=False)
    check_shape(16384, 131071, has_latent_attention=False)


def test_latent_attention_whose_first_layer_would_turn_the_overlap_off_is_refused() -> None:
    with pytest.raises(InputError, match="latent attention .*; nearest possible: false"):
        check_shape(16384, 1024, has_latent_attention=True)
    source = inspect.getsource(multi_latent_attention)
    names = set(re.findall(r"tp_comm_buffer_name=['\"](\w+)['\"]", source))
    # Were these names known, nothing would have to be refused.
    assert {"q_down_proj", "kv_down_proj"} <= names
    named = extensions().split('not in ["qkv", "proj", "fc1", "fc2"]\n', 1)[1]
    assert named.split("\n")[1].strip() == "self.config.tp_comm_overlap = False"


def test_layers_of_another_kind_are_refused() -> None:
    with pytest.raises(InputError, match="needs TransformerEngine's layers .* possible: false"):
        check_host(has_engine=False)


@pytest.mark.parametrize(
    ("model", "modes"),
    [
        (ModelConfig(), ["none"]),
        (ModelConfig(fp8="delayed"), ["fp8"]),
        # Layers at the edges ask for buffers in bfloat16.
        (ModelConfig(fp8="tensorwise", fp8_bf16_edge_layers=1), ["fp8", "none"]),
    ],
)
def test_buffers_are_of_the_kinds_that_layers_ask_for(model: ModelConfig, modes: list[str]) -> None:
    assert quantization_modes(model) == modes


def test_buffers_are_a_no_op_without_the_setting() -> None:
    # With the setting it would open some of TransformerEngine's, whose module is looked up then.
    loaded = set(sys.modules)
    with buffers(Config(), 128, 0):
        assert set(sys.modules) == loaded
