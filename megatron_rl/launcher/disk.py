"""Warns when the disk of a run folder has room for only a few more steps.

Used by the live view and `megatron-rl status`.
"""

import contextlib
import os
import re
import shutil
from pathlib import Path

from megatron_rl.config.tree import Config
from megatron_rl.protocol.checkpoint_folder import (
    CHECKPOINTS,
    complete_checkpoints,
    read_complete_mark,
)
from megatron_rl.protocol.rollout_files import FOLDER, LINES

FEW_STEPS = 50
"""The warning appears when the disk has room for fewer steps."""
_MEASURED_STEPS = 5
_OF_STEP = re.compile(r"(?:step|dropped|trained)_(\d{6,})\.")


def room_warning(run_dir: Path, config: Config, *, left_steps: int) -> str:
    """Warning about too little free space, with its fix; "" while there is enough.

    left_steps: remaining steps of the run.
    """
    a_step = _bytes_a_step(run_dir / FOLDER, config.queue.keep_tokens_of_steps)
    if not a_step or left_steps <= 0:
        return ""
    free = shutil.disk_usage(run_dir).free
    checkpoint = _bytes_of_checkpoint(run_dir / CHECKPOINTS) if config.checkpoint.every_steps else 0
    steps = max(0, free - checkpoint) // a_step
    if steps >= min(FEW_STEPS, left_steps):
        return ""
    reserved = f" and the next checkpoint of {checkpoint / 1e9:.3g} GB" if checkpoint else ""
    return (
        f"the disk of {run_dir} has {free / 1e9:.3g} GB free, room for {steps} more steps of "
        f"{a_step / 1e9:.3g} GB{reserved}; a full disk pauses the run: free space, or resume with "
        "a low queue.keep_tokens_of_steps, such as 20, or with queue.record_tokens=false"
    )


def _bytes_a_step(folder: Path, keep_steps: int) -> int:
    """Mean growth of the rollouts folder per recent complete step, in bytes; 0 without steps.

    keep_steps: queue.keep_tokens_of_steps; with more steps than that, only lines add bytes, because
    old token files are removed.
    """
    steps: set[int] = set()
    # Only files of the newest steps are kept, because a long run has very many.
    files: dict[int, list[Path]] = {}
    with os.scandir(folder) if folder.is_dir() else contextlib.nullcontext(()) as entries:
        for entry in entries:
            if (found := _OF_STEP.match(entry.name)) is None:
                continue
            step = int(found.group(1))
            steps.add(step)
            if len(files) <= _MEASURED_STEPS or step >= min(files):
                files.setdefault(step, []).append(Path(entry.path))
            if len(files) > _MEASURED_STEPS + 1:
                del files[min(files)]
    # The queue may still write the newest step.
    latest = sorted(files)[:-1]
    grown = [path for step in latest for path in files[step]]
    if 0 < keep_steps < len(steps):
        grown = [path for path in grown if path.suffix == LINES]
    sizes = 0
    for path in grown:
        # A user may move files away meanwhile.
        with contextlib.suppress(FileNotFoundError):
            sizes += path.stat().st_size
    return sizes // len(latest) if latest else 0


def _bytes_of_checkpoint(folder: Path) -> int:
    found = complete_checkpoints(folder)
    mark = read_complete_mark(found[max(found)]) if found else None
    return sum(record.size for record in mark.files.values()) if mark is not None else 0
