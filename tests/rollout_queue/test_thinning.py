"""Token files of old steps are removed, what a resumed run needs stays, readers say it."""

import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.observe.viewer.index import Place
from megatron_rl.observe.viewer.tokens import read_record, view_tokens
from megatron_rl.protocol.metrics import JsonlWriter, read_jsonl
from megatron_rl.protocol.rollout_files import TokensThinned, read_file, read_records, rollout_files
from megatron_rl.protocol.trained_tokens import (
    TrainedTokens,
    trained_files,
    trained_path,
    write_trained,
)
from megatron_rl.rollout_queue.drop_reasons import ZERO_VARIANCE
from megatron_rl.rollout_queue.record import Recorder
from megatron_rl.rollout_queue.record_files import NOT_REMOVED, RecordFiles, Thinner
from megatron_rl.rollout_queue.replay import StoredGroups, open_replay
from megatron_rl.rollout_queue.server import _open_writer
from tests.rollout_queue.makers import make_group

MIXED = [1.0, 0.0]
ONES = TrainedTokens(*np.ones((3, 6), np.float32))


def config_of(folder: Path, keep: int, **replay: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": folder},
            "train": {"prompts_per_batch": 4},
            "queue": {"keep_tokens_of_steps": keep},
            "replay": replay,
        }
    )


def recorder_of(config: Config) -> Recorder:
    folder = config.run.dir / "rollouts"
    folder.mkdir(parents=True, exist_ok=True)
    metrics = JsonlWriter(config.run.dir / "metrics.jsonl", "queue")
    thinner = Thinner(config, metrics)
    return Recorder(config.run.dir, writer=RecordFiles(folder, keeps_tokens=True, thinner=thinner))


def record(recorder: Recorder, steps: range, *, groups: int = 2) -> None:
    """What queue and trainer leave of each step."""
    for step in steps:
        recorder.write_dropped(make_group(100 + step, [0.0, 0.0]), ZERO_VARIANCE)
        made = [make_group(groups * step + n, MIXED, versions=(step,)) for n in range(groups)]
        recorder.write_step(step, made, now=4.0)
        write_trained(
            trained_path(recorder.run_dir, step, 0), np.array([[step, 0]]), np.array([6]), ONES
        )


def steps_with_tokens(run_dir: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {"trained": [step for step, _ in trained_files(run_dir)]}
    for kind in ("step", "dropped"):
        paths = sorted((run_dir / "rollouts").glob(f"{kind}_??????.int32"))
        found[kind] = [int(path.stem.removeprefix(f"{kind}_")) for path in paths]
    return found


def test_tokens_of_the_last_steps_stay_and_all_records(tmp_path: Path) -> None:
    recorder = recorder_of(config_of(tmp_path, 2))
    recorder.write_evaluation("before", [make_group(99, [1.0])])
    record(recorder, range(6))
    # Of the latest batch, which is in training, and the two steps before it.
    assert steps_with_tokens(tmp_path) == dict.fromkeys(("trained", "step", "dropped"), [3, 4, 5])
    files = rollout_files(tmp_path)
    assert [file.step for file in files] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, None]
    assert sum(1 for file in files for _ in read_records(file.path)) == 6 * (2 + 4) + 1
    assert (tmp_path / "rollouts/eval_before.int32").stat().st_size > 0
    # A run that is resumed at step 4 puts the tokens of later steps aside, and thins them too.
    again = recorder_of(config_of(tmp_path, 2))
    again.resume_at(4)
    record(again, range(4, 9))
    assert steps_with_tokens(tmp_path) == dict.fromkeys(("trained", "step", "dropped"), [6, 7, 8])
    aside = tmp_path / "rollouts/superseded_1"
    assert {path.suffix for path in aside.iterdir()} == {".jsonl"}


def test_the_queue_removes_files_in_the_thread_that_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()
    thin = Thinner.thin

    def noted(self: Thinner, step: int) -> None:
        threads.add(threading.get_ident())
        thin(self, step)

    monkeypatch.setattr(Thinner, "thin", noted)
    metrics = JsonlWriter(tmp_path / "metrics.jsonl", "queue")
    with _open_writer(config_of(tmp_path, 1), metrics) as writer:
        record(Recorder(tmp_path, writer=writer), range(4))
    assert steps_with_tokens(tmp_path)["step"] == [2, 3]
    assert threads and threading.get_ident() not in threads


def test_all_tokens_stay_by_default(tmp_path: Path) -> None:
    record(recorder_of(config_of(tmp_path, 0)), range(4))
    assert steps_with_tokens(tmp_path)["step"] == [0, 1, 2, 3]


