"""Layers of one model that differ in attention: with and without a window, rotated and not."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.backend.device import Backend
from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config, ModelConfig, ParallelConfig
from megatron_rl.trainer.model.build import transformer_config
from megatron_rl.weights.layout.shape import read_shape
from tests.tiny_models import MIXED_WINDOWS, write_model
from tests.trainer.model.test_build import assert_logits_equal
from tests.trainer.model.test_families import PIPELINE, shape_of_config


def test_every_kind_of_a_layer_changes_the_logits(tmp_path: Path) -> None:
    model = write_model(tmp_path, family="SmolLM3", **MIXED_WINDOWS)
    assert_logits_equal(tmp_path, PIPELINE, model)
    others = [
        {**MIXED_WINDOWS, "layer_types": ["sliding_attention"] * 4},
        {**MIXED_WINDOWS, "use_sliding_window": False, "layer_types": None},
        {**MIXED_WINDOWS, "no_rope_layers": [1, 1, 1, 1]},
    ]
    ids = torch.arange(30)[None]
    with torch.no_grad():
        expected = model(ids).logits
        for number, options in enumerate(others):
            other = write_model(tmp_path / str(number), family="SmolLM3", **options)
            assert not torch.allclose(other(ids).logits, expected, atol=1e-2)


ON_GPU_HOST = """
import sys
from pathlib import Path
from megatron_rl.rehearsal import engine_stand_in
engine_stand_in.install()
import torch
from megatron_rl.backend.cpu import patches
from megatron_rl.backend.device import Backend
from megatron_rl.config.tree import Config, ModelConfig
from megatron_rl.trainer.model.build import build_frozen
from megatron_rl.weights.layout.shape import read_shape
patches.install()
backend = Backend(torch.device("cpu"), "gloo", "transformer_engine")
cfg = Config(model=ModelConfig(path=Path(sys.argv[1])))
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
backend.make_groups(cfg.parallel, seed=1, timeout_s=30)
[model] = build_frozen(backend, cfg, read_shape(cfg.model.path))
attentions = [layer.self_attention for layer in model.module.decoder.layers]
print([one.core_attention.window for one in attentions])
print([one.config.no_rope_freq[one.layer_number - 1] for one in attentions])
"""
"""Megatron's own TransformerEngine layers, around a package of shapes."""


def test_each_layer_of_transformer_engine_is_told_its_kind(tmp_path: Path) -> None:
    write_model(tmp_path, family="SmolLM3", **MIXED_WINDOWS)
    command = [sys.executable, "-c", ON_GPU_HOST, str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    # A window of 6 is 5 positions before a query's own.
    assert told.stdout.splitlines() == ["[None, 5, 5, None]", "[0, 0, 1, 1]"]


def test_a_ring_is_refused_if_any_layer_has_a_window(tmp_path: Path) -> None:
    write_model(tmp_path, family="SmolLM3", **MIXED_WINDOWS)
    backend = Backend(torch.device("cpu"), "gloo", "transformer_engine")
    cfg = Config(
        model=ModelConfig(path=tmp_path, dtype="float32"), parallel=ParallelConfig(context=2)
    )
    with pytest.raises(InputError, match="ring knows no sliding window"):
        transformer_config(backend, cfg, read_shape(tmp_path))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layer_types": None}, "layer_types=None is not supported with a sliding window of 6"),
        ({"layer_types": ["full_attention"]}, "for each of 2 layers"),
        ({"use_sliding_window": False}, "window of None: expected full_attention for each of 2"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"no_rope_layers": [1]}, r"no_rope_layers=\[1\] names 1 of 2 layers"),
    ],
)
def test_kinds_of_layers_that_are_not_clear_are_refused(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    given = {**MIXED_WINDOWS, "layer_types": ["full_attention", "sliding_attention"], **values}
    with pytest.raises(InputError, match=message):
        shape_of_config(tmp_path, "SmolLM3", **given)
