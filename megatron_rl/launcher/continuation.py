"""Decides whether a start continues the queue's ledger of the launcher before it.

Used by `run.py` and `nodes.py`. A start continues what a killed launcher or a lost node has left.
After the failure of a role it does not: queue or trainer could fail again on the same messages or
batches.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_rl.config.expert import public_key
from megatron_rl.config.layers import changed_keys, changed_values, first_of
from megatron_rl.config.tree import Config
from megatron_rl.launcher.cold_start import is_due
from megatron_rl.launcher.node_errors import has_role_failed
from megatron_rl.launcher.prompt_record import changed_code
from megatron_rl.launcher.run_folder import CONFIG, earlier_config
from megatron_rl.observe.deaths import RoleDied
from megatron_rl.protocol.checkpoint_folder import step_of
from megatron_rl.protocol.ledger import FOLDER, read_began, read_built, remove_segments, segments
from megatron_rl.protocol.stop_request import is_stop_requested
from megatron_rl.protocol.stored_batches import BATCHES, remove_batches, stored_steps
from megatron_rl.protocol.wire import DeadlineExceeded
from megatron_rl.rollout_queue.states import program_digest

_NOT_THE_QUEUES = ("metrics.", "ports.", "run.dir")
"""Keys that may change: queue and trainer do the same with any value."""
_OF_THE_START = ("ports.", "run.dir")
"""Keys that differ at each start of a run."""
_MAX_LINES = 20
_MAX_CHARACTERS = 60
_FAILED = "failed"
"""File in the ledger's folder: a role failed while the ledger was written."""


def has_ledger(run_dir: Path) -> bool:
    """Whether an earlier start has left a ledger."""
    return bool(segments(run_dir / FOLDER))


def why_not_continued(config: Config, resumed: Path | None) -> str:
    """Why the ledger of the earlier start is not continued; "": it is.

    resumed: the checkpoint from which the trainer resumes. Call before anything in the run folder
    changes.
    """
    run_dir = config.run.dir
    if (run_dir / FOLDER / _FAILED).exists():
        return "a role failed"
    if is_stop_requested(run_dir):
        return "the run was asked to stop"
    if not config.keeps_batches:
        return "the run stores no batches (checkpoint.every_steps, expert.queue.ledger)"
    if config.generator.release_memory:
        return "engines share the trainer's memory (generator.release_memory)"
    if config.checkpoint.resume != "auto":
        return f"checkpoint.resume is {config.checkpoint.resume!r}"
    if is_due(config, is_resumed=resumed is not None):
        return "the cold start is not over"
    if changed := _changed_keys(config):
        return f"the configuration has changed: {changed}"
    # The queue may run it: it would answer the same messages differently.
    if code := changed_code(config):
        return f"your code has changed: {', '.join(code)}"
    began = read_began(run_dir / FOLDER, segments(run_dir / FOLDER)[-1])
    if began is None:
        return "its newest state is damaged"
    if began.program != program_digest():
        return "another version of this program wrote it"
    return _fault_of_batches(config, step_of(resumed) if resumed is not None else 0)


def _changed_keys(config: Config) -> str:
    """Keys whose values differ from those of the earlier start."""
    earlier = earlier_config(config.run.dir)
    if earlier is None:
        return "its config.toml cannot be read"
    changed = changed_keys(earlier, config)
    return first_of([key for key in changed if not key.startswith(_NOT_THE_QUEUES)])


def changed_lines(config: Config) -> list[str]:
    """A line "key: old -> new" for each key that a resumed run changes, at most _MAX_LINES.

    A line for each file of the user's functions that has changed follows. Call before the
    configuration in the run folder is replaced.
    """
    earlier = earlier_config(config.run.dir)
    if earlier is None:
        return []
    changed = changed_values(earlier, config)
    lines = [
        f"changed: {public_key(key)}: {_shown(old)} -> {_shown(new)}"
        for key, (old, new) in changed.items()
        if not key.startswith(_OF_THE_START)
    ]
    if len(lines) > _MAX_LINES:
        more = len(lines) - _MAX_LINES + 1
        lines[_MAX_LINES - 1 :] = [f"changed: {more} more keys; {CONFIG} has the earlier values"]
    return lines + [
        f"changed: {path}: figures before and after this start may not compare"
        for path in changed_code(config)
    ]


def _shown(value: object) -> str:
    text = "none" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."


def _fault_of_batches(config: Config, step: int) -> str:
    """Why the trainer could not repeat the stored batches after its checkpoint; "": it can."""
    stored = [one for one in stored_steps(config.run.dir / BATCHES) if one >= step]
    if stored != list(range(step, step + len(stored))):
        return f"batches after step {step} are missing"
    # The queue writes the ledger first; a node that loses power may keep the later files alone.
    folder, end = config.run.dir / FOLDER, step + len(stored)
    if (known := read_built(folder, segments(folder)[-1])) < end:
        return f"the ledger knows {known} batches and the trainer {end}: their node lost power"
    # The queue has the state of the latest checkpoint that the trainer began, and no earlier one.
    every = config.checkpoint.every_steps
    due = [one for one in range(step + 1, end) if one % every == 0]
    if len(due) > 1:
        return f"the checkpoint of step {due[0]} is not complete"
    return ""


def forget_queue(run_dir: Path, resumed: Path | None) -> None:
    """Remove what the queue of an earlier start knew after the checkpoint."""
    remove_segments(run_dir / FOLDER)
    (run_dir / FOLDER / _FAILED).unlink(missing_ok=True)
    since = step_of(resumed) if resumed is not None else 0
    remove_batches(run_dir / BATCHES, since=since)


@contextmanager
def failure_noted(run_dir: Path) -> Iterator[None]:
    """Have the next start begin at the newest checkpoint when a role of any node fails."""
    try:
        yield
    except (RoleDied, DeadlineExceeded) as error:
        if has_role_failed(error) and has_ledger(run_dir):
            (run_dir / FOLDER / _FAILED).touch()
        raise