def test_tokens_that_a_checkpoint_needs_to_fill_the_buffer_stay(tmp_path: Path) -> None:
    config = config_of(tmp_path, 2, buffer_groups=4, share=0.5)
    recorder = recorder_of(config)
    record(recorder, range(5))
    (tmp_path / "checkpoints/step_000005").mkdir(parents=True)
    record(recorder, range(5, 9))
    (tmp_path / "checkpoints/step_000009.partial").mkdir()
    record(recorder, range(9, 14))
    # Two groups a step are sampled: two steps before each checkpoint fill the buffer of four.
    assert steps_with_tokens(tmp_path)["step"] == [3, 4, 7, 8, 11, 12, 13]
    for step, numbers in ((5, {6, 7, 8, 9}), (9, {14, 15, 16, 17})):
        replay = open_replay(config, [])
        replay.resume_at(step)
        drawn = [replay.draw(at, []) for at in range(step, step + 8)]
        assert {group.number for one in drawn for group in one.groups} == numbers
        assert {metric.value for metric in drawn[0].of_source} == {4}


def test_a_buffer_that_outlasts_the_tokens_is_refused(tmp_path: Path) -> None:
    expected = r"buffer_groups=5 .* of 3 steps .*keep_tokens_of_steps=2 .*at least 3, or to 0"
    with pytest.raises(ValueError, match=expected):
        config_of(tmp_path, 2, buffer_groups=5, share=0.5)
    config_of(tmp_path, 3, buffer_groups=5, share=0.5)
    config_of(tmp_path, 0, buffer_groups=5, share=0.5)


def test_a_resumed_buffer_ends_at_thinned_tokens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record(recorder_of(config_of(tmp_path, 1)), range(5))
    replay = open_replay(config_of(tmp_path, 0, buffer_groups=8, share=0.5), [])
    with caplog.at_level(logging.WARNING):
        replay.resume_at(5)
    assert "tokens thinned" in caplog.text
    assert {metric.value for metric in replay.draw(5, []).of_source} == {4}


def test_readers_say_that_tokens_are_thinned_and_still_notice_lost_ones(tmp_path: Path) -> None:
    record(recorder_of(config_of(tmp_path, 1)), range(4))
    by_name = {file.path.stem: file for file in rollout_files(tmp_path)}
    old, new = by_name["step_000001"], by_name["step_000003"]
    with pytest.raises(TokensThinned, match=r"step_000001.jsonl:1: tokens thinned: .* before 2"):
        list(read_file(old))
    place = Place(old.path, 0, len(old.path.read_bytes().split(b"\n")[0]))
    with pytest.raises(InputError, match="tokens thinned"):
        view_tokens(place, read_record(place), decoder=None)
    stored = StoredGroups()
    stored.add_run(tmp_path, context_tokens=64, drops_zero_variance=True, held_out=frozenset())
    # Of the steps 2 and 3; of 0 and 1 two groups each, and one that was dropped.
    assert [group.members[0].group for group in stored.groups] == [4, 5, 6, 7]
    assert stored.left_out == {"tokens_thinned": 6, "zero_variance": 2}
    new.path.with_suffix(".int32").unlink()
    with pytest.raises(InputError, match="which does not exist") as lost:
        list(read_file(new))
    assert not isinstance(lost.value, TokensThinned)


def test_files_that_cannot_be_removed_are_counted_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = recorder_of(config_of(tmp_path, 1))
    record(recorder, range(2))
    # A folder cannot be unlinked, by nobody.
    stuck = tmp_path / "rollouts/step_000000.int32"
    stuck.unlink()
    stuck.mkdir()
    record(recorder, range(2, 5))
    assert steps_with_tokens(tmp_path) == {
        "trained": [3, 4], "step": [0, 3, 4], "dropped": [3, 4],
    }  # fmt: skip
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [(row["step"], row[NOT_REMOVED]) for row in rows] == [(2, 1)]
    assert caplog.text.count("token files of old steps stay") == 1
    stuck.rmdir()
    stuck.write_bytes(b"")
    record(recorder, range(5, 6))
    assert steps_with_tokens(tmp_path)["step"] == [4, 5]
    # The run does not end by a damaged mark either.
    (tmp_path / "rollouts/tokens_thinned.json").write_text("?")
    record(recorder, range(6, 7))
    assert steps_with_tokens(tmp_path)["step"] == [4, 5, 6]
    assert "tokens_thinned.json is damaged" in caplog.text
