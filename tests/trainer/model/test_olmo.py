"""OLMo 2 and 3: TransformerEngine's layers, angles of two kinds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp

from megatron_rl.backend import device
from megatron_rl.backend.device import Backend
from megatron_rl.backend.norms import HeadsNorm, Norms
from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config, ModelConfig
from megatron_rl.trainer.model.build import transformer_config
from megatron_rl.weights.folders.hf_folder import write_config
from megatron_rl.weights.layout.shape import read_shape, shape_of
from tests.tiny_models import write_model
from tests.trainer.model.test_families import YARN, shape_of_config


def test_transformer_engines_layers_norm_what_its_products_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Column: ...

    class Row: ...

    def spec_of(**options: Any) -> Any:
        spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True)
        parts = spec.submodules
        parts.self_attention.submodules.linear_proj = parts.mlp.submodules.linear_fc2 = Row
        return spec

    monkeypatch.setattr(device, "get_gpt_layer_with_transformer_engine_spec", spec_of)
    monkeypatch.setattr(device, "TEColumnParallelLinear", Column)
    write_model(tmp_path, family="Olmo2")
    backend, local = (
        Backend(torch.device("cpu"), "gloo", layers) for layers in ("transformer_engine", "local")
    )
    cfg = Config(model=ModelConfig(path=tmp_path, dtype="float32"))
    config = transformer_config(local, cfg, read_shape(tmp_path))
    plain, normed = (
        backend.layer_spec(config, 0, norms).submodules for norms in (Norms(), Norms(True, True))
    )
    assert plain.input_layernorm is not IdentityOp
    assert normed.input_layernorm is normed.pre_mlp_layernorm is IdentityOp
    attention, mlp = normed.self_attention.submodules, normed.mlp.submodules
    assert attention.linear_qkv is mlp.linear_fc1 is Column
    assert attention.linear_proj is mlp.linear_fc2 and issubclass(mlp.linear_fc2, Row)
    assert plain.self_attention.submodules.linear_proj is Row
    found = (attention.q_layernorm, attention.k_layernorm)
    assert [(one.module, one.params["heads"]) for one in found] == [(HeadsNorm, 4), (HeadsNorm, 2)]


WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}


def test_angles_of_two_kinds_of_layers_are_read_and_written_in_both_spellings(
    tmp_path: Path,
) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    spelled = {"rope_theta": 5e5, "rope_scaling": scaling}
    shape = shape_of_config(tmp_path, "Olmo3", **WINDOWS, **spelled)
    assert shape.full_layers == (1,) and shape.rope_scaling is not None
    given = json.loads((tmp_path / "config.json").read_text())
    write_config(given, tmp_path, torch.float32)
    written = json.loads((tmp_path / "config.json").read_text())
    for other in (("rope_parameters",), ("rope_theta", "rope_scaling")):
        alone = {key: value for key, value in written.items() if key not in other}
        assert shape_of(alone, tmp_path) == shape
    theirs = transformers.Olmo3Config.from_pretrained(tmp_path).rope_parameters
    assert theirs["full_attention"].items() >= {**scaling, "rope_theta": 5e5}.items()
    assert theirs["sliding_attention"] == {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_theta": 1e4}, "rope_theta=10000.0 is not supported besides rope_scaling: 500000.0"),
        ({"rope_parameters": YARN}, "for sliding_attention .*not supported: the same rope_theta"),
        (
            {"rope_parameters": {"full_attention": YARN, "sliding_attention": YARN}},
            "'yarn'.* for sliding_attention .*not supported: .*'default' for sliding_attention",
        ),
        ({"layer_types": None}, "layer_types=None is not supported with a sliding window of 8"),
    ],
)
def test_angles_of_layers_that_differ_otherwise_are_refused(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        shape_of_config(tmp_path, "Olmo3", **{**WINDOWS, **values})
