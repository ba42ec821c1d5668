"""Makes the coordinator of a process: new, resumed from a checkpoint, or continued from a ledger.

A ledger is continued from its newest state, with each record after it. The queue was killed alone,
or its launcher with all processes (`Coordinator.relaunch`).

Used by the rollout queue's server at its start, and by the launcher to check a saved state. The
messages of the replayed coordinator are not sent; their checksums are compared with those of the
killed process, so a replay that differs ends the run instead of losing prompts silently.
"""

import logging
import pickle
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.data.prompts import PromptSets
from megatron_rl.protocol.endpoints import BATCHES, PROMPTS, VERIFY
from megatron_rl.protocol.frames import Frame, decode_frames
from megatron_rl.protocol.ledger import (
    FOLDER,
    LOG,
    STATE,
    AnyRecord,
    Began,
    Counted,
    LogFile,
    Received,
    Relaunched,
    Sent,
    StopAsked,
    Ticked,
    TrainerExpected,
    Unreachable,
    read_began,
    read_entries,
    read_state,
    remove_segments,
    segment_path,
    segments,
)
from megatron_rl.protocol.metrics import JsonlWriter
from megatron_rl.protocol.queue_state import QueueState
from megatron_rl.protocol.types import RolloutDone
from megatron_rl.protocol.whole_file import PRIVATE_FOLDER
from megatron_rl.protocol.wire import WireError
from megatron_rl.rollout_queue.batch_thread import BatchMaker
from megatron_rl.rollout_queue.coordinator import Coordinator
from megatron_rl.rollout_queue.effects import LedgerMaker, LedgerMetrics, LedgerWriter
from megatron_rl.rollout_queue.evaluation import evaluation_sets
from megatron_rl.rollout_queue.evaluation_scheduler import check_unfinished
from megatron_rl.rollout_queue.ledger import Ledger, Parts, check_of, start_of
from megatron_rl.rollout_queue.record import Recorder
from megatron_rl.rollout_queue.record_files import RecordFiles, RecordThread
from megatron_rl.rollout_queue.replay import open_replay
from megatron_rl.rollout_queue.stall import LoopClock, UnixTime
from megatron_rl.rollout_queue.states import Place, References
from megatron_rl.rollout_queue.training_groups import TrainingGroups

log = logging.getLogger(__name__)

_HEARS = {endpoint.name: endpoint.router_hears for endpoint in (PROMPTS, VERIFY, BATCHES)}


class Live(NamedTuple):
    """What a new process does the coordinator's work with."""

    maker: BatchMaker
    writer: RecordFiles | RecordThread
    records: Path
    """Folder of the writer."""
    metrics: JsonlWriter
    metrics_path: Path


@dataclass
class _Replay:
    """A coordinator that gets the records of a log."""

    parts: Parts
    unix_s: UnixTime
    path: Path
    start: str
    """As in `Began`, of the latest start that wrote to the log."""
    now: float
    """Latest time in the state and in the log."""
    references: References
    number: int
    """Of the segment."""
    records: int = 0

    def run(self) -> int:
        """Apply the whole log; returns the end of its last record, in bytes."""
        end, room = 0, logging.getLogger(__package__)
        # All of it is in the log of the killed process.
        room.setLevel(logging.ERROR)
        try:
            for entry in read_entries(self.path):
                self.apply(entry.record, [*entry.frames], Place(self.number, end, entry.end))
                end = entry.end
        finally:
            room.setLevel(logging.NOTSET)
        return end

    def apply(self, record: AnyRecord, frames: list[Frame], place: Place) -> None:
        """Do again what a record says. Raises InputError if the outcome differs."""
        self.records += 1
        coordinator = self.parts.coordinator
        match record:
            case Received(endpoint, peer, now):
                self.now = now
                try:
                    message = decode_frames(frames, _HEARS[endpoint])
                    if isinstance(message, RolloutDone):
                        self.references.note(message.rollout, place)
                    coordinator.handle(endpoint, peer, message, now)
                except WireError as error:
                    # It was refused then, too; the next record says so.
                    log.debug("a message of %s was refused: %s", peer, error)
            case Sent():
                self._send(record)
            case Ticked(now, has_heard_all, offset_s):
                self.now, self.unix_s.offset_s = now, offset_s
                coordinator.tick(now, has_heard_all=has_heard_all)
            case Unreachable(endpoint, peer):
                coordinator.lose(endpoint, peer)
            case Counted(values):
                self.parts.metrics.write(0, values)
            case StopAsked():
                coordinator.stop_training()
            case TrainerExpected(now):
                coordinator.expect_trainer(now)
            case Relaunched(start, now):
                self.start = start
                self.unix_s.end_launch(now)
                coordinator.relaunch(now)
            case Began():
                raise InputError(f"{self.path} has the record of a state")

    def _send(self, sent: Sent) -> None:
        self.now = sent.now
        self.parts.writer.note_written(sent.written)
        self.parts.maker.has_dealt = sent.has_dealt
        messages = list(self.parts.coordinator.outgoing(sent.now))
        found = len(messages), check_of(messages)
        if found != (sent.messages, sent.check):
            raise InputError(
                f"the ledger {self.path} cannot be continued: after {self.records} records the "
                f"queue sends {found[0]} messages (checksum {found[1]:08x}), but the killed one "
                f"sent {sent.messages} ({sent.check:08x}). Start the run again: it resumes from "
                "its newest checkpoint"
            )


