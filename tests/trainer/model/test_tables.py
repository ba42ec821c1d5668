"""Every family from its table alone: logits and parameter counts of tiny models."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megatron_rl.config.tree import ParallelConfig
from megatron_rl.plan.parameters import model_parameters
from megatron_rl.weights.layout.shape import read_shape
from tests.family_cases import family_cases
from tests.tiny_models import write_model
from tests.trainer.model.test_build import assert_logits_equal


@pytest.mark.parametrize(("family", "options"), family_cases())
def test_a_family_is_what_its_table_says(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = write_model(tmp_path, family=family, **options)
    shape = read_shape(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert model_parameters(shape) == sum(tensor.numel() for tensor in tensors.values())
    tensor = ParallelConfig(tensor=2, sequence=shape.experts > 0)
    can_cut = shape.kv_heads % 2 == 0
    for parallel in (ParallelConfig(), tensor if can_cut else ParallelConfig(pipeline=2)):
        assert_logits_equal(tmp_path, parallel, model)
