"""Faults planted in the product's own trainer are found, each with where it is."""

import re

import pytest

from megatron_rl.config.tree import Config
from megatron_rl.rehearsal.rehearse import Options, Rehearsal
from tests.rehearsal.cases import OPTIONS, TINY_STEP, config_of, rehearse_cases
from tests.rehearsal.shapes import QWEN25_15B, TINY, TINY_GPT_OSS, write_shape

LAYOUTS = {
    "data": ("parallel.data=2",),
    "pipeline": ("parallel.pipeline=2", "parallel.tensor=2", "parallel.sequence=true"),
    "context": ("parallel.context=3",),
    "interleaved": ("parallel.pipeline=2", "parallel.virtual_stages=2"),
    "sinks": (
        "parallel.pipeline=2",
        "parallel.tensor=2",
        "parallel.sequence=true",
        "parallel.expert=2",
    ),
}
ENGINES = ("generator.replicas=3", "expert.weights.bucket_bytes=16384")
LAYOUTS["lanes"] = (*LAYOUTS["pipeline"], *ENGINES, "generator.tensor_parallel=2")
# Each stage is a root of the lane.
LAYOUTS["lane"] = ("parallel.pipeline=2", *ENGINES)
LAYOUTS["groups"] = (*LAYOUTS["lane"], "expert.weights.groups=2")
LAYOUTS["codes"] = (*LAYOUTS["lane"], "generator.quantization=fp8")
LAYOUTS["shared"] = (*LAYOUTS["data"], *ENGINES, "weights.method=ipc")
CASES = {
    "sound-lanes": "lanes", "sound-data": "data", "sound-pipeline": "pipeline",
    "sound-context": "context", "sound-interleaved": "interleaved", "sound-sinks": "sinks",
    "skipped": "data", "swapped": "pipeline", "unreceived": "pipeline", "read": "data",
    "fewer": "data", "omitted": "lane", "retyped": "lane", "reordered": "lane", "left": "lane",
    "regrouped": "groups", "halved": "groups", "narrowed": "codes", "miscounted": "codes",
    "retyped-shared": "shared", "unreleased": "shared", "crossed": "interleaved",
}  # fmt: skip
pytestmark = [pytest.mark.timeout(330), pytest.mark.slow(60)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rehearsal]:
    """Rehearsals by name, from one process."""
    folder = tmp_path_factory.mktemp("planted")
    cases: dict[str, tuple[Config, Options]] = {}
    tiny = write_shape(tmp_path_factory.mktemp("tiny"), TINY)
    sinks = write_shape(tmp_path_factory.mktemp("sinks"), TINY_GPT_OSS)
    for name, layout in CASES.items():
        model = sinks if layout == "sinks" else tiny
        cases[name] = config_of(model, *TINY_STEP, *LAYOUTS[layout]), OPTIONS
    large = write_shape(tmp_path_factory.mktemp("large"), QWEN25_15B)
    one = config_of(large, "train.microbatch_tokens=4096", "generator.context_tokens=4096",
                  "model.recompute=full")  # fmt: skip
    for name in ("sound-large", "wide"):
        cases[name] = one, Options(microbatches=1)
    return rehearse_cases(folder, cases)


SOUND = ["data", "pipeline", "context", "interleaved", "sinks", "lanes", "large"]


@pytest.mark.parametrize("name", SOUND)
def test_the_products_own_step_has_no_fault(found: dict[str, Rehearsal], name: str) -> None:
    assert found[f"sound-{name}"].problems == ()
    for stage in found[f"sound-{name}"].stages:
        assert stage.trace.parameters == stage.planned.parameters


def test_a_rank_of_gpt_oss_holds_its_part_of_each_parameter(found: dict[str, Rehearsal]) -> None:
    # Two layers, half of the 4 sinks and of 4 + 2 * 2 heads of 16, two of 4 experts of 160 units.
    attention = 2 + (4 + 2 * 2) * 16 // 2 * (64 + 1) + 64 * 4 * 16 // 2 + 64
    experts = 4 * (64 + 1) + 2 * (3 * 64 * 160 + 2 * 160 + 64)
    # The vocabulary's 250 rows are padded to 256.
    layers, vocabulary = 2 * (2 * 64 + attention + experts), 256 // 2 * 64
    first, last = (stage.trace.parameters for stage in found["sound-sinks"].stages)
    assert (first, last) == (layers + vocabulary, layers + vocabulary + 64)


def test_a_reduction_that_one_rank_leaves_out(found: dict[str, Rehearsal]) -> None:
    # Its next collective meets the reduction of the other rank, a step's metrics of the first.
    [first, *_] = found["skipped"].problems
    assert "rank 0" in first and "rank 1" in first
    assert "step.py" in first and " accumulate" in first


def test_groups_in_another_order_on_one_stage_are_a_deadlock(found: dict[str, Rehearsal]) -> None:
    [problem] = found["swapped"].problems
    assert problem.startswith("deadlock: rank ")
    assert "MODEL_PARALLEL_GROUP [0,1,2,3]" in problem and "default_pg [0,1,2,3]" in problem
    # Both stacks, side by side.
    assert re.search(r"plants\.py:\d+ <\w+> +tests?/rehearsal/plants\.py:\d+", problem)


def test_a_send_that_nobody_receives(found: dict[str, Rehearsal]) -> None:
    told = [text.partition(" in ")[0] for text in found["unreceived"].problems]
    assert told == ["rank 2 sends 1 times to rank 0", "rank 3 sends 1 times to rank 1"]