def recover(
    folder: Path,
    references: References,
    unix_s: UnixTime,
    live: Live,
    *,
    label: str,
    limit_s: float,
) -> tuple[Ledger, LoopClock] | None:
    """Continue the newest segment, of this start of the run or another one; None without any.

    The clock continues where that of the killed queue stopped; unix_s gets it too. Raises
    InputError when the ledger cannot be continued, and OSError.
    """
    number = max(segments(folder), default=None)
    if number is None:
        return None
    began = read_began(folder, number)
    if began is None:
        raise _damaged(folder, number)
    began_at = time.monotonic()
    try:
        parts = Parts(*references.load(read_state(folder, number)))
    except (pickle.UnpicklingError, EOFError, KeyError, FileNotFoundError) as error:
        raise _damaged(folder, number) from error
    parts.metrics.begin_replay(live.metrics, live.metrics_path, began.metrics_begin)
    path = segment_path(folder, number, LOG)
    unix_s.offset_s, unix_s.ended = began.offset_s, began.ended
    replay = _Replay(parts, unix_s, path, began.start, began.now, references, number)
    end = replay.run() if path.exists() else 0
    parts.writer.end_replay(live.writer, live.records)
    parts.maker.end_replay(live.maker)
    ledger = Ledger(
        folder, parts, references, unix_s, label=label, metrics_begin=began.metrics_begin,
        limit_s=limit_s, number=number, log_file=LogFile(path, end=end, limit_s=limit_s),
    )  # fmt: skip
    is_own = replay.start == start_of(label)
    log.warning(
        "the queue continues after %s: %d records of segment %d, %.1f s",
        "its death" if is_own else "the end of its launcher",
        replay.records, number, time.monotonic() - began_at,
    )  # fmt: skip
    if not is_own:
        unix_s.end_launch(replay.now)
    unix_s.clock = LoopClock(begin=replay.now)
    if not is_own:
        ledger.relaunch(replay.now)
    return ledger, unix_s.clock


def _damaged(folder: Path, number: int) -> InputError:
    return InputError(
        f"the ledger's state {segment_path(folder, number, STATE)} is damaged. Start the run "
        "again: it resumes from its newest checkpoint"
    )


@dataclass(frozen=True)
class Start:
    """What a queue starts with."""

    config: Config
    prompts: PromptSets
    state: QueueState | None
    """Of the checkpoint from which a run resumes."""
    live: Live
    awaits_cold_start: bool = False

    def without_ledger(
        self, *, evaluate_only: str, keeps_evaluated: bool
    ) -> tuple[Coordinator, LoopClock]:
        """A coordinator, and its clock. evaluate_only: label of the only evaluation, or empty."""
        clock, live = LoopClock(), self.live
        recorder = Recorder(
            self.config.run.dir,
            keeps_evaluated=keeps_evaluated,
            to_unix_s=clock.unix_s,
            writer=live.writer,
        )
        coordinator = Coordinator(
            self.config, self.prompts,
            recorder=recorder, metrics=live.metrics, maker=live.maker,
            evaluate_only=evaluate_only, now=clock.read(),
        )  # fmt: skip
        return self._begin(coordinator), clock

    def with_ledger(self) -> tuple[Ledger, LoopClock]:
        """A coordinator that continues the ledger, of this start of the run or of the one before.

        It begins one where there is none. Raises InputError, OSError.
        """
        folder, live = self.config.run.dir / FOLDER, self.live
        folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
        unix_s = UnixTime()
        references = References(self.config, self.prompts, folder=folder, unix_s=unix_s)
        limit_s = self.config.checkpoint.write_timeout_s
        label = self.config.ports.label
        # The launcher has removed a ledger that may not be continued, and draws a label.
        if label:
            found = recover(folder, references, unix_s, live, label=label, limit_s=limit_s)
            if found is not None:
                return found
        unix_s.clock = clock = LoopClock()
        remove_segments(folder)
        maker, metrics = LedgerMaker(live.maker), LedgerMetrics(live.metrics)
        writer = LedgerWriter(live.writer)
        recorder = Recorder(self.config.run.dir, to_unix_s=unix_s, writer=writer)
        coordinator = self._begin(
            Coordinator(
                self.config, self.prompts,
                recorder=recorder, metrics=metrics, maker=maker, now=clock.read(),
            )
        )  # fmt: skip
        ledger = Ledger(
            folder, Parts(coordinator, maker, writer, metrics), references, unix_s,
            label=label, metrics_begin=live.metrics_path.stat().st_size, limit_s=limit_s,
        )  # fmt: skip
        return ledger, clock

    def _begin(self, coordinator: Coordinator) -> Coordinator:
        """Begin where the trainer does."""
        if self.state is not None:
            coordinator.resume(self.state)
        if self.awaits_cold_start:
            coordinator.deadline.await_trainer()
        return coordinator


def check_resumption(config: Config, prompts: PromptSets, state: QueueState) -> None:
    """Raise InputError for a saved state that `Coordinator.resume` would refuse; writes nothing.

    The launcher calls it before it changes the run folder.
    """
    TrainingGroups(prompts, config).restore(state)
    if config.replay.buffer_groups:
        replay = open_replay(config, prompts.held_out)
        assert replay is not None
        replay.resume_at(state.step)
    check_unfinished(config.run.dir, state, evaluation_sets(config, prompts))
