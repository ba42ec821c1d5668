"""Each family's table has its cases in the matrices that are not made from the tables."""

import pytest

from megatron_rl.weights.layout.families import FAMILIES
from tests.generation import fleet, test_sglang_layout
from tests.wrapped_models import WRAPPERS, class_of


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_family_has_cases_in_every_matrix(architecture: str) -> None:
    name, _, kind = architecture.partition("For")
    if FAMILIES[architecture].wrapper is not None:
        assert kind == "ConditionalGeneration"
        assert name in {class_of(one) for one in WRAPPERS}
        return
    served = {"Mistral", *(case.values[0] for case in test_sglang_layout.CASES)}
    assert name in served, "parameters of SGLang"
    assert name in {one["family"] for one in fleet.MODELS.values()}, "weight syncs in flight"
