"""Groups that are not trained on are written down and released; no prompt is lost by it."""

import gc
from pathlib import Path

from rich.console import Console

from megatron_rl.cli.verify import VerifyOptions, verify_file
from megatron_rl.config.files import dump_toml
from megatron_rl.protocol.metrics import read_jsonl
from megatron_rl.protocol.types import Rollout, SaveState
from megatron_rl.rollout_queue.drop_reasons import ZERO_VARIANCE
from megatron_rl.rollout_queue.record import Recorder
from tests.rollout_queue.makers import RIGHT, WRONG, make_group
from tests.rollout_queue.played_queue import PlayedQueue


def rollouts_in_memory() -> int:
    gc.collect()
    return sum(isinstance(thing, Rollout) for thing in gc.get_objects())


def test_rollouts_of_flat_groups_are_recorded_and_not_kept(tmp_path: Path) -> None:
    queue = PlayedQueue(tmp_path, lambda prompt, index: WRONG)
    queue.start()
    before = rollouts_in_memory()
    queue.play(50)
    # Numpy buffers make msgspec structs traceable; what is in flight is at most one capacity.
    assert rollouts_in_memory() - before <= 8
    lines = read_jsonl(tmp_path / "rollouts" / "dropped_000000.jsonl")
    groups = {line["group"] for line in lines}
    assert len(groups) >= 90 and len(lines) == 4 * len(groups)
    assert {(line["dropped"], line["reason"]) for line in lines} == {
        ("zero_variance", "wrong_answer")
    }


def test_dropped_files_hold_what_the_metrics_of_their_batch_count(tmp_path: Path) -> None:
    queue = PlayedQueue(
        tmp_path, lambda prompt, index: RIGHT if int(prompt[1:]) % 5 == 0 and index else WRONG
    )
    queue.start()
    queue.play(12)
    [batch] = queue.batches
    trained = read_jsonl(tmp_path / "rollouts" / "step_000000.jsonl")
    dropped = read_jsonl(tmp_path / "rollouts" / "dropped_000000.jsonl")
    assert {line["group"] for line in trained}.isdisjoint(line["group"] for line in dropped)
    assert "dropped" not in trained[0]
    assert batch.metrics["queue/groups_dropped_zero_variance"][0] == len(dropped) / 4
    total, count, _ = batch.metrics["rollout/reward"]
    assert count == len(trained) + len(dropped)
    # In each of the two trained groups three completions earn 1.0 and one 0.1.
    assert abs(total - (2 * 3.1 + 0.1 * len(dropped))) < 1e-9


def test_any_reason_reaches_records_metrics_and_the_saved_state(tmp_path: Path) -> None:
    queue = PlayedQueue(tmp_path, lambda prompt, index: RIGHT if index else WRONG)
    queue.start()
    list(queue.coordinator.outgoing(queue.now))
    book = queue.coordinator._groups
    group = next(iter(book._untaken.values()))
    queue.coordinator._ends.drop(group, "attempts_exhausted")
    saved = {(g.number, g.prompt_id) for g in book.unfinished()}
    assert (group.number, group.prompt.id) in saved
    # It has no scored rollout, so there is nothing to write.
    assert not (tmp_path / "rollouts" / "dropped_000000.jsonl").exists()


def test_group_that_is_dropped_but_not_yet_counted_is_saved_as_unfinished(tmp_path: Path) -> None:
    queue = PlayedQueue(tmp_path, lambda prompt, index: WRONG)
    queue.start()
    queue.play(10)
    queue.coordinator.handle("batches", "t", SaveState(0), queue.now)
    [state] = [m.message for m in queue.coordinator.outgoing(queue.now) if m.endpoint == "batches"]
    numbers = [group.number for group in state.unfinished]
    # Every group that was opened: none was counted by a batch.
    assert numbers == list(range(state.groups_opened)) and len(numbers) >= 10


def test_resumed_recorder_replaces_what_was_dropped_for_the_steps_that_are_taken_again(
    tmp_path: Path,
) -> None:
    first = Recorder(tmp_path)
    for step in (0, 1, 2):
        first.write_dropped(make_group(10 * step, [0.1, 0.1]), ZERO_VARIANCE)
        first.write_dropped(make_group(10 * step + 1, [0.1]), "attempts_exhausted")
        first.write_step(step, [make_group(10 * step + 2, [0.1, 1.0])], now=4.0)
    again = Recorder(tmp_path)
    again.resume_at(1)
    again.write_dropped(make_group(55, [0.1, 0.1]), ZERO_VARIANCE)
    again.write_step(1, [make_group(56, [0.1, 1.0])], now=4.0)
    again.write_step(2, [make_group(57, [0.1, 1.0])], now=4.0)
    folder = tmp_path / "rollouts"
    assert [line["group"] for line in read_jsonl(folder / "dropped_000000.jsonl")] == [0, 0, 1]
    assert [line["group"] for line in read_jsonl(folder / "dropped_000001.jsonl")] == [55, 55]
    assert not (folder / "dropped_000002.jsonl").exists()


def test_dropped_files_can_be_graded_again(tmp_path: Path) -> None:
    queue = PlayedQueue(tmp_path, lambda prompt, index: WRONG)
    queue.start()
    queue.play(3)
    (tmp_path / "config.toml").write_text(dump_toml(queue.config))
    console = Console(record=True, width=150)
    path = tmp_path / "rollouts" / "dropped_000000.jsonl"
    assert verify_file(VerifyOptions(path), console) == 0
    assert "no_think_start" in console.export_text()
