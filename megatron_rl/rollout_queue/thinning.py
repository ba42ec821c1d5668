"""Removes the token files of old steps: queue.keep_tokens_of_steps.

Used by the rollout queue, in the thread of `record_thread.py`. A file that cannot be removed is
logged and counted once, and tried again at each later step.
"""

import logging
import re
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.protocol.checkpoint_folder import CHECKPOINTS, steps_by_name
from megatron_rl.protocol.metrics import JsonlWriter
from megatron_rl.protocol.rollout_files import FOLDER, write_thinned

log = logging.getLogger(__name__)

NOT_REMOVED = "queue/token_files_not_removed"
_TOKEN_FILE = re.compile(r"(?:step|dropped|trained)_(\d{6,})\.(?:int32|\d+\.npz)")


class Thinner:
    """Knows which token files of a run may go."""

    def __init__(self, config: Config, metrics: JsonlWriter) -> None:
        """metrics: of a writer that may be called in any thread."""
        self._run_dir = config.run.dir
        self._keep_steps = config.queue.keep_tokens_of_steps
        self._replayed_steps = config.replay.steps_in_buffer(config.sampled_groups)
        self._metrics = metrics
        self._failed: set[Path] = set()

    def thin(self, step: int) -> None:
        """Remove what is too old once the batch of `step` is formed; count what fails."""
        before = step - self._keep_steps
        if not self._keep_steps or before <= 0:
            return
        folder = self._run_dir / FOLDER
        try:
            doomed = self._doomed(folder, before)
            if doomed:
                # Before the files go, so that no reader takes them for lost.
                write_thinned(folder, before)
        except (OSError, InputError) as error:
            self._note_failure(step, folder, error)
            return
        for path in doomed:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                self._note_failure(step, path, error)

    def _doomed(self, folder: Path, before: int) -> list[Path]:
        kept = self._needed_to_resume()
        return [
            path
            for place in (folder, *folder.glob("superseded_*"))
            for step, path in _token_files(place)
            if step < before and (step not in kept or place != folder)
        ]

    def _needed_to_resume(self) -> set[int]:
        """Steps from which a resumed run fills its replay buffer."""
        if not self._replayed_steps:
            return set()
        checkpoints = steps_by_name(self._run_dir / CHECKPOINTS)
        return {s for at in checkpoints for s in range(at - self._replayed_steps, at)}

    def _note_failure(self, step: int, path: Path, error: Exception) -> None:
        if path in self._failed:
            return
        self._failed.add(path)
        log.warning("token files of old steps stay (queue.keep_tokens_of_steps): %s", error)
        self._metrics.write(step, {NOT_REMOVED: 1})


def _token_files(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.iterdir():
        if (match := _TOKEN_FILE.fullmatch(path.name)) is not None:
            yield int(match[1]), path
