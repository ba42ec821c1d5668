"""What is told of an evaluation that goes on, and when it is told no more."""

from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_rl.config.files import load_config
from megatron_rl.observe.run_state import EvaluationProgress, RunState, warnings_of


def going_on(at: float, label: str, done: int, wanted: int = 2400) -> dict[str, Any]:
    return {
        "time": at, "source": "queue", "step": 0, "activity/seconds": 5.0, "eval/running": label,
        "eval/completions_done": done, "eval/completions_wanted": wanted,
    }  # fmt: skip


def test_the_rest_takes_as_long_as_the_speed_of_this_start_says() -> None:
    progress = EvaluationProgress()
    assert progress.text() == ""
    # 1,000 are of an earlier start: they say nothing about speed.
    progress.note(going_on(100.0, "model.aime", 1000))
    assert progress.text() == "evaluation model.aime: 1,000 of 2,400 completions scored"
    progress.note({"time": 101.0, "source": "generator-0", "step": 0, "generator/busy_s": 1.0})
    progress.note(going_on(110.0, "model.aime", 1100))
    # 10 a second, 1,300 left.
    assert progress.text().endswith("1,100 of 2,400 completions scored, about 2 min 10 s left")
    # The figures of a set; the next one goes on at the same speed.
    progress.note({"time": 120.0, "source": "queue", "label": "model.aime", "eval/n": 30})
    assert progress.text() == ""
    progress.note(going_on(150.0, "model.gpqa", 1500))
    assert progress.text().endswith("1,500 of 2,400 completions scored, about 1 min 30 s left")


def test_another_evaluation_has_a_speed_of_its_own_and_training_ends_the_line() -> None:
    progress = EvaluationProgress()
    progress.note(going_on(100.0, "before", 0))
    progress.note(going_on(200.0, "before", 100))
    progress.note(going_on(900.0, "step_10", 5))
    assert progress.text() == "evaluation step_10: 5 of 2,400 completions scored"
    progress.note({"time": 905.0, "source": "queue", "step": 10, "activity/seconds": 5.0})
    assert progress.text() == ""


def test_a_resumed_run_has_the_nodes_and_peers_of_its_own_start() -> None:
    run, peers = RunState(), {"generators": 1, "generators_wanted": 2, "verifiers": 1,
                              "verifiers_wanted": 2, "missing": "generator-1"}  # fmt: skip
    told = {f"peers/{name}": value for name, value in peers.items()}
    run.take({"time": 1.0, "source": "queue", "step": 0, **told})
    run.take({"time": 2.0, "source": "launch", "launch/nodes": 2, "node_event": "node 1 is back"})
    assert run.nodes == "nodes 2; node 1 is back" and set(run.peers.missing) == {"generator-1"}
    run.take({"time": 3.0, "source": "launch", "step": 4, "launch/resumed": 1})
    assert run.take({"time": 4.0, "source": "launch", "launch/nodes": 1}) == "other"
    assert (run.nodes, run.peers.missing, run.peers.text()) == ("", {}, "")


def test_the_bar_is_as_long_as_the_share_that_is_done() -> None:
    progress = EvaluationProgress()
    progress.note(going_on(100.0, "before", 600))
    console = Console(width=120, force_terminal=True, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(progress.bar())
    # A quarter of 30 columns, in halves.
    assert captured.get().count("━") == 7 and captured.get().count("╸") == 1


def test_staleness_that_a_stage_allows_is_no_warning(tmp_path: Path) -> None:
    path = tmp_path / "staged.toml"
    path.write_text("""
[queue]
max_staleness = 1
[[stages]]
at_step = 5
queue = {max_staleness = 3}
""")
    config, name = load_config(path), "queue/staleness_versions_mean"
    assert name not in warnings_of([{name: 2.5}], config)
    assert "above 3" in warnings_of([{name: 3.5}], config)[name]
