"""The folder of a run: new or to resume, and locked for one launcher at a time.

Used by the launcher.
"""

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import ConfigError, dump_toml, load_config
from megatron_rl.config.layers import changed_keys, first_of
from megatron_rl.config.tree import Config
from megatron_rl.launcher.cold_start import (
    first_model,
    is_of_cold_start,
    left_behind_text,
    reuse_text,
    rows_of_cold_start,
    steps_left_behind,
)
from megatron_rl.launcher.stopped import kill_left_stopped
from megatron_rl.observe.facts import KEPT_CONFIGS, kept_config_name, steps_at_end
from megatron_rl.observe.heartbeat import ALIVE, Heartbeat, find_living
from megatron_rl.protocol.checkpoint_folder import (
    CHECKPOINTS,
    SFT_CHECKPOINTS,
    damaged,
    find_resume,
    has_begun,
    is_checkpoint_of,
    passed_over,
    set_aside_later,
    step_of,
)
from megatron_rl.protocol.failure import FAILURES
from megatron_rl.protocol.metrics import CONTINUED, RESUMED, JsonlWriter, drop_torn_line, iter_jsonl
from megatron_rl.protocol.process import Interrupted
from megatron_rl.protocol.whole_file import PRIVATE_FOLDER, make_private, write_whole
from megatron_rl.weights.layout.shape import read_shape

CONFIG = "config.toml"
SUMMARY = "summary.json"
_OTHER_FOLDER = "Name another folder with --run-dir DIR (or run.dir=DIR)"
_LOCK = "lock"
_LOCK_WAIT_S = 20.0
"""Processes of a killed launcher hold the lock until they notice its end."""
STATUS_WATCH_S = 10.0
"""Longest watch of a launcher on another host, in seconds."""
# Errors of flock on Lustre without -o flock and on NFS without a lock service.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Beginning:
    """Where a run begins."""

    checkpoint: Path | None
    """The complete checkpoint to resume from; None: start from the beginning."""
    is_again: bool = False
    """The folder holds an earlier part or attempt of the run."""
    ended_after: int = 0
    """Last step of a run that had ended and now takes more; 0: it had not ended."""


def check_run_folder(config: Config) -> Beginning:
    """Where the run begins: in a new folder, at a checkpoint, or again after a failed attempt.

    Raises InputError for the folder of another run.
    """
    run_dir = config.run.dir
    if (run_dir / CONFIG).exists():
        return _check_resumption(config)
    found = find_resume(config.checkpoint, run_dir)
    existing = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise InputError(f"cannot make the run folder {run_dir}: {existing} is no writable folder")
    if found is not None:
        first_model(config, is_resumed=True)
    return Beginning(found)


def _check_resumption(config: Config) -> Beginning:
    run_dir, resume = config.run.dir, config.checkpoint.resume
    if resume == "never":
        raise _overwrites(config, None, 'checkpoint.resume is "never"')
    found = find_resume(config.checkpoint, run_dir)
    repeats = has_begun(config.checkpoint, run_dir)
    if found is None or not is_checkpoint_of(found, run_dir / CHECKPOINTS):
        if repeats:
            return _check_repetition(config, found)
        raise _overwrites(config, found, "checkpoint.resume names a checkpoint of another folder")
    _check_model(config)
    first_model(config, is_resumed=True)
    step, ended_after = step_of(found), 0
    if (run_dir / SUMMARY).exists():
        ended_after = max(step, steps_at_end(run_dir))
        # A command that goes back to an older checkpoint asks to take the later steps again.
        if config.train.steps <= (ended_after if repeats else step):
            raise InputError(
                f"the run in {run_dir} has ended: it is complete after step {ended_after}. "
                f"{_OTHER_FOLDER}, or give a train.steps above {ended_after} to train on"
            )
    if step > config.train.steps:
        raise InputError(
            f"{found} is after step {step}, beyond train.steps={config.train.steps}: raise it"
        )
    return Beginning(found, is_again=True, ended_after=ended_after)


def _check_repetition(config: Config, begun_at: Path | None) -> Beginning:
    """Where a run without a complete checkpoint of its own begins again.

    begun_at: a checkpoint of another run. Raises InputError unless the command is the same.
    """
    run_dir = config.run.dir
    if (run_dir / SUMMARY).exists():
        raise InputError(
            f"the run in {run_dir} has ended without a checkpoint to resume from "
            f"(checkpoint.every_steps). {_OTHER_FOLDER}"
        )
    if faults := damaged(run_dir / CHECKPOINTS):
        raise InputError(
            f"every checkpoint of the run in {run_dir} is damaged: {'; '.join(faults)}. The "
            "run does not start again from its beginning by itself: put the files back, or move "
            "these folders away to start again"
        )
    if (earlier := earlier_config(run_dir)) is None:
        why = f"it has no complete checkpoint to resume from{_damage_of(run_dir / CONFIG)}"
        raise _overwrites(config, None, why)
    _check_same_command(config, earlier)
    return Beginning(begun_at, is_again=True)


