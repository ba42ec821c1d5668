"""Slices to generators that fail, die, stop and come back; see `peers.py`."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.weights.layout.shape import ModelShape
from tests.distributed import RanksFailed
from tests.weights.made_up import SHAPE
from tests.weights.plays import SLACK_S, sync, versions
from tests.weights.scripted_generators import DAWDLE_S, Generator

METHODS = ("reshard", "folder", "ipc")
METHODS_AT_LENGTH = (
    "reshard",
    pytest.param("folder", marks=pytest.mark.exhaustive),
    pytest.param("ipc", marks=pytest.mark.exhaustive),
)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "layout", [{"tensor": 2, "pipeline": 2}, {"data": 2, "bucket_bytes": 1 << 20}]
)
def test_versions_reach_generators_of_different_ranks(
    tmp_path: Path, layout: dict[str, int], method: str
) -> None:
    generators = [Generator("a", 2), Generator("b", 1), Generator("c", 0)]
    steps, notes = sync(tmp_path, generators, "sync 0, sync 1, sync 2", method=method, **layout)
    for name in "abc":
        assert versions(notes[name]) == [0, 1, 2]
    for version, step in enumerate(steps):
        assert step.failed == {} and step.held == dict.fromkeys("abc", version)
        assert step.metrics["weight_sync/generators"] == 3
        assert step.metrics["weight_sync/dropped_generators"] == 0
        assert step.metrics["weight_sync/damaged_parcels"] == 0
        peak_mb, bucket_bytes = (
            step.metrics["weight_sync/peak_extra_mb"],
            layout.get("bucket_bytes"),
        )
        # In shared memory the buffers are the senders'.
        assert (peak_mb > 0) == (method != "ipc")
        assert peak_mb * 1e6 <= 2 * (bucket_bytes or 2048)
        assert 0 < step.metrics["weight_sync/pause_s"] < step.metrics["weight_sync/s"]
    if method != "folder":
        # The same bytes each time: every rank's parameters once.
        assert len({step.metrics["weight_sync/wire_mb"] for step in steps}) == 1


@pytest.mark.parametrize("method", METHODS)
def test_engines_that_divide_experts_get_whole_ones(tmp_path: Path, method: str) -> None:
    """Bit for bit: each of their ranks compares its parameters with the version's."""
    shape = replace(
        SHAPE, architecture="Qwen3MoeForCausalLM", has_qkv_bias=False, has_qk_norm=True,
        experts=4, experts_per_token=2, moe_ffn=12, vocab=251,
    )  # fmt: skip
    generators = [
        Generator("a", 2, expert=2, shape=shape),
        Generator("b", 4, expert=2, shape=shape),
        Generator("c", 2, shape=shape),
    ]
    steps, notes = sync(
        tmp_path, generators, "sync 0, sync 1", method=method, tensor=2, shape=shape
    )
    for name in "abc":
        assert versions(notes[name]) == [0, 1]
    assert [step.metrics["weight_sync/damaged_parcels"] for step in steps] == [0, 0]


def test_a_generator_that_says_it_failed_gets_the_version_again(tmp_path: Path) -> None:
    generators = [
        Generator("a", 2, ({1: "fail pause", 3: "fail receive", 5: "fail resume"},)),
        Generator("b", 1),
        Generator("late", 1, starts_after=6),
    ]
    script = "sync 0, sync 1, admit 2, sync 2, admit 2, sync 3, admit 2, admit 3"
    steps, notes = sync(tmp_path, generators, script + ", sync 4", tensor=2)
    for step, occasion in ((steps[1], "pause"), (steps[3], "receive"), (steps[5], "resume")):
        assert f"scripted failure of {occasion}" in step.failed["a"]
        assert list(step.held) == ["b"] and step.seconds < SLACK_S
    assert versions(notes["a"]) == [0, -1, 1, -1, 2, -1, 3, 4]
    assert versions(notes["b"]) == [0, 1, 2, 3, 4]
    assert versions(notes["late"]) == [3, 4]
    assert steps[-1].metrics["weight_sync/dropped_generators"] == 3
    assert steps[-1].held == {"a": 4, "b": 4, "late": 4}


@pytest.mark.exhaustive
def test_training_goes_on_when_a_generator_is_killed_and_restarted(tmp_path: Path) -> None:
    lives = ({0: "die join"}, {1: "die pause"}, {1: "die transfer"}, {1: "die resume"}, {})
    generators = [Generator("a", 2, lives), Generator("b", 1)]
    script = ", ".join(f"sync {version}, admit 2" for version in range(5))
    steps, notes = sync(tmp_path, generators, script, tensor=2, deadline_s=6)
    for step in steps[:-2:2]:
        assert list(step.failed) == ["a"] and list(step.held) == ["b"]
        # The deadline at most, the senders' margin, and what two cores need.
        assert step.seconds < 6 + SLACK_S
    # The word that fences a dead generator may reach its successor, which then stands apart.
    assert [version for version in versions(notes["a"]) if version >= 0] == [0, 1, 2, 3, 4]
    assert versions(notes["b"]) == [0, 1, 2, 3, 4]
    assert steps[-1].metrics["weight_sync/dropped_generators"] == 4


