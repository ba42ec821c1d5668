"""A trace of some steps by torch's profiler (`train.profile_steps`, `sft.profile_steps`).

Runs in trainer ranks: one of each pipeline stage writes a file below RUN/profile/ for Perfetto.
"""

import logging
from pathlib import Path

from megatron.core import parallel_state
from torch.profiler import profile

from megatron_rl.backend.profiling import recorded_activities
from megatron_rl.protocol.closing import Closing

log = logging.getLogger(__name__)


class StepProfile(Closing):
    """Records from the beginning of the first step to the beginning of the one after the last."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path) -> None:
        """steps: first and last, counted from 1; None records nothing."""
        self._steps, self._folder = steps, folder
        self._profile: profile | None = None

    def begin_step(self, step: int) -> None:
        """The batch of `step` comes next."""
        if self._steps is None or not _is_recorded():
            return
        first, last = self._steps
        if self._profile is None and first <= step <= last:
            self._profile = profile(activities=recorded_activities())
            self._profile.start()
        elif step > last:
            self.close()

    def close(self) -> None:
        """Write what was recorded."""
        if self._profile is None:
            return
        recorded, self._profile = self._profile, None
        recorded.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        path = self._folder / f"stage_{stage}.json"
        recorded.export_chrome_trace(str(path))
        log.info("wrote the profile of steps %s: %s", self._steps, path)


def _is_recorded() -> bool:
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return replica == 0 and parallel_state.get_tensor_model_parallel_rank() == 0