def test_two_stages_that_both_send_alone_before_they_receive(
    found: dict[str, Rehearsal],
) -> None:
    [problem, *unreceived] = found["crossed"].problems
    words = r"deadlock: rank \d waits in send of 16 bytes .*, and rank \d in send of 16 bytes "
    assert re.match(words, problem) and "plants.py" in problem
    assert [text[:20] for text in unreceived] == ["rank 0 sends 1 times", "rank 1 sends 1 times"]


def test_a_host_that_waits_for_the_loss(found: dict[str, Rehearsal]) -> None:
    [problem] = found["read"].problems
    assert "waits for the device 3 times in the passes" in problem
    assert "plants.py" in problem and " take" in problem


def test_a_tensor_that_stays_in_float32(found: dict[str, Rehearsal]) -> None:
    sound, wide = found["sound-large"].stages[0], found["wide"].stages[0]
    # 8 copies of 4,096 hidden states of 1,536 numbers.
    assert wide.trace.peak_bytes - sound.trace.peak_bytes == 8 * 4096 * 1536 * 4
    assert found["sound-large"].notes == ()


def test_another_number_of_microbatches(found: dict[str, Rehearsal]) -> None:
    assert found["fewer"].problems[0] == (
        "rank 1 takes 2 microbatches, and rank 0 takes 3: every rank needs as many"
    )


def test_an_engine_rank_that_leaves_out_a_round_of_a_weight_sync(
    found: dict[str, Rehearsal],
) -> None:
    # The last stage alone has something for the last round.
    sender, unreceived = found["omitted"].problems
    assert re.match(r"rank 1 waits in send of \d+ bytes of uint8 with rank 0 of engine 0 of "
                    r"WEIGHT_SYNC_LANE \[0..4\] for rank 0 of engine 0, which has ended",
                    sender)  # fmt: skip
    assert "group_transport.py" in sender and " send" in sender
    assert unreceived.startswith("rank 1 sends 1 times to rank 0 of engine 0 in WEIGHT_SYNC_LANE")


def test_rounds_of_a_weight_sync_in_another_order_on_one_rank(found: dict[str, Rehearsal]) -> None:
    problems = found["reordered"].problems
    assert problems[0].startswith("rank 0 sends send of ")
    assert "rank 0 of engine 0 receives" in problems[0]


@pytest.mark.parametrize(
    ("name", "ratio"), [("retyped", 2), ("retyped-shared", 2), ("narrowed", 0.5)]
)
def test_an_engine_rank_that_takes_another_dtype(
    found: dict[str, Rehearsal], name: str, ratio: float
) -> None:
    sizes = re.match(r".+ sends send of (\d+) bytes .+ receives recv of (\d+) bytes",
                     found[name].problems[0])  # fmt: skip
    assert sizes is not None
    sent, received = (int(size) for size in sizes.groups())
    # 24 bytes of digest and version.
    assert received - 24 == ratio * (sent - 24)


def test_groups_of_engines_in_another_order_on_one_rank(found: dict[str, Rehearsal]) -> None:
    # Engines 0 and 2 are the first group, and engine 1 is the second one.
    [problem] = found["regrouped"].problems
    assert problem.startswith("deadlock: rank 1 waits in connect of 0 bytes of nothing of "
                              "WEIGHT_SYNC_LANE [0,1,3], and rank 0 in connect of 0 bytes of "
                              "nothing of WEIGHT_SYNC_LANE [0,1,2,4]")  # fmt: skip


def test_an_engine_that_is_in_another_group_than_the_trainer_says(
    found: dict[str, Rehearsal],
) -> None:
    [problem] = found["halved"].problems
    assert problem.startswith("deadlock: rank 0 of engine 1 waits in connect of 0 bytes of "
                              "nothing of WEIGHT_SYNC_LANE [0,1,2,3], and rank 0 in connect of "
                              "0 bytes of nothing of WEIGHT_SYNC_LANE [0,1,3]")  # fmt: skip
    assert "engine_rank.py" in problem


def test_an_engine_rank_that_quantises_before_its_layer_is_complete(
    found: dict[str, Rehearsal],
) -> None:
    [problem] = found["miscounted"].problems
    assert problem.startswith("rank 0 of engine 0 failed:")
    assert problem.rstrip().endswith(
        "model.layers.0.self_attn.qkv_proj.weight: 1 more elements came than announced"
    )


def test_an_engine_rank_that_keeps_shared_memory(found: dict[str, Rehearsal]) -> None:
    sender, *unreceived = found["unreleased"].problems
    assert sender.startswith("rank 0 waits in recv of 0 bytes of uint8 with rank 0 of engine 0 of "
                             "SHARED_MEMORY for rank 0 of engine 0, which has ended")  # fmt: skip
    assert "shared_transport.py" in sender and " finish" in sender
    # The trainer's ranks hear no more of the other engine either.
    assert [text.partition(" in ")[0] for text in unreceived] == [
        f"rank 0 of engine 1 sends 1 times to rank {rank}" for rank in (0, 1)
    ]


def test_a_rank_that_waits_in_a_lane_that_the_others_have_left(
    found: dict[str, Rehearsal],
) -> None:
    [problem] = found["left"].problems
    assert problem.startswith("deadlock: rank 1 waits in broadcast (root 0) of 8 bytes of int64 of "
                              "HOST_MEMORY [0,1], and rank 0 in all_reduce of 4 bytes of "
                              "float32 of WEIGHT_SYNC_LANE [0..4]")  # fmt: skip
    assert "plants.py" in problem
