"""Steps that keep tensors in host memory: references, exact KL, router replay, offloading."""

import re

import pytest

from megatron_rl.rehearsal.events import PASSES
from megatron_rl.rehearsal.rehearse import Rehearsal
from tests.rehearsal.cases import OPTIONS, TINY_STEP, config_of, rehearse_cases
from tests.rehearsal.shapes import TINY, TINY_GPT_OSS, write_shape

PLAIN = ("parallel.data=2", "weights.method=folder")
REFERENCE = (*PLAIN, "algorithm.reference.policy=start", "algorithm.kl.placement=loss")
EXACT = (*REFERENCE, "algorithm.kl.estimator=exact")
OFFLOAD = (*PLAIN, "parallel.distributed_optimizer=true", "optimizer.offload=true")
CHOICES = (
    "parallel.tensor=2",
    "parallel.sequence=true",
    "parallel.expert=2",
    "model.recompute=full",
    "train.router_replay=true",
    "weights.method=folder",
)
CASES = {
    "sound-plain": PLAIN, "sound-reference": REFERENCE, "sound-exact": EXACT, "awaited": EXACT,
    "sound-offload": OFFLOAD, "sound-choices": CHOICES, "widened": CHOICES,
}  # fmt: skip
pytestmark = [pytest.mark.timeout(330), pytest.mark.slow(25)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rehearsal]:
    """Rehearsals by name, from one process."""
    tiny = write_shape(tmp_path_factory.mktemp("tiny"), TINY)
    experts = write_shape(tmp_path_factory.mktemp("experts"), TINY_GPT_OSS)
    cases = {
        name: (config_of(experts if keys is CHOICES else tiny, *TINY_STEP, *keys), OPTIONS)
        for name, keys in CASES.items()
    }
    return rehearse_cases(tmp_path_factory.mktemp("copies"), cases)


@pytest.mark.parametrize("name", ["plain", "reference", "exact", "offload", "choices"])
def test_the_products_own_step_has_no_fault(found: dict[str, Rehearsal], name: str) -> None:
    assert found[f"sound-{name}"].problems == ()
    for stage in found[f"sound-{name}"].stages:
        assert stage.trace.parameters == stage.planned.parameters


@pytest.mark.parametrize(
    ("name", "count", "place"),
    [
        # Each of four layers is recomputed for each of three microbatches.
        ("widened", 12, "router_replay.py:"),
        ("awaited", 3, "forward_backward.py:"),
    ],
)
def test_a_host_that_waits_for_a_copy_to_the_device(
    found: dict[str, Rehearsal], name: str, count: int, place: str
) -> None:
    [problem] = found[name].problems
    assert f"waits for the device {count} times in the passes" in problem
    assert re.search(r"plants\.py:\d+ to\n", problem) and place in problem


def test_a_reference_costs_a_forward_pass_and_the_memory_of_its_logprobs(
    found: dict[str, Rehearsal],
) -> None:
    plain, compared = (found[f"sound-{name}"].stages[0].trace for name in ("plain", "reference"))
    # Multiplied with each of 3 x 64 tokens: 4 layers, and 256 rows of the output layer.
    layer = (4 + 2 * 2) * 16 * 64 + 64 * 64 + 3 * 160 * 64
    forward = 3 * 64 * 2 * (4 * layer + 256 * 64)
    assert compared.flops - plain.flops == pytest.approx(forward, rel=0.03)
    # Sequences of 24, 24 and 16 tokens, an eighth of which are prompts. The reference's weights are
    # in host memory, and trade places with the policy's.
    completions = 3 * (21 + 21 + 14)
    assert 4 * completions <= compared.peak_bytes - plain.peak_bytes <= 8 * completions


def test_an_exact_kl_keeps_hidden_states_in_the_host_and_waits_for_none(
    found: dict[str, Rehearsal],
) -> None:
    plain, exact = (found[f"sound-{name}"].stages[0].trace for name in ("reference", "exact"))
    assert not [read for read in exact.reads if read.phase in ("prepare", PASSES)]
    # In bfloat16: 64 numbers for each completion token, and 256 rows of the output layer.
    assert exact.host_bytes - plain.host_bytes == 2 * 64 * (3 * (21 + 21 + 14) + 256)


def test_choices_of_experts_are_copied_to_recomputed_layers_as_narrow_as_they_are(
    found: dict[str, Rehearsal],
) -> None:
    narrow, wide = (
        found[name].stages[0].trace.copied_bytes["to device"]
        for name in ("sound-choices", "widened")
    )
    # int64 instead of int16: three microbatches of 32 positions, two experts in four layers.
    assert wide - narrow == (8 - 2) * 3 * 32 * 2 * 4


def test_an_offloaded_optimizer_has_masters_gradients_and_moments_in_the_host(
    found: dict[str, Rehearsal],
) -> None:
    [stage] = found["sound-offload"].stages
    # Megatron aligns where a parameter begins: a rank's part may be some numbers larger.
    mine = stage.trace.parameters // 2
    assert "optimizer" not in stage.trace.peak_parts
    assert stage.trace.host_bytes == pytest.approx((4 + 4 + 8) * mine, rel=1e-3)
    copied = stage.trace.copied_bytes
    # Gradients in float32, parameters in bfloat16; besides them the batch and the metrics.
    assert 0 <= copied["to host"] - 4 * mine < 16384
    assert 0 <= copied["to device"] - 2 * mine < 32768
