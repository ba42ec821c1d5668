from pathlib import Path

import pytest

from megatron_rl.observe.exporters import follow
from megatron_rl.observe.exporters.follow import Follower, numbers, set_suffix
from tests.observe.exporters.rows import row, write


def test_each_row_comes_once_and_a_torn_one_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    assert follower.read() == []
    write(path, [row("trainer", 0), row("trainer", 1)], end='{"time": 7, "sou')
    assert [r["step"] for r in follower.read()] == [0, 1]
    assert follower.read() == []
    write(path, [], end='rce": "queue", "step": 2}\n')
    assert follower.read() == [{"time": 7, "source": "queue", "step": 2}]


def test_a_long_file_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "CHUNK_BYTES", 50)
    path = tmp_path / "metrics.jsonl"
    write(path, [row("trainer", step, train__loss=1.0) for step in range(20)])
    follower, steps = Follower(path), []
    while rows := follower.read():
        steps += [r["step"] for r in rows]
    assert steps == list(range(20))


def test_what_was_taken_again_is_left_out_of_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    resumed = row("launch", 1, launch__resumed=1)
    rows = [row("trainer", 1, train__loss=1.0), row("trainer", 2, train__loss=2.0), resumed,
            row("trainer", 2, train__loss=3.0)]  # fmt: skip
    write(path, rows)
    write(path, [], end='{"time": 7, "sou')
    follower = Follower(path)
    kept = [r for chunk in follower.read_all() for r in chunk]
    assert [r["train/loss"] for r in kept if r["source"] == "trainer"] == [1.0, 3.0]
    write(path, [], end='rce": "queue", "step": 2}\n')
    assert follower.read() == [{"time": 7, "source": "queue", "step": 2}]


def test_only_numbers_with_an_area_are_metrics() -> None:
    given = row("queue", 3, label="before", eval__n=4, activity__diagnosis="bad", engine="sglang")
    assert numbers(given) == {"eval/n": 4.0}
    assert set_suffix(given) == "" and set_suffix({"label": "step_10.aime24"}) == "/aime24"
