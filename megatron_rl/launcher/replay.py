"""Repeats recorded steps of a run on this node, and compares their figures with the recorded ones.

Used by `megatron-rl replay`, in its one thread.
"""

import math
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config, load_run, override
from megatron_rl.config.tree import Config
from megatron_rl.launcher.cold_start import first_model
from megatron_rl.launcher.node import environment_of_ranks, open_supervisor
from megatron_rl.launcher.placement import listed_gpus
from megatron_rl.launcher.ports import find_free
from megatron_rl.launcher.replay_keys import find_changes
from megatron_rl.launcher.supervisor import POLL_S
from megatron_rl.observe.facts import configured_parts
from megatron_rl.protocol.checkpoint_folder import (
    CHECKPOINTS,
    PARTIAL,
    complete_checkpoints,
    discard,
    folder_name,
)
from megatron_rl.protocol.metrics import Row, stream_rows
from megatron_rl.protocol.stored_batches import BATCHES, state_name, stored_steps
from megatron_rl.protocol.whole_file import check_writable

_HOST = "127.0.0.1"
_OF_THE_MACHINE = ("_s", "per_gpu", "train/mfu")
"""Ends of names of metrics that differ between two machines."""


@dataclass(frozen=True)
class Replay:
    """Which steps of a run to repeat."""

    run_dir: Path
    checkpoint: Path | None
    """None: the start of training."""
    first: int
    """First step to compare, counted from 1."""
    last: int
    trained_from: int
    """First step to train, counted from 1: the one after the checkpoint."""
    out: Path
    """Folder for metrics, logs, records of tokens and an export."""
    overrides: tuple[str, ...] = ()
    exports: bool = False
    rebuilds: bool = False
    """Write the checkpoint of the last step too."""


def find_replay(
    run_dir: Path, first: int, last: int, out: Path | None, overrides: Sequence[str], *,
    exports: bool = False, rebuilds: bool = False,
) -> Replay:  # fmt: skip
    """The replay of these steps, from the newest checkpoint before them.

    Raises InputError when a checkpoint or a batch is missing, or the state to rebuild one with, or
    when a folder cannot be written to.
    """
    if first > last:
        raise InputError(
            f"the last step {last} is before the first, {first}: give --to {first} or a later step"
        )
    stored = set(stored_steps(run_dir / BATCHES))
    checkpoints = complete_checkpoints(run_dir / CHECKPOINTS)
    begins = {0: None} | checkpoints

    def can_begin(step: int, target: int) -> bool:
        return all(batch in stored for batch in range(step, target))

    possible = [step + 1 for step in sorted(stored) if any(
        begin <= step and can_begin(begin, step + 1) for begin in begins
    )]  # fmt: skip
    if not set(range(first, last + 1)) <= set(possible):
        known = f"{possible[0]} to {possible[-1]}" if possible else "none"
        raise InputError(
            f"the steps {first} to {last} of {run_dir} cannot be repeated: a step needs its batch "
            f"in {BATCHES}/, and the batches back to a checkpoint. Steps that can be: {known}"
        )
    begin = max(step for step in begins if step < first and can_begin(step, last))
    where = out if out is not None else _unused(run_dir / f"replay_{first:06d}")
    if where.exists():
        raise InputError(f"{where} exists: remove it, or choose another folder by --out")
    check_writable(where, "give --out FOLDER elsewhere")
    if rebuilds:
        _check_rebuilt(run_dir, last)
    return Replay(
        run_dir, begins[begin], first, last, begin + 1, where, tuple(overrides), exports, rebuilds
    )


def _unused(folder: Path) -> Path:
    """The folder, or the first of FOLDER_2, FOLDER_3, ... that does not exist."""
    number, found = 1, folder
    while found.exists():
        number += 1
        found = folder.with_name(f"{folder.name}_{number}")
    return found


def _check_rebuilt(run_dir: Path, step: int) -> None:
    """Raise InputError if the checkpoint of the step is there, or cannot be rebuilt."""
    check_writable(run_dir / CHECKPOINTS, "omit --rebuild, or copy the run")
    if step in complete_checkpoints(run_dir / CHECKPOINTS):
        raise InputError(
            f"{run_dir} has a checkpoint of step {step}: omit --rebuild, or remove "
            f"{CHECKPOINTS}/{folder_name(step)} if it is damaged"
        )
    if not (run_dir / BATCHES / state_name(step)).exists():
        raise InputError(
            f"the checkpoint of step {step} cannot be rebuilt: {run_dir / BATCHES} has no state of "
            "the queue for it. Give a step of which the run began a checkpoint"
        )


def place_rebuilt(replay: Replay, *, is_equal: bool) -> Path:
    """Where the rebuilt checkpoint is: in the run folder, from which the run resumes, if all steps
    were compared and are equal."""
    place = CHECKPOINTS, folder_name(replay.last)
    made, lost = replay.out.joinpath(*place), replay.run_dir.joinpath(*place)
    if not is_equal:
        return made
    partial = lost.with_name(lost.name + PARTIAL)
    discard(partial)
    # OUT may be on another file system.
    shutil.move(made, partial)
    if not any(made.parent.iterdir()):
        made.parent.rmdir()
    discard(lost)
    return partial.rename(lost)