def _overwrites(config: Config, found: Path | None, why: str) -> InputError:
    """The error of a command whose run would overwrite that in the folder."""
    return InputError(
        f"{config.run.dir} already holds a run (it has a {CONFIG}), and {why}; runs are never "
        "overwritten: name another folder with --run-dir DIR (or run.dir=DIR)"
        + "".join(f". {text}" for text in checkpoints_passed_over(config, found))
    )


def checkpoints_passed_over(config: Config, resumed: Path | None) -> list[str]:
    """Texts about newer checkpoints than the one that the run resumes from, with the reasons.

    Without one, also about those of a cold start that is not over.
    """
    run_dir = config.run.dir
    folder = run_dir / CHECKPOINTS
    if resumed is not None:
        is_own = is_checkpoint_of(resumed, folder)
        return passed_over(folder, step_of(resumed)) if is_own else []
    found = passed_over(folder, -1)
    if (steps := steps_left_behind(config)) < config.sft.steps:
        found += passed_over(run_dir / SFT_CHECKPOINTS, steps)
    return found


def _check_same_command(config: Config, earlier: Config) -> None:
    """Raise InputError unless the run in the folder was started with this configuration."""
    # Both were resolved at its start.
    run = earlier.run.model_copy(update={"dir": config.run.dir})
    earlier = earlier.model_copy(update={"run": run, "ports": config.ports})
    how = ""
    # Both begin at step 0, and a folder that holds a run is refused with "never".
    if earlier.checkpoint.resume == "never":
        earlier, how = earlier.replaced(checkpoint={"resume": "auto"}), " without checkpoint.resume"
    if changed := changed_keys(earlier, config):
        raise InputError(
            f"{run.dir} already holds a run (it has a {CONFIG}) with other values of "
            f"{first_of(changed)}, and no complete checkpoint to resume from with new ones. The "
            f"command with the values of {run.dir / CONFIG}{how} starts it again"
            f"{left_behind_text(earlier, steps_left_behind(earlier))}. {_OTHER_FOLDER}"
            f"{reuse_text(earlier)}"
        )


def earlier_config(run_dir: Path) -> Config | None:
    """The configuration of the run in the folder; None without a readable one."""
    path = run_dir / CONFIG
    try:
        return load_config(path) if path.exists() else None
    except ConfigError:
        return None


def _damage_of(config_path: Path) -> str:
    """Why a configuration cannot be compared with that of a command; "" if it can."""
    try:
        load_config(config_path)
    except ConfigError as error:
        return f", nor can its {config_path.name} be compared with this command ({error})"
    return ""


def _check_model(config: Config) -> None:
    """Raise InputError if the resumed run would read another chat template or another model."""
    run_dir = config.run.dir
    earlier = earlier_config(run_dir)
    if earlier is None:
        return
    if not config.render.has_template_of(earlier.render):
        raise InputError(
            f"render.chat_template is another text than {run_dir / CONFIG} has, and a run has one "
            "chat template: put the old text back, or name another folder with --run-dir DIR (and "
            "begin there with checkpoint.resume=CHECKPOINT)"
        )
    old, new = earlier.model.path, config.model.path
    # The same model may have moved; preflight.py refuses a folder without a model.
    are_there = all((folder / "config.json").exists() for folder in (old, new))
    if old != new and are_there and read_shape(old) != read_shape(new):
        raise InputError(
            f"model.path = {new} is another model than {old}, with which the run in {run_dir} "
            "began and of which its checkpoints are: give that one, or name another folder with "
            "--run-dir DIR"
        )


def set_aside(run_dir: Path, sft_steps: int = 0) -> Path:
    """Move the files of an attempt without a checkpoint to RUN/attempt_N; returns that folder.

    sft_steps: cold-start steps that are not repeated; their files and rows stay.
    """
    number = next(n for n in itertools.count(1) if not (run_dir / f"attempt_{n}").exists())
    folder = run_dir / f"attempt_{number}"
    folder.mkdir()
    metrics = run_dir / "metrics.jsonl"
    if sft_steps and metrics.exists():
        shutil.copyfile(metrics, folder / metrics.name)
        write_whole(metrics, rows_of_cold_start(iter_jsonl(metrics), sft_steps))
    elif metrics.exists():
        metrics.rename(folder / metrics.name)
    # It stays until the new one replaces it: no other command may take what is left of this one.
    if (run_dir / CONFIG).exists():
        write_whole(folder / CONFIG, (run_dir / CONFIG).read_text(), is_private=True)
    kept = sorted(path.name for path in run_dir.glob(KEPT_CONFIGS))
    for name in ("rollouts", "hf", "skipped", "wandb", *kept):
        if sft_steps and (run_dir / name).is_dir():
            _move_but_cold_start(run_dir / name, folder / name)
        elif (run_dir / name).exists():
            (run_dir / name).rename(folder / name)
    return folder


