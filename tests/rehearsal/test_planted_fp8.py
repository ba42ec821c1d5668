"""Rehearsed steps in FP8: what ranks exchange, and faults that are planted in them."""

from collections import Counter

import pytest

from megatron_rl.rehearsal.rehearse import Rehearsal
from tests.rehearsal.cases import OPTIONS, TINY_STEP, config_of, rehearse_cases
from tests.rehearsal.shapes import TINY, TINY_GPT_OSS, write_shape

TENSOR = ("parallel.pipeline=2", "parallel.tensor=2", "parallel.sequence=true",
          "weights.method=folder")  # fmt: skip
LAYOUTS = {
    "delayed": (TINY, ("model.fp8=delayed",)),
    "edge": (TINY, ("model.fp8=tensorwise", "expert.model.fp8_bf16_edge_layers=1")),
    "blocks": (TINY | {"hidden_size": 128, "head_dim": 32}, ("model.fp8=blockwise",)),
    "experts": (TINY_GPT_OSS, ("model.fp8=tensorwise", "parallel.expert=2")),
}
CASES = {
    "sound-delayed": "delayed", "sound-edge": "edge", "sound-blocks": "blocks",
    "sound-experts": "experts", "unreduced": "delayed", "edged": "edge",
}  # fmt: skip
pytestmark = [pytest.mark.timeout(330), pytest.mark.slow(20)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rehearsal]:
    """Rehearsals by name, from one process."""
    cases = {}
    for name, layout in CASES.items():
        values, words = LAYOUTS[layout]
        model = write_shape(tmp_path_factory.mktemp(name), values)
        cases[name] = config_of(model, *TINY_STEP, *TENSOR, *words), OPTIONS
    return rehearse_cases(tmp_path_factory.mktemp("planted"), cases)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_in_fp8_has_no_fault(found: dict[str, Rehearsal], layout: str) -> None:
    assert found[f"sound-{layout}"].problems == ()
    for stage in found[f"sound-{layout}"].stages:
        assert stage.trace.parameters == stage.planned.parameters


def sent(rehearsal: Rehearsal, kind: str, dtype: str) -> Counter[int]:
    """Calls of the first stage's tensor ranks, and of those that reduce maxima, by their bytes."""
    return Counter(
        event.bytes
        for event in rehearsal.stages[0].trace.events
        if (event.kind, event.dtype) == (kind, dtype) and event.group.startswith("TENSOR_")
    )


def test_what_a_stage_of_four_products_a_layer_exchanges_in_fp8(
    found: dict[str, Rehearsal],
) -> None:
    # 32 positions of 64 numbers, gathered six times by each of 2 layers and 3 microbatches.
    assert sent(found["sound-delayed"], "all_gather", "uint8") == {32 * 64: 6 * 2 * 3}
    # 8 products have three maxima forward and two backward, and the norms' gradients are float32.
    maxima = sent(found["sound-delayed"], "all_reduce", "float32")
    assert maxima == {8 * 3 * 4: 3, 8 * 2 * 4: 3, 4 * 64 * 4: 1}
    # One layer is in bfloat16. The other has a maximum for each tensor that is gathered first.
    assert sent(found["sound-edge"], "all_gather", "uint8") == {32 * 64: 6 * 3}
    maxima = sent(found["sound-edge"], "all_reduce", "float32")
    assert maxima == {4: 4 * 3, 4 * 64 * 4: 1}


def test_maxima_that_one_rank_does_not_reduce(found: dict[str, Rehearsal]) -> None:
    [problem, *_] = found["unreduced"].problems
    assert problem.startswith(
        "deadlock: rank 1 waits in all_gather of 4096 bytes of bfloat16 of "
        "TENSOR_MODEL_PARALLEL_GROUP [0,1], and rank 0 in all_reduce of 64 bytes of float32 of "
        "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP [0,1]"
    )


def test_a_rank_with_another_number_of_layers_in_bfloat16(found: dict[str, Rehearsal]) -> None:
    [problem, *_] = found["edged"].problems
    assert problem.startswith(
        "rank 0 and rank 1 disagree on what TENSOR_MODEL_PARALLEL_GROUP [0,1] does next: "
        "all_reduce of 4 bytes of float32, all_gather of 4096 bytes of bfloat16"
    )
    assert "attention.py" in problem
