"""Which decoders take the short way through a forward pass."""

from types import SimpleNamespace

import pytest
import torch

from tests.backend.cpu.site_modules import import_shim

lean_decoder = import_shim("lean_decoder")


class Named:
    """An object with attributes, of a class with a given name."""

    def __new__(cls, name: str, **attributes: object) -> object:
        return type(name, (), attributes)()


def make_layer(**changes: object) -> SimpleNamespace:
    def linear(outputs: int, inputs: int) -> SimpleNamespace:
        return SimpleNamespace(
            quant_method=Named("UnquantizedLinearMethod"),
            weight=torch.zeros(outputs, inputs),
            skip_bias_add=False,
        )

    def norm() -> object:
        return Named(
            "RMSNorm", weight=torch.ones(64), variance_size_override=None,
            override_orig_dtype=None, cast_x_before_out_mul=False, fp32_residual=False,
        )  # fmt: skip

    def install_rotary() -> type:
        def forward_native(self: object) -> None: ...

        forward_native.__qualname__ = "install_rotary.<locals>.forward_native"
        return type("RotaryEmbedding", (), {"forward_native": forward_native})

    radix = Named(
        "RadixAttention", sliding_window_size=-1, is_cross_attention=False,
        attn_type=SimpleNamespace(value="decoder"), qk_head_dim=16, v_head_dim=16,
    )  # fmt: skip
    attention = SimpleNamespace(
        qkv_proj=linear(128, 64), o_proj=linear(64, 64), rotary_emb=install_rotary()(),
        attn=radix, head_dim=16,
    )  # fmt: skip
    mlp = SimpleNamespace(
        gate_up_proj=linear(256, 64), down_proj=linear(64, 128), act_fn=Named("SiluAndMul")
    )
    layer = SimpleNamespace(
        self_attn=attention, mlp=mlp, input_layernorm=norm(), post_attention_layernorm=norm()
    )
    for path, value in changes.items():
        target = layer
        *parts, last = path.split("__")
        for part in parts:
            target = getattr(target, part)
        setattr(target, last, value)
    return layer


def test_a_plain_layer_is_known() -> None:
    assert lean_decoder.is_plain_layer(make_layer())


@pytest.mark.parametrize(
    "change",
    [
        {"self_attn__attn__sliding_window_size": 128},
        {"self_attn__q_norm": object()},
        {"mlp__down_proj__quant_method": Named("Fp8LinearMethod")},
        {"mlp__act_fn": Named("GeluAndMul")},
        {"input_layernorm__fp32_residual": True},
        {"self_attn__attn__is_cross_attention": True},
        {"self_attn__rotary_emb": Named("MRotaryEmbedding", forward_native=len)},
        {"self_attn__o_proj__weight": torch.zeros(64, 64).bfloat16()},
    ],
)
def test_what_is_not_plain_keeps_the_engines_path(change: dict[str, object]) -> None:
    if "self_attn__rotary_emb" in change:
        other = type("MRotaryEmbedding", (), {"forward_native": lambda self: None})()
        change = {"self_attn__rotary_emb": other}
    assert not lean_decoder.is_plain_layer(make_layer(**change))
