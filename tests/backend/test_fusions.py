"""Fused operations are what Megatron is told, and refused where they cannot be."""

import importlib.util
from importlib.machinery import ModuleSpec

import pytest
from megatron.core.transformer.moe import fused_a2a
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.backend.fusions import (
    APEX_MODULE,
    dispatcher_fields,
    transformer_fields,
)
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import ConfigError, load_config
from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.config.trainer import ModelConfig


def test_megatron_has_a_field_for_each() -> None:
    wanted = ("swiglu", "moe_permute", "moe_router")
    found = transformer_fields(ModelConfig(fusions=wanted), has_experts=True, has_engine=True)
    assert found == {
        "bias_activation_fusion": True, "moe_permute_fusion": True, "moe_router_fusion": True,
    }  # fmt: skip
    fields = TransformerConfig.__dataclass_fields__
    assert all(fields[name].default is False for name in found)
    assert "gradient_accumulation_fusion" in fields
    assert transformer_fields(ModelConfig(), has_experts=True, has_engine=False) == {}


@pytest.mark.parametrize(
    ("fusion", "has_engine", "words"),
    [
        ("swiglu", False, r"needs TransformerEngine's layers .* nearest possible: \[\]"),
        ("moe_permute", True, "is a dense model, which has no experts"),
        ("gradient_accumulation", True, "needs NVIDIA apex built with"),
    ],
)
def test_what_is_not_there_is_refused(fusion: str, has_engine: bool, words: str) -> None:
    with pytest.raises(InputError, match=words):
        transformer_fields(ModelConfig(fusions=(fusion,)), has_experts=False, has_engine=has_engine)


def test_gradients_are_accumulated_where_apex_is(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name: ModuleSpec(name, None) if name == APEX_MODULE else real(name),
    )
    model = ModelConfig(fusions=("gradient_accumulation",))
    found = transformer_fields(model, has_experts=False, has_engine=True)
    assert found == {"gradient_accumulation_fusion": True}


def test_a_fused_router_would_ignore_recorded_choices() -> None:
    overrides = ['model.fusions=["moe_permute", "moe_router"]', "train.router_replay=true"]
    with pytest.raises(ConfigError, match="the fused router takes no recorded choices"):
        load_config(None, overrides)
    load_config(None, [overrides[0]])
    load_config(None, ['model.fusions=["moe_permute"]', overrides[1]])


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
        load_config(None, ["parallel.expert_exchange=deepep"])
