"""Fused operations are what Megatron is told, and refused where they cannot be."""

import importlib.util
from importlib.machinery import ModuleSpec

import pytest
import torch
from megatron.core.tensor_parallel import layers as linear_layers
from megatron.core.transformer.moe import fused_a2a
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.backend.device import select_backend
from megatron_rl.backend.fusions import (
    accumulate_without_apex,
    dispatcher_fields,
    transformer_fields,
)
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import ConfigError, load_config
from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.config.trainer import ModelConfig
from tests.distributed import run_ranks


def test_megatron_has_a_field_for_each() -> None:
    wanted = ("swiglu", "moe_permute", "moe_router")
    found = transformer_fields(ModelConfig(fusions=wanted), has_experts=True, has_engine=True)
    assert found == {
        "bias_activation_fusion": True, "moe_permute_fusion": True, "moe_router_fusion": True,
    }  # fmt: skip
    fields = TransformerConfig.__dataclass_fields__
    assert all(fields[name].default is False for name in found)
    assert "gradient_accumulation_fusion" in fields


@pytest.mark.parametrize(
    ("fusion", "has_engine", "words"),
    [
        ("swiglu", False, r"needs TransformerEngine's layers .* nearest possible: \[\]"),
        ("moe_permute", True, "is a dense model, which has no experts"),
        ("gradient_accumulation", False, "needs TransformerEngine's layers"),
    ],
)
def test_what_is_not_there_is_refused(fusion: str, has_engine: bool, words: str) -> None:
    with pytest.raises(InputError, match=words):
        transformer_fields(ModelConfig(fusions=(fusion,)), has_experts=False, has_engine=has_engine)


def test_gradients_are_accumulated_and_swiglu_is_fused_by_default_with_an_engine() -> None:
    expected = {"gradient_accumulation_fusion": True, "bias_activation_fusion": True}
    for has_experts in (False, True):
        found = transformer_fields(ModelConfig(), has_experts=has_experts, has_engine=True)
        assert found == expected
        found = transformer_fields(ModelConfig(), has_experts=has_experts, has_engine=False)
        assert found == {}
    none = ModelConfig(fusions=())
    assert transformer_fields(none, has_experts=False, has_engine=True) == {}


def build_output_layer() -> list[str]:
    """As Megatron does, without apex: what it says before and after the switch."""
    select_backend(ModelConfig()).init_distributed(ParallelConfig(), seed=0, timeout_s=30)
    linear_layers._grad_accum_fusion_available = False
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, use_cpu_initialization=True,
        gradient_accumulation_fusion=True,
    )  # fmt: skip
    said = []
    for prepare in (lambda: None, accumulate_without_apex):
        prepare()
        try:
            linear_layers.ColumnParallelLinear(
                8, 16, config=config, init_method=torch.nn.init.zeros_, bias=False
            )
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_gradients_are_accumulated_without_apex() -> None:
    (said,) = run_ranks(build_output_layer, 1)[0]
    assert "fused_weight_gradient_mlp_cuda" in said


def test_a_fused_router_would_ignore_recorded_choices() -> None:
    overrides = ['expert.model.fusions=["moe_permute", "moe_router"]', "train.router_replay=true"]
    with pytest.raises(ConfigError, match="the fused router takes no recorded choices"):
        load_config(None, overrides)
    load_config(None, [overrides[0]])
    load_config(None, ['expert.model.fusions=["moe_permute"]', overrides[1]])


DEEPEP = ParallelConfig(data=2, expert=2, expert_exchange="deepep")


def test_tokens_travel_by_all_to_all_unless_deepep_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = dispatcher_fields(ParallelConfig(), has_experts=True, has_engine=True)
    assert found == {"moe_token_dispatcher_type": "alltoall"}
    with pytest.raises(InputError, match="deep_ep .* Set 'all_to_all'"):
        dispatcher_fields(DEEPEP, has_experts=True, has_engine=True)
    with pytest.raises(InputError, match="needs a mixture of experts"):
        dispatcher_fields(DEEPEP, has_experts=False, has_engine=True)
    # A package of that name is not enough: SGLang's lacks a name that Megatron asks for.
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name: ModuleSpec(name, None) if name == "deep_ep" else real(name),
    )
    with pytest.raises(InputError, match="Megatron-Core can use .* Set 'all_to_all'"):
        dispatcher_fields(DEEPEP, has_experts=True, has_engine=True)
    monkeypatch.setattr(fused_a2a, "fused_dispatch", print)
    with pytest.raises(InputError, match="needs TransformerEngine's layers"):
        dispatcher_fields(DEEPEP, has_experts=True, has_engine=False)
    found = dispatcher_fields(DEEPEP, has_experts=True, has_engine=True)
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, num_moe_experts=4,
        expert_model_parallel_size=2, add_bias_linear=False, **found,
    )  # fmt: skip
    assert config.moe_token_dispatcher_type == "flex" and config.moe_router_dtype == "fp32"
    assert config.moe_flex_dispatcher_backend == "deepep"


def test_deepep_without_expert_ranks_is_refused_at_load() -> None:
    with pytest.raises(ConfigError, match="set parallel.expert above 1"):
        load_config(None, ["expert.parallel.expert_exchange=deepep"])
