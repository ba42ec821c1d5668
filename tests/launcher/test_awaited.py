"""What a run is said to wait for."""

from megatron_rl.config.tree import Config
from megatron_rl.launcher.live_view import Awaited

SERVING = ["queue", "generator-0", "verifier"]


def test_engine_that_starts_beside_the_cold_start_is_counted_from_its_start() -> None:
    awaited = Awaited(Config())
    awaited.enter_phase("supervised cold start")
    engine = ["generator-0"]
    assert awaited.text(engine, [*SERVING, "sft"], 100.0) == (
        "trainer ranks load the model: 0 s so far; "
        "generator-0 starts its engine (at most 900 s): 0 s so far"
    )
    awaited.note({"source": "sft", "step": 1, "train/loss": 1.0})
    assert awaited.text(engine, [*SERVING, "sft"], 130.0).startswith(
        "supervised training runs: 0 s"
    )
    awaited.enter_phase("reinforcement learning")
    text = awaited.text(engine, [*SERVING, "trainer"], 140.0)
    assert text == "generator-0 starts its engine (at most 900 s): 40 s so far"


def test_after_the_first_rollouts_the_phase_is_named() -> None:
    awaited = Awaited(Config())
    awaited.enter_phase("evaluation after the last step")
    assert "first completions" in awaited.text([], SERVING, 5.0)
    awaited.note({"source": "queue", "step": 0, "activity/rollouts_scored": 1})
    text = awaited.text([], SERVING, 9.0)
    assert text == "no news, evaluation after the last step continues: 0 s so far"
    assert awaited.text([], SERVING, 12.0).endswith("3 s so far")