def _move_but_cold_start(source: Path, target: Path) -> None:
    target.mkdir()
    for path in source.iterdir():
        if not is_of_cold_start(path.name):
            path.rename(target / path.name)


class FolderLock(NamedTuple):
    """The lock of a run folder."""

    descriptor: int
    """Children inherit it: the lock holds while one process has it open."""
    heartbeat: Heartbeat


SIGNALLED = "stopped by signal"
"""First words of the last phase of a launcher that a signal (Ctrl-C) ended."""


@contextlib.contextmanager
def locked(run_dir: Path, phase: str = "", nodes: int = 0) -> Iterator[FolderLock]:
    """Keep other launchers out of the folder; a heartbeat keeps out those on other nodes.

    nodes: --nodes of `megatron-rl node`; 0: another command started the launcher. Raises InputError
    while another launcher or its processes hold the folder.
    """
    run_dir.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    # Another host may not see the lock, so the heartbeat is checked too.
    if (other := find_living(run_dir)) is not None:
        raise InputError(f"{second_text(run_dir)} (it is {other.describe()})")
    descriptor = os.open(run_dir / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        failures = run_dir.resolve() / "logs" / FAILURES
        deadline = time.monotonic() + _LOCK_WAIT_S
        while not _try_lock(descriptor):
            kill_left_stopped(failures)
            if time.monotonic() > deadline:
                raise InputError(second_text(run_dir))
            time.sleep(0.2)
        # Some do not hold the lock, such as ranks.
        kill_left_stopped(failures)
        if text := make_private(run_dir):
            log.warning("%s", text)
        with Heartbeat(run_dir, phase, nodes) as heartbeat:
            try:
                yield FolderLock(descriptor, heartbeat)
            except Interrupted as stop:
                heartbeat.phase = f"{SIGNALLED} {int(str(stop.code)) - 128}"
                raise
    finally:
        os.close(descriptor)


def second_text(run_dir: Path) -> str:
    return f"a run is running in {run_dir}: end it first, or name another folder with --run-dir DIR"


def is_running(run_dir: Path) -> bool:
    """Whether a launcher on any host, or its processes, hold the folder. Raises InputError."""
    return _is_locked(run_dir) or find_living(run_dir, watch_s=STATUS_WATCH_S) is not None


def _is_locked(run_dir: Path) -> bool:
    """Whether a process holds the lock; works without write access, for another user's run."""
    path = run_dir / _LOCK
    try:
        if not path.exists():
            return False
        descriptor = os.open(path, os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    try:
        return not _try_lock(descriptor)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        log.warning(
            "the run folder's file system has no locks (%s), so only %s prevents a second run. "
            "Mount Lustre with -o flock, NFS with a lock service",
            error.strerror, ALIVE,
        )  # fmt: skip
    return True


def write_config(config: Config, resumed: Path | None, *, continues: bool = False) -> None:
    """Save the config that all processes read; keeps the config of a resumed run's earlier part.

    continues: the start continues the queue's ledger, so only ports and label are new.
    """
    path = config.run.dir / CONFIG
    is_own = resumed is not None and is_checkpoint_of(resumed, config.run.dir / CHECKPOINTS)
    if resumed is not None and is_own and path.exists() and not continues:
        kept = path.with_name(kept_config_name(step_of(resumed)))
        # Copied: the folder of a launcher that is killed here has its configuration. Resumed from
        # the same step again, the steps of the present configuration are gone.
        if not kept.exists():
            write_whole(kept, path.read_text(), is_private=True)
    if config.train.steps and not continues:
        # Without the steps that the row below supersedes, nothing may resume from these again.
        set_aside_later(config.run.dir / CHECKPOINTS, resumed)
    # It holds the label, by which the sockets know the run's processes.
    write_whole(path, dump_toml(config), is_private=True)
    if resumed is None and not continues:
        return
    if not continues:
        (config.run.dir / SUMMARY).unlink(missing_ok=True)
    rows = config.run.dir / "metrics.jsonl"
    drop_torn_line(rows)
    values = {RESUMED: 1, "checkpoint": str(resumed or ""), **({CONTINUED: 1} if continues else {})}
    with contextlib.closing(JsonlWriter(rows, "launch")) as metrics:
        metrics.write(step_of(resumed) if resumed is not None else 0, values)


def write_evaluation_config(config: Config, label: str, model: Path) -> Path:
    """Save RUN/config.LABEL.toml for processes that evaluate a model folder without training.

    Its port label differs, so that processes of evaluation and of training refuse each other.
    """
    changed = config.replaced(
        model={"path": model}, generator={"wait_for_weight_sync": False},
        ports={"label": f"{config.ports.label}.{label}"},
    )  # fmt: skip
    path = config.run.dir / f"config.{label}.toml"
    write_whole(path, dump_toml(changed), is_private=True)
    return path
