"""The layout of checkpoint folders, and which checkpoints are complete.

Imported by trainer ranks, which write it, and by the queue and the launcher, which read it.

    checkpoints/step_000012/          complete: COMPLETE lists every other file
        COMPLETE                      written last
        queue.json                    the queue's state after the same batch
        common.pt, metadata.json, .metadata, __0_0.distcp, ...   Megatron's format "torch_dist"
    checkpoints/step_000018.partial/  being written, or left by a killed run
    checkpoints/sft/step_000040/      of the cold start, with sft.json instead of queue.json

A folder is renamed to its final name after COMPLETE is on the disk. It counts only while every file
has the size in COMPLETE.
"""

import hashlib
import os
import re
import shutil
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from megatron_rl.config.errors import InputError
from megatron_rl.config.trainer import CheckpointConfig
from megatron_rl.protocol.queue_state import QueueState

CHECKPOINTS = "checkpoints"
"""Folder in the run folder."""
SFT_CHECKPOINTS = "checkpoints/sft"
"""Folder in the run folder with checkpoints of the cold start; RL cannot start from them."""
COMPLETE = "COMPLETE"
QUEUE_STATE = "queue.json"
SFT_STATE = "sft.json"
PARTIAL = ".partial"
_CONFIG = "config.toml"
_DISCARDED = ".discarded"
_SET_ASIDE = ".set-aside"
_NAME = re.compile(r"step_(\d{6,})")
_DIGEST_BYTES = 16


class FileRecord(msgspec.Struct, frozen=True):
    """Size and digest of a file in COMPLETE."""

    size: int
    """Bytes."""
    digest: str
    """BLAKE2b, 16 bytes, hexadecimal."""


class CompleteMark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of COMPLETE."""

    step: int
    """Number of trained batches (the policy version); for a cold start, of optimizer steps."""
    files: dict[str, FileRecord]
    """All other files by name."""


def folder_name(step: int) -> str:
    """Name of the checkpoint of a step."""
    return f"step_{step:06d}"


def record_file(path: Path) -> FileRecord:
    """Size and digest of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=_DIGEST_BYTES))
    return FileRecord(path.stat().st_size, digest.hexdigest())


def read_complete_mark(folder: Path) -> CompleteMark | None:
    """The COMPLETE file of a checkpoint; None if the checkpoint is not complete."""
    found = _examine(folder)
    return found if isinstance(found, CompleteMark) else None


def step_of(checkpoint: Path) -> int:
    """Step of a complete checkpoint."""
    mark = read_complete_mark(checkpoint)
    assert mark is not None
    return mark.step


def _examine(folder: Path) -> CompleteMark | str:
    """The COMPLETE file of a checkpoint, or why the checkpoint does not count."""
    try:
        mark = msgspec.json.decode((folder / COMPLETE).read_bytes(), type=CompleteMark)
        for name, record in mark.files.items():
            if (size := (folder / name).stat().st_size) != record.size:
                return f"{name} has {size} bytes, but {COMPLETE} says {record.size}"
    except FileNotFoundError as error:
        return f"it has no file {Path(error.filename).relative_to(folder)}"
    except OSError as error:
        return f"it cannot be read: {error}"
    except msgspec.DecodeError as error:
        return f"{COMPLETE} is damaged, or of another version: {error}"
    return mark if mark.files else f"{COMPLETE} lists no files"


def complete_checkpoints(folder: Path) -> dict[int, Path]:
    """Complete checkpoints by step, ascending."""
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        mark = read_complete_mark(path) if match else None
        if match and mark is not None and mark.step == int(match[1]):
            found[mark.step] = path
    return dict(sorted(found.items()))


def damaged(folder: Path) -> list[str]:
    """Texts about damaged checkpoints: they are marked as complete, but lack files or bytes."""
    sealed = [path.parent for path in sorted(folder.glob(f"*/{COMPLETE}"))]
    named = [path for path in sealed if _NAME.fullmatch(path.name)]
    return [f"{path}: {found}" for path in named if isinstance(found := _examine(path), str)]


def passed_over(folder: Path, step: int) -> list[str]:
    """Texts about the checkpoints after `step`, from which a run that resumes there does not
    resume, with the reasons.

    Folders that are named by a number in another way are of another program.
    """
    later = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        number = re.search(r"\d+", path.name)
        is_gone = _SET_ASIDE in path.name or path.name.endswith(_DISCARDED)
        if number and int(number[0]) > step and path.is_dir() and not is_gone:
            later[int(number[0]), path.name] = path
    return [f"{path} is passed over: {_why_passed_over(path)}" for _, path in sorted(later.items())]


def _why_passed_over(path: Path) -> str:
    name = path.name.removesuffix(PARTIAL)
    if (match := _NAME.fullmatch(name)) is None:
        return f"checkpoints of this program are named {folder_name(0)[:-6]}NNNNNN"
    if name != path.name:
        return "the run ended while it was being written"
    found = _examine(path)
    if isinstance(found, str):
        return found
    if found.step != int(match[1]):
        return f"its {COMPLETE} is of step {found.step}"
    return "checkpoint.resume asks for an earlier one"


def steps_by_name(folder: Path) -> list[int]:
    """Steps of checkpoints that are complete or being written, from the folder names."""
    names = [path.name.removesuffix(PARTIAL) for path in folder.glob("step_*")]
    return [int(match[1]) for match in map(_NAME.fullmatch, names) if match]