def run_replay(replay: Replay, source: Path) -> list[Row]:
    """Repeat the steps; returns the new rows of the steps to compare.

    source: see `find_config`. Raises InputError before anything starts, RoleDied.
    """
    out, run_dir = replay.out.resolve(), replay.run_dir.resolve()
    model = first_model(load_run(run_dir), is_resumed=replay.checkpoint is not None)
    overrides = [
        override("model.path", str(model)), override("run.dir", str(out)),
        override("ports.host", _HOST), *replay.overrides,
    ]  # fmt: skip
    config = load_config(source, overrides)
    gpus = listed_gpus()
    _check(config, gpus)
    (out / "logs").mkdir(parents=True)
    environment = environment_of_ranks(config, gpus, config.parallel.world_size)
    with open_supervisor(config) as supervisor:
        command = _command(replay, config, source, overrides)
        supervisor.start("replay", command, environment=environment)
        while supervisor.is_running("replay"):
            time.sleep(POLL_S)
            supervisor.check()
    return step_rows(out, replay)


def find_config(replay: Replay) -> Path:
    """The configuration under which the run trained the steps.

    Raises InputError for steps of several ones, if training reads other values, the given keys
    aside; and for one that was not kept.
    """
    parts = []
    for begin, end, file in configured_parts(replay.run_dir.resolve()):
        if begin >= replay.last or (end is not None and end < replay.trained_from):
            continue
        if file is None:
            raise InputError(
                f"the configuration of the steps {begin + 1} to {end} was not kept, as the run "
                f"was resumed twice after step {end}: give steps of another part of the run"
            )
        parts.append((begin, end, file))
    *earlier, (begin, _, last) = parts
    trained = load_config(last, replay.overrides)
    for _, end, file in earlier:
        if keys := find_changes(load_config(file, replay.overrides), trained):
            raise InputError(
                f"the steps {replay.trained_from} to {replay.last} were trained under {file.name} "
                f"to step {end} and under {last.name} from step {begin + 1}, which differ in "
                f"{', '.join(keys)}: give steps up to {end}, or give these keys, which then hold "
                "for all of the steps"
            )
    return last


def _command(replay: Replay, config: Config, source: Path, overrides: Sequence[str]) -> list[str]:
    run_dir = replay.run_dir.resolve()
    torchrun = [
        f"--nproc-per-node={config.parallel.world_size}", "--rdzv-backend=run-address",
        f"--rdzv-endpoint={_HOST}:{find_free(_HOST)}", "--rdzv-conf=rank=0",
    ]  # fmt: skip
    arguments = ["--config", str(source), "--source", str(run_dir)]
    if replay.checkpoint is not None:
        arguments += ["--checkpoint", str(replay.checkpoint.resolve())]
    if replay.exports:
        arguments.append("--export")
    if replay.rebuilds:
        arguments.append("--save")
    return [
        sys.executable, "-m", "megatron_rl.trainer.torchrun", *torchrun,
        "-m", "megatron_rl.trainer.replay", *arguments, "--last", str(replay.last), *overrides,
    ]  # fmt: skip


def _check(config: Config, gpus: Sequence[str]) -> None:
    ranks = config.parallel.world_size
    if gpus and len(gpus) < ranks:
        raise InputError(
            f"the trainer has {ranks} ranks and this node {len(gpus)} GPUs: give a smaller layout, "
            "such as parallel.data=1"
        )
    if config.has_scorer:
        raise InputError(
            "the reference of this run is held by an engine, which a replay does not start: give "
            'algorithm.reference.source="trainer"'
        )


def step_rows(run_dir: Path, replay: Replay) -> list[Row]:
    """Rows of the steps to compare, in order."""
    rows = stream_rows(run_dir / "metrics.jsonl", holding="train/loss")
    return [
        row
        for row in rows
        if row.get("source") == "trainer" and replay.first <= row["step"] <= replay.last
    ]


@dataclass(frozen=True)
class ComparedStep:
    """A repeated step, next to the recorded one."""

    repeated: Row
    recorded: Row | None
    """None: the run ended before the trainer wrote the row of its batch."""

    @property
    def differences(self) -> dict[str, tuple[float, float]] | None:
        """See `differences`; None: there is nothing to compare with."""
        return None if self.recorded is None else differences(self.recorded, self.repeated)


def compare_steps(replay: Replay, repeated: Sequence[Row]) -> list[ComparedStep]:
    """The repeated steps, each next to the run's row of it."""
    recorded = {row["step"]: row for row in step_rows(replay.run_dir, replay)}
    return [ComparedStep(row, recorded.get(row["step"])) for row in repeated]


def differences(recorded: Row, repeated: Row) -> dict[str, tuple[float, float]]:
    """(recorded, repeated) of each metric of the training step that differs.

    Two NaNs are equal: a skipped step has them, and a repeated one has to skip too.
    """
    names = [
        name
        for name in recorded
        if name.startswith("train/") and not name.endswith(_OF_THE_MACHINE) and name in repeated
    ]
    pairs = {name: (recorded[name], repeated[name]) for name in names}
    return {
        name: (old, new)
        for name, (old, new) in pairs.items()
        if old != new and not (math.isnan(old) and math.isnan(new))
    }
