from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_rl.observe.exporters.tensorboard import TensorBoardWriter
from tests.observe.exporters.rows import row


def read(folder: Path, tag: str) -> list[tuple[int, float, float]]:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [(e.step, e.value, e.wall_time) for e in accumulator.Scalars(tag)]


def test_their_own_reader_finds_what_was_written(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path)
    rows = [row("trainer", step, train__loss=step / 8) for step in range(5)]
    writer.add(rows[:2])
    # Nothing waits for the end of the run to be seen.
    assert [value for _, value, _ in read(tmp_path / "trainer", "train/loss")] == [0, 0.125]
    writer.add([*rows[2:], row("queue", 4, label="step_4.aime", eval__accuracy=0.5)])
    writer.close()
    expected = [(step, step / 8, 1000.0 + step) for step in range(5)]
    assert read(tmp_path / "trainer", "train/loss") == expected
    assert read(tmp_path / "queue", "eval/accuracy/aime") == [(4, 0.5, 1004.0)]


def test_what_was_there_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    for loss in (1.0, 2.0):
        writer = TensorBoardWriter(tmp_path)
        writer.add([row("trainer", 1, train__loss=loss)])
        writer.close()
        (tmp_path / "trainer" / "notes.txt").write_text("mine")
    assert [value for _, value, _ in read(tmp_path / "trainer", "train/loss")] == [2.0]
    assert (tmp_path / "trainer" / "notes.txt").exists()


def test_the_first_row_has_no_step_below_zero(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path)
    writer.add([row("trainer", -1, trainer__tp=2)])
    writer.close()
    assert read(tmp_path / "trainer", "trainer/tp")[0][:2] == (0, pytest.approx(2.0))