def find_resume(
    cfg: CheckpointConfig, run_dir: Path, folder_in_run: str = CHECKPOINTS
) -> Path | None:
    """The checkpoint from which a run resumes; None to begin at the start. Raises InputError.

    A run that has begun where `checkpoint.resume` says resumes from its newest one: when its
    command is repeated, and when one of its processes is restarted.
    """
    if has_begun(cfg, run_dir):
        own = complete_checkpoints(run_dir / folder_in_run).values()
        if (newest := next(reversed(own), None)) is not None:
            return newest
    if cfg.resume in ("auto", "never"):
        return None
    folder = Path(cfg.resume)
    mark = read_complete_mark(folder)
    if mark is None:
        raise InputError(
            f"checkpoint.resume = {cfg.resume}: that is no complete checkpoint. Expected a folder "
            f'RUN/{CHECKPOINTS}/step_NNNNNN whose files are as its {COMPLETE} says, or "auto" or '
            '"never"'
        )
    if SFT_STATE in mark.files:
        raise InputError(
            f"checkpoint.resume = {cfg.resume} is a checkpoint of a cold start, from which "
            "reinforcement learning cannot start. Repeat the command of its run to resume that "
            "run, or set model.path to the folder of an exported model"
        )
    return folder


def has_begun(cfg: CheckpointConfig, run_dir: Path) -> bool:
    """Whether the run in the folder began, or last went back, to where `checkpoint.resume` says.

    The launcher has written RUN/config.toml before any other process starts. Always for "auto".
    """
    if cfg.resume == "auto":
        return True
    there = named_in(run_dir)
    return there != "" and Path(there).resolve() == Path(cfg.resume).resolve()


def named_in(run_dir: Path) -> str:
    """`checkpoint.resume` of RUN/config.toml; "" without a readable one.

    Not checked as a configuration, because another release may have written the other keys.
    """
    try:
        saved = tomllib.loads((run_dir / _CONFIG).read_text())
    # TOML's errors and those of UTF-8 are ValueErrors.
    except (FileNotFoundError, ValueError):
        return ""
    return str(saved.get("checkpoint", {}).get("resume", "auto"))


def read_queue_state(folder: Path, name: str = QUEUE_STATE) -> QueueState:
    """The queue's part of a complete checkpoint, or of a file of its. Raises InputError."""
    try:
        return msgspec.json.decode((folder / name).read_bytes(), type=QueueState)
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(f"cannot read {folder / name}: {error}") from error


def find_damage(folder: Path, names: Iterable[str]) -> str:
    """The first file whose content differs from COMPLETE; empty if none does."""
    mark = read_complete_mark(folder)
    if mark is None:
        return COMPLETE
    for name in names:
        if record_file(folder / name) != mark.files[name]:
            return name
    return ""


def seal(partial: Path, step: int, files: dict[str, FileRecord]) -> Path:
    """Mark a written checkpoint as complete and rename it; returns the folder.

    files: records of the files of `partial` that are already synced to the disk; the others are
    synced and recorded here.
    """
    files = dict(files)
    for path in sorted(partial.iterdir()):
        if path.name not in files:
            _sync(path)
            files[path.name] = record_file(path)
    mark = partial / f"{COMPLETE}.tmp"
    mark.write_bytes(msgspec.json.encode(CompleteMark(step, files)))
    _sync(mark)
    mark.rename(partial / COMPLETE)
    _sync(partial)
    final = partial.with_name(folder_name(step))
    discard(final)
    partial.rename(final)
    _sync(final.parent)
    return final


def discard(folder: Path) -> None:
    """Remove a checkpoint; a kill midway leaves no folder that counts as a checkpoint."""
    if not folder.exists():
        return
    doomed = folder.with_name(folder.name + _DISCARDED)
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def clear_after(folder: Path, step: int) -> None:
    """Clean up for a run that resumes after `step`.

    Removes folders that a killed run was writing or removing. Renames complete checkpoints of later
    steps, which this run does not know.
    """
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        if path.name.endswith((PARTIAL, _DISCARDED)):
            shutil.rmtree(path)
    _set_aside_after(folder, step)


def set_aside_later(folder: Path, resumed: Path | None) -> None:
    """Rename the complete checkpoints that a run which resumes from `resumed` does not know.

    They are of later steps, or all if `resumed` is no checkpoint of the folder.
    """
    step = -1
    if resumed is not None and is_checkpoint_of(resumed, folder):
        step = step_of(resumed)
    _set_aside_after(folder, step)


def is_checkpoint_of(checkpoint: Path, folder: Path) -> bool:
    """Whether the checkpoint lies in a folder of checkpoints."""
    return checkpoint.resolve().parent == folder.resolve()


def _set_aside_after(folder: Path, step: int) -> None:
    for later, path in complete_checkpoints(folder).items():
        if later > step:
            path.rename(path.with_name(f"{path.name}{_SET_ASIDE}-{time.time_ns()}"))


def superfluous(steps: Iterable[int], *, keep_last: int, keep_every: int) -> list[int]:
    """Steps whose checkpoints may be removed: not the last ones or multiples of keep_every."""
    ordered = sorted(steps)
    return [step for step in ordered[:-keep_last] if not keep_every or step % keep_every]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
