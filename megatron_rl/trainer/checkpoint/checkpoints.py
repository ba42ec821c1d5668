"""Checkpoints of a run: when to save, which to keep, how to resume; one save at a time.

Runs in trainer ranks, which all call every method together. Rank 0 asks for the state of the queue
or of supervised training at the same step, and writes it next to the trainer's state. When all
ranks have written, rank 0 declares the folder complete (see `protocol/checkpoint_folder.py`).
"""

import logging
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from megatron_rl.backend.profiling import span
from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import CheckpointConfig
from megatron_rl.protocol import checkpoint_folder
from megatron_rl.protocol.checkpoint_folder import FileRecord
from megatron_rl.protocol.disk_room import WriteFailed, await_room, write_when_room
from megatron_rl.protocol.exports import EXPORTS, step_exports, step_name
from megatron_rl.protocol.metrics import Metric
from megatron_rl.protocol.queue_state import QueueState
from megatron_rl.protocol.stop_request import is_stop_requested
from megatron_rl.protocol.stored_batches import BATCHES, write_state
from megatron_rl.protocol.wire import DeadlineExceeded
from megatron_rl.trainer.checkpoint.background_save import (
    BackgroundSave,
    SaveFailed,
    SavePlans,
)
from megatron_rl.trainer.checkpoint.trainer_state import restore, sharded_state
from megatron_rl.trainer.step import Trainer
from megatron_rl.weights.sync.control import Control

log = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where checkpoints are."""

    folder: str
    """In the run folder."""
    companion: str
    """Name of the file next to the trainer's state."""


OF_RUN = Place(checkpoint_folder.CHECKPOINTS, checkpoint_folder.QUEUE_STATE)
OF_SFT = Place(checkpoint_folder.SFT_CHECKPOINTS, checkpoint_folder.SFT_STATE)


@dataclass(frozen=True)
class _Save:
    """A checkpoint that is being written."""

    step: int
    companion: msgspec.Struct | None
    """On rank 0 only."""
    folder: Path
    save: BackgroundSave
    deadline: float
    """time.monotonic() by which it must be written."""