@pytest.mark.parametrize("method", METHODS_AT_LENGTH)
@pytest.mark.parametrize("fault", ["die pause", "die transfer", "die idle"])
def test_training_goes_on_without_a_generator_that_is_killed(
    tmp_path: Path, fault: str, method: str
) -> None:
    generators = [Generator("a", 1, ({1: fault},)), Generator("b", 1)]
    script = f"sync 0, sync 1, rest {2 if fault == 'die idle' else 0}, sync 2, sync 3"
    steps, notes = sync(tmp_path, generators, script, grace_s=4, method=method)
    lost = steps[3] if fault == "die idle" else steps[1]
    assert list(lost.failed) == ["a"] and lost.seconds < SLACK_S
    assert steps[-1].held == {"b": 3} and steps[-1].seconds < SLACK_S
    assert versions(notes["b"]) == [0, 1, 2, 3]
    assert steps[-1].metrics["weight_sync/dropped_generators"] == 1


@pytest.mark.parametrize(
    ("method", "shape", "bucket_bytes"),
    # 30 MB are more than the sockets' buffers take: the senders stand still too.
    [
        ("reshard", SHAPE, 2048),
        ("ipc", SHAPE, 2048),
        ("reshard", replace(SHAPE, hidden=64, vocab=60_000), 8 << 20),
    ],
    ids=["small", "ipc", "large"],
)
def test_a_receiver_that_stops_reading_costs_one_deadline(
    tmp_path: Path, method: str, shape: ModelShape, bucket_bytes: int
) -> None:
    generators = [
        Generator("a", 2, ({1: "stop reading 1"},), shape=shape), Generator("b", 1, shape=shape)
    ]  # fmt: skip
    script = "sync 0, sync 1, admit 2"
    options = {"tensor": 2, "deadline_s": 5, "shape": shape, "bucket_bytes": bucket_bytes}
    options["method"] = method
    steps, notes = sync(tmp_path, generators, script, **options)
    # It reads on when the trainer no longer waits for it.
    assert list(steps[1].failed) == ["a"] and steps[1].seconds < 5 + SLACK_S
    # Paused for its own transfer alone.
    assert steps[1].metrics["weight_sync/pause_s"] < 5
    assert versions(notes["a"]) == [0, -1, 1]
    assert versions(notes["b"]) == [0, 1]


def test_a_generator_that_restarts_while_another_is_served_costs_no_deadline(
    tmp_path: Path,
) -> None:
    # b dies when it is paused, while rank 0 also waits for a, and says Hello again at once.
    generators = [
        Generator("a", 1, ({1: "dawdle pause"},)), Generator("b", 1, ({1: "die pause"}, {}))
    ]  # fmt: skip
    script = "sync 0, sync 1, admit 2, sync 2"
    steps, notes = sync(tmp_path, generators, script)
    # Its Hello may be read before or after a message to its former process.
    assert steps[1].failed["b"] in ("b failed: it restarted", "b is gone: cannot send Receive")
    assert list(steps[1].failed) == ["b"] and steps[1].held == {"a": 1}
    assert DAWDLE_S <= steps[1].seconds < SLACK_S
    assert versions(notes["a"]) == [0, 1, 2]
    assert [version for version in versions(notes["b"]) if version >= 0] == [0, 1, 2]
    assert steps[-1].held == {"a": 2, "b": 2}


@pytest.mark.parametrize(
    "fault",
    ["stop reading", "die transfer", "die pause", "damage", "fail receive"],
)
def test_a_fault_of_one_kind_of_engine_harms_no_other_generator(tmp_path: Path, fault: str) -> None:
    generators = [Generator("a", 2, ({1: fault, 2: fault},)), *(Generator(n, 1) for n in "bcd")]
    steps, notes = sync(
        tmp_path, generators, "sync 0, sync 1, sync 2",
        tensor=2, data=2, grace_s=5,
    )  # fmt: skip
    assert steps[0].held == dict.fromkeys("abcd", 0)
    assert list(steps[1].failed) == ["a"]
    # Nobody waits for the deadline of the one that hangs or has died.
    assert steps[1].seconds < SLACK_S and steps[1].held == dict.fromkeys("bcd", 1)
    # `sync` has compared every element with the version's.
    for name in "bcd":
        assert versions(notes[name]) == [0, 1, 2]
    if fault == "damage":
        assert steps[1].failed["a"] == "a: 1 parcels arrived damaged"
        assert steps[1].metrics["weight_sync/damaged_parcels"] == 2
    if fault == "stop reading":
        assert "no report came" in steps[1].failed["a"]
        # The pauses are those of who took the version.
        assert steps[1].metrics["weight_sync/pause_s"] < SLACK_S


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        # An engine that never joins costs the whole deadline.
        pytest.param(place, fault, marks=pytest.mark.exhaustive if is_long else ())
        for fault in ("stop reading", "die transfer", "die join", "damage", "fail receive")
        for place in (0, 1, 2)
        for is_long in [fault == "die join" and place != 1]
    ],
)
def test_a_fault_at_any_place_of_a_row_of_engines_harms_no_other(
    tmp_path: Path, fault: str, place: int
) -> None:
    """The engines are of one kind: those behind the one that fails get nothing from it."""
    others = [name for number, name in enumerate("abc") if number != place]
    # The third attempt is with each alone.
    faults = {number: fault for number in range(1, 4)} if fault == "damage" else {1: fault}
    lives = ({0: fault}, {0: fault}) if fault == "die join" else (faults,)
    generators = [Generator(n, 2, lives if n == "abc"[place] else ({},)) for n in "abc"]
    script = "sync 0, sync 1, sync 2"
    deadline_s = 8 if fault == "die join" else 60
    steps, notes = sync(tmp_path, generators, script, tensor=2, deadline_s=deadline_s, grace_s=5)
    lost = steps[0] if fault == "die join" else steps[1]
    assert list(lost.failed) == ["abc"[place]]
    assert lost.seconds < SLACK_S
    for name in others:
        assert [version for version in versions(notes[name]) if version >= 0] == [0, 1, 2]
    assert set(others) <= set(steps[-1].held)


