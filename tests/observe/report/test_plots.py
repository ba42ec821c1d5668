import json
from pathlib import Path

import pytest

from megatron_rl.observe.report import figures, timeline
from megatron_rl.observe.report.timeline import Span
from tests.observe.report.runs import leave_run, lines, read, rollout, step_row


def by_title(path: Path, *others: Path) -> dict[str, figures.Plot]:
    return {plot.title: plot for plot in figures.plots([read(p) for p in (path, *others)])}


def test_staleness_is_counted_from_the_oldest_token(tmp_path: Path) -> None:
    run = read(leave_run(tmp_path / "run"))
    # Step 0: three of version 0. Step 1: one that began under 0, one of 1; a torn line is left.
    assert dict(run.staleness) == {0: 4, 1: 1}
    assert sorted(run.lengths) == [7, 7, 7, 7, 9]
    bars = by_title(tmp_path / "run")["Staleness of rollouts"].figure.data[0]
    assert list(bars.x) == [0, 1] and list(bars.y) == [4, 1]


def test_accuracy_has_a_line_for_each_set_with_bands_of_95_percent(tmp_path: Path) -> None:
    held_out, aime = by_title(leave_run(tmp_path / "run"))["Accuracy of evaluations"].figure.data
    assert (held_out.name, aime.name) == ("held-out", "aime")
    assert list(held_out.x) == [0, 2] and list(held_out.y) == [0.25, 0.75]
    assert list(held_out.error_y.array) == pytest.approx([0.196, 0.196])
    assert list(aime.x) == [2] and list(aime.y) == [0.5]
    alone = {"time": 122.0, "source": "queue", "step": 2, "label": "after.one",
             "eval/accuracy": 0.5, "eval/n": 1}  # fmt: skip
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(alone) + "\n")
    line = by_title(tmp_path / "run")["Accuracy of evaluations"].figure.data[-1]
    assert (line.name, list(line.y), list(line.error_y.array)) == ("one", [0.5], [None])


def test_plots_without_data_are_left_out_and_runs_keep_their_names(tmp_path: Path) -> None:
    alone = by_title(leave_run(tmp_path / "one"))
    assert {"Reward", "Dropped groups", "Verdicts", "Seconds of a step"} <= set(alone)
    assert {"Entropy", "Stage", "Logprob gap"} & set(alone) == set()
    both = by_title(tmp_path / "one", leave_run(tmp_path / "two"))
    names = [curve.name for curve in both["Reward"].figure.data]
    assert names == ["one: reward", "two: reward"]


def test_environments_take_shares_of_tokens_and_time_of_each_step(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "run")
    # A second each between lease and return. Of 10 tokens 3 and 6 are given.
    held = [
        rollout(1, 0, [0, 0], tokens=10, environment_s=0.5, spans=[[0, 0, 4], [0, 7, 10]]),
        rollout(1, 1, [0], tokens=10, environment_s=0.25, spans=[[0, 0, 1], [0, 5, 7], [1, 9, 10]]),
        rollout(1, 2, [0], tokens=90, spans=[[0, 0, 90]]),
    ]
    assert {"Turns of conversations", "Shares of environments"} & set(by_title(folder)) == set()
    (folder / "rollouts" / "step_000001.jsonl").write_text(lines(held))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(lines([step_row(3, 130.0, environment__turns=2.5)]))
    found = by_title(folder)
    given, waited = found["Shares of environments"].figure.data
    assert (given.name, waited.name) == ("tokens given", "time waiting")
    # The batch of file 1 is of step 2; no other step has conversations.
    assert list(given.x) == list(waited.x) == [2]
    assert list(given.y) == [9 / 20] and list(waited.y) == [0.75 / 2]
    [turns] = found["Turns of conversations"].figure.data
    assert (list(turns.x), list(turns.y)) == ([3], [2.5])


def test_spans_follow_from_the_ends_of_steps(tmp_path: Path) -> None:
    found = timeline.spans(read(leave_run(tmp_path / "run")))
    trainer = [span for span in found if span.role == "trainer"]
    # The first row is of 110.0: 0.5 s weight sync, 2 s update, 1.5 s wait before.
    assert trainer[:3] == [
        Span("trainer", "waits", 106.0, 107.5),
        Span("trainer", "update", 107.5, 109.5),
        Span("trainer", "weight sync", 109.5, 110.0),
    ]
    assert Span("generators", "generates", 108.0, 112.0, 0.75) in found
    assert Span("evaluations", "before", 100.0, 103.0) in found


def test_the_trace_begins_at_zero_and_holds_every_rollout(tmp_path: Path) -> None:
    events = json.loads(timeline.trace(read(leave_run(tmp_path / "run"))))["traceEvents"]
    roles = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    timed = [event for event in events if event["ph"] != "M"]
    assert min(event["ts"] for event in timed) == 0
    begun = [e for e in timed if e["ph"] == "b" and e["name"] == "generate"]
    assert len(begun) == 5 and {roles[e["tid"]] for e in begun} == {"generator-0"}
    ended = {e["id"]: e["ts"] for e in timed if e["ph"] == "e" and e["name"] == "verify"}
    # Leased at 100.0 with the first event, scored 1.5 s later.
    assert len(ended) == 5 and set(ended.values()) == {1_500_000}
    updates = [e for e in timed if e["name"] == "update"]
    assert [e["dur"] for e in updates] == [2_000_000, 2_000_000]
