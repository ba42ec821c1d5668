import json
from pathlib import Path

from megatron_rl.protocol.metrics import (
    CONTINUED,
    FIRST_STEP,
    RESUMED,
    JsonlWriter,
    Metric,
    MetricSet,
    drop_torn_line,
    read_jsonl,
    stream_rows,
)


def test_metrics_reduce_from_sums_and_counts_not_as_means_of_means() -> None:
    first, second = MetricSet(), MetricSet()
    first.add([Metric("a", 9.0, "mean", 3), Metric("b", 2.0, "max"), Metric("c", 1.0, "sum")])
    second.add([Metric("a", 1.0, "mean", 1), Metric("b", -5.0, "max"), Metric("c", 4.0, "sum")])
    first.add_entries(second.entries())
    # (9 + 1) / (3 + 1), not the mean of 3 and 1.
    assert first.values() == {"a": 2.5, "b": 2.0, "c": 5.0}


def test_mean_over_nothing_is_left_out_and_clear_forgets() -> None:
    metrics = MetricSet()
    metrics.add([Metric("a", 0.0, "mean", 0), Metric("b", 0.0, "sum", 0)])
    assert metrics.values() == {"b": 0.0}
    metrics.clear()
    assert metrics.values() == {}


def test_rows_are_appended_by_several_writers_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    for source in ("queue", "trainer"):
        writer = JsonlWriter(path, source)
        writer.write(3, {"x": 1.5})
        writer.close()
    with path.open("a") as file:
        file.write('{"time": 1, "sour')
    rows = read_jsonl(path)
    read = [(row["source"], row["step"], row["x"]) for row in rows]
    assert read == [("queue", 3, 1.5), ("trainer", 3, 1.5)]
    assert read_jsonl(tmp_path / "none.jsonl") == []


def test_steps_that_were_taken_again_after_resuming_count_once(tmp_path: Path) -> None:
    def row(step: int, source: str = "trainer", **more: int) -> dict:
        return {"source": source, "step": step, **more}

    first = [row(-1), row(1), row(2), row(2, "queue"), row(3), row(3, "queue"), row(3, "sft")]
    second = [row(-1), row(2), row(3), row(4)]
    third = [row(5)]
    marks = [row(2, "launch", **{RESUMED: 1}), row(4, "launch", **{RESUMED: 1})]
    rows = [*first, marks[0], *second, marks[1], *third]
    kept = [*first[:4], first[6], marks[0], *second, marks[1], *third]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows) + '{"source": "torn')
    assert list(stream_rows(path)) == kept
    assert list(stream_rows(tmp_path / "none.jsonl")) == []


def test_steps_that_a_restarted_trainer_repeats_count_once(tmp_path: Path) -> None:
    def row(step: int, source: str = "trainer", **more: int) -> dict:
        return {"source": source, "step": step, **more}

    begun = [row(-1, **{FIRST_STEP: first}) for first in (0, 2)]
    # The launcher started it again, and the queue continued its ledger.
    begun.append(row(2, "launch", **{RESUMED: 1, CONTINUED: 1}))
    first = [row(1), row(2), row(3, "queue"), row(3)]
    second = [row(3), row(4, "queue"), row(4)]
    third = [row(3), row(4), row(5)]
    rows = [begun[0], *first, begun[1], *second, begun[2], *third]
    kept = [begun[0], *first[:3], begun[1], second[1], begun[2], *third]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    assert list(stream_rows(path)) == kept


def test_a_torn_last_line_is_found_from_the_end_and_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    # Longer than a block that is read at once, and a file that has no whole line.
    for whole, torn in ((b'{"a": 1}\n', b"x" * 200_000), (b"", b"y" * 70_000), (b"{}\n", b"")):
        path.write_bytes(whole + torn)
        drop_torn_line(path)
        assert path.read_bytes() == whole