@pytest.mark.parametrize("method", METHODS_AT_LENGTH)
def test_damaged_parcels_are_sent_once_more_and_then_never_served(
    tmp_path: Path, method: str
) -> None:
    faults = {1: "damage", 3: "damage", 4: "damage"}
    generators = [Generator("a", 2, (faults,)), Generator("b", 1)]
    script = "sync 0, sync 1, sync 2, admit 2, sync 3"
    steps, notes = sync(tmp_path, generators, script, tensor=2, method=method)
    assert steps[1].failed == {} and steps[1].metrics["weight_sync/damaged_parcels"] == 1
    assert steps[2].failed == {"a": "a: 1 parcels arrived damaged"}
    assert steps[2].metrics["weight_sync/damaged_parcels"] == 2
    assert versions(notes["a"]) == [0, 1, -1, 2, 3]
    assert versions(notes["b"]) == [0, 1, 2, 3]
    assert steps[4].metrics["weight_sync/damaged_parcels"] == 0


def test_one_that_misses_the_roll_call_is_left_out_and_harms_no_other(tmp_path: Path) -> None:
    """It is slower to get ready than the others wait, and refused when it comes."""
    generators = [Generator("a", 1, ({1: "dawdle receive 1"},)), Generator("b", 1)]
    script = "sync 0, sync 1, admit 2, sync 2"
    steps, notes = sync(tmp_path, generators, script, grace_s=4)
    assert list(steps[1].failed) == ["a"] and "it is not ready" in steps[1].failed["a"]
    assert steps[1].held == {"b": 1} and steps[1].metrics["weight_sync/pause_s"] < SLACK_S
    assert versions(notes["a"]) == [0, -1, 1, 2] and versions(notes["b"]) == [0, 1, 2]


def test_parameters_of_another_layout_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    other = Generator("a", 1, shape=replace(SHAPE, ffn=14))
    wrapped = Generator("c", 1, prefix="language_model.")
    steps, notes = sync(tmp_path, [other, Generator("b", 1), wrapped], "sync 0, meet 3, sync 1")
    for step in steps[::2]:
        assert "names that the engine does not take: lm_head.weight, model." in step.failed["c"]
        assert "parameters that nothing covers: language_model.lm_head." in step.failed["c"]
        assert "reaches outside" in step.failed["a"] or "in no slice" in step.failed["a"]
        assert "gate_up_proj" in step.failed["a"] or "down_proj" in step.failed["a"]
        assert list(step.held) == ["b"] and step.seconds < SLACK_S
    alone = sync(tmp_path_of(tmp_path), [Generator("b", 1)], "sync 0")[0][0]
    assert steps[0].metrics["weight_sync/wire_mb"] == alone.metrics["weight_sync/wire_mb"]
    assert set(versions(notes["a"])) == set(versions(notes["c"])) == {-1}
    assert versions(notes["b"]) == [0, 1]


def tmp_path_of(folder: Path) -> Path:
    inner = folder / "alone"
    inner.mkdir()
    return inner


def test_a_generator_that_never_takes_a_version_ends_training_in_time(tmp_path: Path) -> None:
    other = Generator("a", 1, shape=replace(SHAPE, ffn=14))
    [step], _ = sync(tmp_path, [other], "sync 0", join_timeout_s=4)
    assert "no generator took version 0 in 4 s (expert.weights.join_timeout_s): a: " in step.error
    assert step.seconds < 4 + SLACK_S and 2 <= len(step.outcomes) < 10


def test_a_bucket_that_is_too_small_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="InputError: .*weights.bucket_bytes.*one row"):
        sync(tmp_path, [Generator("a", 1)], "sync 0", bucket_bytes=60)


def test_a_version_never_goes_back_but_may_start_anew(tmp_path: Path) -> None:
    steps, notes = sync(tmp_path, [Generator("a", 2)], "sync 5, sync 3, sync 4")
    assert "version 3 would replace 5" in steps[1].failed["a"]
    # It stood apart, and its new group began with version 3.
    assert versions(notes["a"]) == [5, -1, 3, 4]
