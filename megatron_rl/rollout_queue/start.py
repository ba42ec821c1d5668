"""Makes the coordinator of a process: new, resumed from a checkpoint, or from a ledger.

Used by the rollout queue's server.
"""

from dataclasses import dataclass

from megatron_rl.config.tree import Config
from megatron_rl.data.prompts import PromptSets
from megatron_rl.protocol.ledger import FOLDER, remove_segments
from megatron_rl.protocol.metrics import JsonlWriter
from megatron_rl.protocol.queue_state import QueueState
from megatron_rl.protocol.rollout_files import FOLDER as RECORDS
from megatron_rl.protocol.whole_file import PRIVATE_FOLDER
from megatron_rl.rollout_queue.batch_thread import BatchMaker
from megatron_rl.rollout_queue.coordinator import Coordinator
from megatron_rl.rollout_queue.effects import LedgerMaker, LedgerMetrics, LedgerWriter
from megatron_rl.rollout_queue.ledger import Ledger, Parts
from megatron_rl.rollout_queue.record import Recorder
from megatron_rl.rollout_queue.record_files import RecordFiles, RecordThread
from megatron_rl.rollout_queue.recovery import Live, recover
from megatron_rl.rollout_queue.stall import LoopClock, UnixTime
from megatron_rl.rollout_queue.states import References


@dataclass(frozen=True)
class Start:
    """What a queue starts with."""

    config: Config
    prompts: PromptSets
    state: QueueState | None
    """Of the checkpoint from which a run resumes."""
    metrics: JsonlWriter
    writer: RecordFiles | RecordThread
    maker: BatchMaker
    awaits_cold_start: bool = False

    def without_ledger(
        self, *, evaluate_only: str, keeps_evaluated: bool
    ) -> tuple[Coordinator, LoopClock]:
        """A coordinator, and its clock. evaluate_only: label of the only evaluation, or empty."""
        clock = LoopClock()
        recorder = Recorder(
            self.config.run.dir,
            keeps_evaluated=keeps_evaluated,
            to_unix_s=clock.unix_s,
            writer=self.writer,
        )
        coordinator = Coordinator(
            self.config, self.prompts,
            recorder=recorder, metrics=self.metrics, maker=self.maker,
            evaluate_only=evaluate_only, now=clock.read(),
        )  # fmt: skip
        return self._begin(coordinator), clock

    def with_ledger(self) -> tuple[Ledger, LoopClock]:
        """A coordinator that continues the ledger, of this start of the run or of the one before.

        It begins one where there is none. Raises InputError, OSError.
        """
        folder = self.config.run.dir / FOLDER
        folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
        unix_s = UnixTime()
        references = References(self.config, self.prompts, folder=folder, unix_s=unix_s)
        limit_s = self.config.checkpoint.write_timeout_s
        label = self.config.ports.label
        live = Live(
            self.maker, self.writer, self.config.run.dir / RECORDS, self.metrics,
            self.config.run.dir / "metrics.jsonl",
        )  # fmt: skip
        # The launcher has removed a ledger that may not be continued, and draws a label.
        if label:
            found = recover(folder, references, unix_s, live, label=label, limit_s=limit_s)
            if found is not None:
                return found
        unix_s.clock = clock = LoopClock()
        remove_segments(folder)
        parts = self._parts(unix_s, clock.read())
        ledger = Ledger(
            folder, parts, references, unix_s,
            label=label, metrics_begin=live.metrics_path.stat().st_size, limit_s=limit_s,
        )  # fmt: skip
        return ledger, clock

    def _parts(self, unix_s: UnixTime, now: float) -> Parts:
        maker, metrics = LedgerMaker(self.maker), LedgerMetrics(self.metrics)
        writer = LedgerWriter(self.writer)
        recorder = Recorder(self.config.run.dir, to_unix_s=unix_s, writer=writer)
        coordinator = Coordinator(
            self.config, self.prompts, recorder=recorder, metrics=metrics, maker=maker, now=now
        )
        return Parts(self._begin(coordinator), maker, writer, metrics)

    def _begin(self, coordinator: Coordinator) -> Coordinator:
        """Begin where the trainer does."""
        if self.state is not None:
            coordinator.resume(self.state)
        if self.awaits_cold_start:
            coordinator.deadline.await_trainer()
        return coordinator
