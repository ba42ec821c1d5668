"""The queue writes one row about all generators, by a clock that the test moves."""

import time
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli.status import describe, of_rows
from megatron_rl.config.files import load_config
from megatron_rl.protocol.generator_messages import EngineActivity
from megatron_rl.protocol.metrics import read_jsonl
from megatron_rl.protocol.types import GeneratorReady
from megatron_rl.rollout_queue.peer_rows import GeneratorRows, conversations_text, generators_text
from tests.rollout_queue.virtual import open_coordinator

REPLICAS = 300


def test_a_row_sums_all_generators_and_names_the_slow_and_the_hung_one(tmp_path: Path) -> None:
    def tokens(number: int, second: int) -> int:
        # Generator 7 has finished nothing since second 2.
        return {7: 20 * (second >= 2), 9: 10 * second}.get(number, 50 * second)

    with open_coordinator(tmp_path) as coordinator:
        for second in range(12):
            for number in range(REPLICAS):
                # Half of the time each has work.
                done = tokens(number, second)
                activity = EngineActivity(second / 2, second / 2, done, 4)
                ready = GeneratorReady(8, 0, session=1, activity=activity)
                coordinator.handle("prompts", f"g-{number}", ready, float(second))
            coordinator.tick(float(second))
    rows = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if "generator/tokens" in row]
    assert [row["generator/reporting"] for row in rows] == [REPLICAS] * 2
    last = rows[-1]
    # Five seconds: 298 generators finished 50 tokens a second, one 10, one none.
    assert last["generator/tokens"] == 298 * 250 + 50
    assert last["generator/busy_s"] == last["generator/idle_s"] == REPLICAS * 2.5
    assert (last["generator/running"], last["generator/running_max"]) == (1200, 4)
    assert last["generator/idle_share_max"] == 0.5
    assert (last["generator/slowest"], last["generator/busy_tokens_per_s_min"]) == ("g-7", 0.0)
    assert (last["generator/longest_unfinished"], last["generator/unfinished_s_max"]) == ("g-7", 8)
    status = of_rows(rows, load_config(None, []), state="running", now=time.time())
    assert (
        "300 generators, 1200 completions in flight, slowest g-7 (0 tok/s), "
        "g-7 has finished nothing for 8 s"
    ) in describe(status)


def test_conversations_are_counted_by_what_they_wait_for() -> None:
    def row_at(now: float, turns: int, conversations: int, waiting: int) -> dict[str, Any]:
        # Generator g-0 holds none, as its prompts have no environment.
        rows.note("g-0", 1, EngineActivity(0.0, now, 100, 4), now)
        rows.note("g-1", 1, EngineActivity(now / 4, 0.75 * now, 9, 2, turns, 12, 9), now)
        figures = EngineActivity(now, 0.0, 9, 0, turns // 2, conversations, waiting)
        rows.note("g-2", 1, figures, now)
        return rows.take_row(["g-0", "g-1", "g-2"], now) or {}

    rows = GeneratorRows()
    assert row_at(0.0, 10, 0, 0) == {}
    row = row_at(5.0, 30, 4, 4)
    # Since the start 30 and 15 replies in five seconds; then 20 and 10 in six.
    assert generators_text(row).endswith(
        "; conversations open: 16 (waiting for the environment 13, for the engine 3), "
        "turns a minute: 540"
    )
    row = row_at(11.0, 50, 1, 0)
    assert (row["generator/turns"], row["generator/conversations"]) == (30, 13)
    assert row["generator/conversations_in_environment"] == 9
    assert conversations_text(row) == (
        "conversations open: 13 (waiting for the environment 9, for the engine 4), "
        "turns a minute: 300"
    )


def test_rows_without_conversations_are_silent_about_them() -> None:
    rows = GeneratorRows()
    for now in (0.0, 5.0):
        rows.note("g", 1, EngineActivity(0.0, now, 9, 1), now)
        row = rows.take_row(["g"], now) or {}
    assert row["generator/running"] == 1 and not any("conversations" in name for name in row)
    assert "generator/turns" not in row and conversations_text(row) == ""
    assert generators_text(row) == (
        "1 generators, 1 completions in flight, slowest g (2 tok/s), g has finished nothing for 5 s"
    )


def test_generators_of_weeks_take_a_row_a_minute_together() -> None:
    rows, written = GeneratorRows(), 0
    for second in range(0, 86_400, 2):
        for number in range(3):
            rows.note(f"g-{number}", 1, EngineActivity(0.0, float(second), second), second)
        written += rows.take_row([], float(second)) is not None
    # Ten minutes of a row every 6 s, then one a minute.
    assert written == pytest.approx(100 + 1430, abs=3)


def test_what_is_lost_or_begins_anew_counts_once() -> None:
    rows, total = GeneratorRows(), 0.0
    for now, session, tokens in ((0, 1, 5), (10, 1, 30), (20, 2, 7), (40, 2, 9)):
        rows.note("g", session, EngineActivity(0.0, 1.0 + now, tokens, 1), float(now))
        # At second 20 it was silent for long, and nobody counts on it.
        row = rows.take_row([] if now == 20 else ["g"], float(now), is_last=True) or {}
        total += row["generator/tokens"]
        assert ("generator/longest_unfinished" in row) == (now != 20)
    assert total == 30 + 9