class Checkpoints:
    """The checkpoints of a run; a context manager that waits for the last one to be complete."""

    def __init__(
        self,
        cfg: CheckpointConfig,
        run_dir: Path,
        control: Control,
        *,
        companion: Callable[[int], msgspec.Struct | None],
        last_step: int,
        place: Place = OF_RUN,
    ) -> None:
        """companion: returns on rank 0 what to save with the trainer's state of a step; the results
        of other ranks are ignored. control: its collectives may take
        expert.checkpoint.write_timeout_s.
        """
        self._cfg = cfg
        self._run_dir = run_dir
        self._place = place
        self._folder = run_dir / place.folder
        self._control = control
        self._companion = companion
        self._last_step = last_step
        self._saving: _Save | None = None
        self._newest_step = 0
        """Step of the newest checkpoint, which may still be written; 0 needs none."""
        self._plans: SavePlans | None = None
        self.export: Callable[[str], None] | None = None
        """Writes the model to RUN/hf under a name, on all ranks; None: no exports."""
        self.metrics: list[Metric] = []
        """Of the last call of save_if_due."""

    def resume(self, trainer: Trainer) -> int:
        """Put the checkpoint that `checkpoint.resume` means into a new trainer; returns its step.

        A restarted trainer takes the newest one of its run. 0 when there is none. Raises InputError
        when it is damaged or does not fit.
        """
        found = ""
        if self._control.rank == 0:
            place = self._place.folder
            found = str(checkpoint_folder.find_resume(self._cfg, self._run_dir, place) or "")
        found = self._control.share(found, str)
        step = 0
        if found:
            self._check_content(Path(found))
            step = restore(trainer, Path(found))
            log.info("resumed after step %d from %s", step, found)
        self._newest_step = step
        if self._control.rank == 0:
            for text in checkpoint_folder.passed_over(self._folder, step):
                log.warning("%s", text)
            checkpoint_folder.clear_after(self._folder, step)
            if self.export is not None:
                self._discard_exports(lambda found: [later for later in found if later > step])
        return step

    @span("checkpoint")
    def save_if_due(self, step: int, trainer: Trainer) -> None:
        """Save after batch number `step` if due; a thread writes the files.

        Waits for the previous checkpoint until expert.checkpoint.write_timeout_s after its start.
        Raises InputError when a checkpoint could not be written, DeadlineExceeded.
        """
        self.metrics = []
        saving = self._saving
        if saving is not None and self._control.all(saving.save.is_written):
            self._complete(saving)
        if not self.is_due(step):
            return
        started = time.monotonic()
        # Before the checkpoint: a resumed run must have all earlier exports.
        if self.export is not None and self._exports(step):
            self.export(step_name(step))
            self._on_rank_0(step, lambda: self._discard_exports(self._superfluous))
        if self._saves(step):
            self._await_save()
            self._start(step, trainer)
        self.metrics.append(Metric("checkpoint/stall_s", time.monotonic() - started, "sum"))

    def save_at_stop(self, step: int, trainer: Trainer) -> None:
        """Save after batch number `step`, with which training stops early, unless it is saved.

        Raises InputError, DeadlineExceeded as `save_if_due`.
        """
        if step != self._newest_step:
            self._await_save()
            self._start(step, trainer)

    def save_last_if_asked(self, step: int, trainer: Trainer) -> None:
        """Save after the last step, if the run is asked to stop: its last evaluation may be lost.

        Raises InputError, DeadlineExceeded as `save_if_due`.
        """
        is_last = step == self._last_step
        if is_last and self._control.share(is_stop_requested(self._run_dir), bool):
            self.save_at_stop(step, trainer)

    def is_due(self, step: int) -> bool:
        """Whether batch number `step` is followed by a checkpoint or an export; on every rank."""
        return self._saves(step) or self._exports(step)

    def _saves(self, step: int) -> bool:
        every = self._cfg.every_steps
        return every > 0 and (step % every == 0 or step == self._last_step)

    def _exports(self, step: int) -> bool:
        every = self._cfg.export_every_steps if self.export is not None else 0
        # The last one is exported as hf/final.
        return every > 0 and step % every == 0 and step != self._last_step

    def _superfluous(self, steps: Iterable[int]) -> list[int]:
        cfg = self._cfg
        return checkpoint_folder.superfluous(
            steps, keep_last=cfg.keep_last, keep_every=cfg.keep_every
        )

    def _discard_exports(self, choose: Callable[[Iterable[int]], list[int]]) -> None:
        found = step_exports(self._run_dir / EXPORTS)
        for step in choose(found):
            checkpoint_folder.discard(found[step])

    def _check_content(self, folder: Path) -> None:
        """Raise InputError for a damaged file; each rank reads a part of the files."""
        completion = checkpoint_folder.read_complete_mark(folder)
        names = sorted(completion.files) if completion is not None else []
        mine = names[self._control.rank :: self._control.world_size]
        damaged = checkpoint_folder.find_damage(folder, mine)
        if damaged := next(filter(None, self._control.gather(damaged, str)), ""):
            raise InputError(
                f"{folder / damaged} is damaged: its content is not what COMPLETE says. Remove or "
                f"rename {folder} to resume from the checkpoint before it"
            )

    def _start(self, step: int, trainer: Trainer) -> None:
        state = self._companion(step)
        folder = self._folder / (checkpoint_folder.folder_name(step) + checkpoint_folder.PARTIAL)
        deadline = time.monotonic() + self._cfg.write_timeout_s
        self._on_rank_0(step, lambda: self._make_empty(folder, state))
        # Megatron writes common.pt now and the metadata in the end, without another try.
        self._await_room(step, folder)
        content = sharded_state(trainer, step)
        self._plans = self._plans or SavePlans()
        try:
            # The writer's error names the cause, so raise it before the deadline's error.
            limit_s = 0.9 * self._cfg.write_timeout_s
            save = BackgroundSave(content, folder, self._plans, limit_s=limit_s)
        # torch's archive writer turns a failed write into a RuntimeError.
        except (OSError, RuntimeError) as error:
            raise self._failure(step, str(error)) from error
        self._saving = _Save(step, state, folder, save, deadline)
        self._newest_step = step

    def _make_empty(self, folder: Path, companion: msgspec.Struct | None) -> None:
        """Make a new folder; keep the queue's state with the batches, which may rebuild it."""
        checkpoint_folder.discard(folder)
        folder.mkdir(parents=True)
        batches = self._run_dir / BATCHES
        if isinstance(companion, QueueState) and batches.is_dir():
            write_state(batches, companion)

    def _await_save(self) -> None:
        saving = self._saving
        if saving is None:
            return
        if not self._control.all(saving.save.wait(saving.deadline)):
            raise DeadlineExceeded(
                f"the checkpoint of step {saving.step} was not on the disk within "
                f"{self._cfg.write_timeout_s:.0f} s (expert.checkpoint.write_timeout_s)"
            )
        self._complete(saving)

    def _complete(self, saving: _Save) -> None:
        """After all ranks have written: write metadata and COMPLETE, rename, drop old ones."""
        self._saving = None
        self._await_room(saving.step, saving.folder)
        try:
            saving.save.finalize()
        except (SaveFailed, OSError) as error:
            if self._control.rank == 0:
                shutil.rmtree(saving.folder, ignore_errors=True)
            raise self._failure(saving.step, str(error)) from error
        files = {
            name: record
            for of_rank in self._control.gather(saving.save.files, dict[str, FileRecord])
            for name, record in of_rank.items()
        }
        self._on_rank_0(saving.step, lambda: self._seal(saving, files))
        self.metrics += [
            Metric("checkpoint/write_s", saving.save.write_s, "max"),
            Metric("checkpoint/bytes", float(sum(r.size for r in files.values())), "sum"),
        ]

    def _seal(self, saving: _Save, files: dict[str, FileRecord]) -> None:
        assert saving.companion is not None
        companion = msgspec.json.encode(saving.companion)
        (saving.folder / self._place.companion).write_bytes(companion)
        final = checkpoint_folder.seal(saving.folder, saving.step, files)
        log.info("checkpoint of step %d is complete: %s", saving.step, final)
        found = checkpoint_folder.complete_checkpoints(self._folder)
        named = Path(self._cfg.resume).resolve()
        for step in self._superfluous(found):
            # Its user went back to it, and may do so again.
            if found[step].resolve() != named:
                checkpoint_folder.discard(found[step])

    def _await_room(self, step: int, folder: Path) -> None:
        """Wait for room for Megatron's own small files; on failure every rank raises InputError."""
        self._on_rank_0(step, partial(await_room, folder, self._cfg.write_timeout_s))

    def _on_rank_0(self, step: int, work: Callable[[], None]) -> None:
        """Change the folder on rank 0; on failure every rank raises InputError.

        work: may be repeated, when the disk was full.
        """
        problem = ""
        if self._control.rank == 0:
            try:
                write_when_room(self._folder, work, limit_s=self._cfg.write_timeout_s)
            except WriteFailed as error:
                problem = error.fault
        problem = self._control.share(problem, str)
        if problem:
            raise self._failure(step, problem)

    def _failure(self, step: int, problem: str) -> InputError:
        return InputError(
            f"the checkpoint of step {step} could not be written to {self._folder}: {problem}. "
            "Older checkpoints are complete. Free disk space or fix the cause, then repeat the "
            "command: it resumes from the newest one"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error other ranks may be gone: the checkpoint stays incomplete.
        if kind is None:
            self._await_save()
