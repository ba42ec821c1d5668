"""Reads the run folders of a sweep: complete, failed or of another configuration.

Used by `megatron-rl sweep`.
"""

from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import ConfigError, load_config
from megatron_rl.config.layers import leaves
from megatron_rl.config.tree import Config
from megatron_rl.launcher.prompt_record import pin_revisions
from megatron_rl.launcher.run_folder import CONFIG, SUMMARY
from megatron_rl.observe.facts import steps_at_end
from megatron_rl.protocol.checkpoint_folder import CHECKPOINTS, complete_checkpoints
from megatron_rl.sweep.plan import PlannedRun

FAILURE = "sweep_failure.txt"
"""File in a run folder with the error of a failed run."""
_SHOWN_KEYS = 3
_SHOWN_RUNS = 10
_STEPS = "train.steps"
# A run replaces these keys when it starts.
_RESOLVED = ("run.dir", "ports.")


class State(Enum):
    COMPLETE = "complete"
    FAILED = "failed"
    STARTED = "interrupted"
    NEW = "not started"


def state_of(run: PlannedRun) -> State:
    if _has_ended(run):
        return State.COMPLETE
    if (run.run_dir / FAILURE).exists():
        return State.FAILED
    return State.STARTED if (run.run_dir / CONFIG).exists() else State.NEW


def _has_ended(run: PlannedRun) -> bool:
    folder = run.run_dir
    if not (folder / CONFIG).exists() or not (folder / SUMMARY).exists():
        return False
    config = pin_revisions(run.config) if run.config.train.epochs else run.config
    return steps_at_end(folder) >= config.train.steps


def failure_of(run: PlannedRun) -> str:
    """Error of the last attempt; empty unless it failed."""
    path = run.run_dir / FAILURE
    return path.read_text().strip() if path.exists() else ""


def check_folders(runs: Sequence[PlannedRun]) -> None:
    """Raise InputError when a folder holds a run with another configuration than planned.

    A larger train.steps is allowed when the folder has a checkpoint to resume from.
    """
    found = [(run, text) for run in runs if (text := _contradiction(run))]
    if found:
        texts = "\n".join(f"  {run.label}: {text}" for run, text in found[:_SHOWN_RUNS])
        if len(found) > _SHOWN_RUNS:
            texts += f"\n  and {len(found) - _SHOWN_RUNS} more runs"
        raise InputError(
            f"the sweep differs from the runs in its folder:\n{texts}\n"
            "Undo the change, give the sweep another folder with --sweep-dir DIR, or move these "
            f"run folders away, such as {found[0][0].run_dir}"
        )


def _contradiction(run: PlannedRun) -> str:
    path = run.run_dir / CONFIG
    if not path.exists():
        return ""
    try:
        saved = load_config(path)
    except ConfigError as error:
        return f"{path} is of another version: {error}"
    there, planned = _values(saved), _values(run.config)
    if there == planned:
        return ""
    # A run saves what it decided: commits, think tags, steps.
    planned = _values(pin_revisions(run.config))
    changed = [key for key in planned | there if there.get(key) != planned.get(key)]
    is_longer = changed == [_STEPS] and run.config.train.steps > saved.train.steps
    if is_longer and complete_checkpoints(run.run_dir / CHECKPOINTS):
        return ""
    texts = [f"{key} was {there.get(key)}, is {planned.get(key)}" for key in changed]
    more = len(texts) - _SHOWN_KEYS
    return "; ".join(texts[:_SHOWN_KEYS]) + (f"; and {more} more" if more > 0 else "")


def _values(config: Config) -> dict[str, str]:
    """Key -> value as text, without _RESOLVED."""
    found = leaves(config.model_dump(), "")
    return {key: _text(value) for key, value in found if not key.startswith(_RESOLVED)}


def _text(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    # A script may have given a path as absolute, with symbolic links resolved.
    return str(value.resolve() if isinstance(value, Path) else value)
