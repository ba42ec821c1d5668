"""A run folder whose files were cut anywhere is resumed, or the file is named."""

import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from megatron_rl.cli import main as cli
from megatron_rl.config.errors import ConfigError, InputError
from megatron_rl.config.tree import Config
from megatron_rl.data.dropped_prompts import DroppedPrompt, read_dropped, write_dropped
from megatron_rl.launcher.prompt_record import record_prompts
from megatron_rl.launcher.run_folder import (
    check_run_folder,
    checkpoints_passed_over,
    locked,
    write_config,
)
from megatron_rl.protocol.checkpoint_folder import (
    CHECKPOINTS,
    QUEUE_STATE,
    clear_after,
    find_damage,
    folder_name,
    read_complete_mark,
    read_queue_state,
    seal,
)
from megatron_rl.protocol.keys import load_keys, make_keys
from megatron_rl.protocol.metrics import iter_jsonl, stream_rows
from megatron_rl.protocol.queue_state import PromptCursor, QueueState
from megatron_rl.protocol.rollout_files import read_rollouts, write_thinned
from megatron_rl.protocol.trained_tokens import (
    TrainedTokens,
    read_trained,
    trained_path,
    write_trained,
)
from megatron_rl.protocol.types import Score
from megatron_rl.rollout_queue.evaluation import first_free_number, read_ended
from megatron_rl.rollout_queue.record import Recorder
from tests.rollout_queue.played_queue import PlayedQueue

NEWEST = f"{CHECKPOINTS}/{folder_name(2)}"
LENGTHS = 6
"""Places at which each file is cut."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Config]:
    """Files of a run of three batches, with checkpoints after the first and the second."""
    run = tmp_path_factory.mktemp("runs") / "run"
    run.mkdir()

    def judge(prompt: str, index: int) -> Score:
        return Score(float(index % 2), {"correct": float(index % 2)}, "right")

    queue = PlayedQueue(run, judge, held_out=4, train={"steps": 3}, eval={"every_steps": 1})
    queue.start()
    for version in (1, 2, 3):
        while len(queue.batches) < version:
            queue.play(1)
        queue.sync(version)
    queue.play(5)
    (run.parent / "prompts.jsonl").write_text("{}\n")
    record_prompts(queue.config, *2 * [[run.parent / "prompts.jsonl"]], is_resumed=False)
    write_dropped(run, [DroppedPrompt(f"d{n}", f"prompts.jsonl:{n}", "too long") for n in (1, 2)])
    write_config(queue.config, None)
    for step in (1, 2):
        partial = run / CHECKPOINTS / f"{folder_name(step)}.partial"
        partial.mkdir(parents=True)
        (partial / "__0_0.distcp").write_bytes(bytes(range(200)) * step)
        state = QueueState(step, PromptCursor(step, [step], [9], 0), step, [], [])
        (partial / QUEUE_STATE).write_bytes(msgspec.json.encode(state))
        seal(partial, step, {})
    values = TrainedTokens(*np.ones([3, 6], np.float32))
    write_trained(trained_path(run, 0, 0), np.array([[0, 0]]), np.array([6]), values)
    write_thinned(run / "rollouts", 1)
    make_keys(run / "keys")
    with locked(run):
        pass
    return run, queue.config


def resume(run: Path, config: Config) -> int:
    """What a start does with the files of an earlier one; the step after which it begins."""
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": run})})
    with locked(run):
        beginning = check_run_folder(config)
    found = beginning.checkpoint
    assert found is not None
    checkpoints_passed_over(config, found)
    record_prompts(config, *2 * [[run.parent / "prompts.jsonl"]], is_resumed=True)
    write_config(config, found)
    read_dropped(run)
    state = read_queue_state(found)
    mark = read_complete_mark(found)
    assert mark is not None
    # As each rank does for its part.
    if damaged := find_damage(found, mark.files):
        raise InputError(f"{found / damaged} is damaged")
    Recorder(run).resume_at(state.step)
    read_ended(run, state.step)
    first_free_number(run)
    clear_after(run / CHECKPOINTS, state.step)
    list(iter_jsonl(run / "metrics.jsonl"))
    load_keys(run / "keys")
    return state.step


def read_all(run: Path, config: Config) -> None:
    """What reports and the viewer read."""
    list(stream_rows(run / "metrics.jsonl"))
    list(read_rollouts(run))
    assert read_trained(run, 0, 9, 9) is None


@pytest.mark.parametrize(
    ("name", "resumes_after"),
    [
        ("config.toml", {2}), ("metrics.jsonl", {2}), ("alive.json", {2}), ("lock", {2}),
        ("prompts_dropped.jsonl", {2, None}), ("prompts.json", {2, None}),
        ("keys/run.key_secret", {2, None}),
        # A resumed run takes this step again, from the checkpoint before it.
        ("rollouts/step_000002.jsonl", {2}), ("rollouts/step_000002.int32", {2}),
        ("rollouts/step_000001.jsonl", {2}), ("rollouts/step_000001.int32", {2}),
        ("rollouts/trained_000000.0.npz", {2}), ("rollouts/tokens_thinned.json", {2}),
        ("rollouts/eval_before.jsonl", {2}), ("rollouts/eval_before.int32", {2}),
        (f"{NEWEST}/COMPLETE", {1}), (f"{NEWEST}/{QUEUE_STATE}", {1}),
        (f"{NEWEST}/__0_0.distcp", {1}),
    ],
)  # fmt: skip
def test_a_file_that_was_cut_is_handled_or_named(
    finished: tuple[Path, Config], tmp_path: Path, name: str, resumes_after: set[int | None]
) -> None:
    original, config = finished
    content = (original / name).read_bytes()
    shutil.copy(original.parent / "prompts.jsonl", tmp_path)
    lengths = {0, 1, len(content) - 1, *range(0, len(content), 1 + len(content) // LENGTHS)}
    found = set()
    for length in sorted(lengths - {len(content), -1}):
        for act in (read_all, resume):
            run = tmp_path / "run"
            shutil.copytree(original, run)
            record = json.loads((run / "prompts.json").read_text())
            record["files"][0]["path"] = str(tmp_path / "prompts.jsonl")
            (run / "prompts.json").write_text(json.dumps(record))
            (run / name).write_bytes(content[:length])
            try:
                step = act(run, config)
            except (InputError, ConfigError) as error:
                # Words are named by the line that they belong to.
                assert Path(name).stem in str(error), (length, act.__name__, str(error))
                step = None
            if act is resume:
                found.add(step)
            shutil.rmtree(run)
    if content:
        assert found <= resumes_after and found, found


@pytest.mark.parametrize("command", ["status", "audit"])
@pytest.mark.parametrize("name", ["summary.json", "config.toml", "prompts.json", "alive.json"])
def test_commands_name_a_file_that_was_cut(
    finished: tuple[Path, Config], tmp_path: Path, command: str, name: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    (run / "summary.json").write_text(json.dumps({"steps": 3, "wall_s": {"total": 1.0}}, indent=2))
    content = (run / name).read_bytes()
    for length in (0, 1, len(content) // 2, len(content) - 3):
        (run / name).write_bytes(content[:length])
        assert cli.main([command, str(run)]) in (0, 1, 2)
