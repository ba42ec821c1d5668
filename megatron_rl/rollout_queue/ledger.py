"""Writes down all that reaches the coordinator before anything that depends on it is sent.

Used by the rollout queue's server. The coordinator has neither sockets nor a clock, so the same
inputs lead to the same state: `recovery.py` continues a ledger after the queue was killed. What a
killed queue had sent is known, and what it had read from a socket without writing it down is sent
again: by generators (completions that were not confirmed), by the trainer (requests), and after a
heartbeat that does not name a lease or request.

A segment begins with the whole state. When its log has grown so that a replay would take long, the
next one begins. Earlier logs stay while the state names rollouts of them. While the disk has no
room for a state, the old segment continues.
"""

import hashlib
import logging
import time
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from megatron_rl.protocol.closing import Closing
from megatron_rl.protocol.disk_room import Shortage, write_when_room
from megatron_rl.protocol.frames import Frame, encode_frames
from megatron_rl.protocol.ledger import (
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
    remove_segments,
    segment_path,
    write_state,
)
from megatron_rl.protocol.types import AnyMessage, RolloutDone
from megatron_rl.rollout_queue.coordinator import Coordinator, Outgoing
from megatron_rl.rollout_queue.effects import LedgerMaker, LedgerMetrics, LedgerWriter
from megatron_rl.rollout_queue.stall import UnixTime
from megatron_rl.rollout_queue.states import Place, References, program_digest

log = logging.getLogger(__name__)

LEAST_LOG_BYTES = 64 << 20
LOG_PER_STATE = 4
"""A log may have this many times the bytes that the state before it holds: states stay rare."""
MOST_RECORDS = 50_000
"""Records of a log: their replay takes about two seconds."""
CUT_AGAIN_S = 30.0
"""Seconds between two tries to write a state for which the disk had no room."""


class Parts(NamedTuple):
    """A coordinator and its effects: what a state contains."""

    coordinator: Coordinator
    maker: LedgerMaker
    writer: LedgerWriter
    metrics: LedgerMetrics


class Ledger(Closing):
    """Writes down the inputs of a coordinator, and has its methods."""

    def __init__(
        self,
        folder: Path,
        parts: Parts,
        references: References,
        unix_s: UnixTime,
        *,
        label: str,
        metrics_begin: int,
        limit_s: float,
        number: int = -1,
        log_file: LogFile | None = None,
    ) -> None:
        """Begin a ledger, or continue segment `number` of one.

        label: of this start of the run. metrics_begin: bytes of metrics.jsonl at the beginning.
        limit_s: how long a full disk is waited for. Raises InputError when it stays full.
        """
        self._folder, self._parts, self._references = folder, parts, references
        self._coordinator, self._unix_s = parts.coordinator, unix_s
        self._start, self._metrics_begin = start_of(label), metrics_begin
        self._limit_s = limit_s
        self._shortage = Shortage(folder, limit_s)
        self._cut_at = 0.0
        """time.monotonic() before which no segment begins."""
        self._number = number
        self._now = 0.0
        """Time of the latest pass."""
        self._held_bytes = self._records = 0
        """Bytes of the latest state and of the rollouts that it names; records of the log."""
        self._oldest_log = number
        """The first log that the latest state needs."""
        if log_file is None:
            first = segment_path(folder, number + 1, STATE)
            log_file = write_when_room(first, self._begin_segment, limit_s=limit_s)
        self._file = log_file

    def _add(self, record: AnyRecord, frames: Sequence[Frame] = ()) -> None:
        self._records += 1
        self._file.append(record, frames)

    # --- what reaches the coordinator -----------------------------------------------------------

    def handle(
        self,
        endpoint: str,
        peer: str,
        message: AnyMessage,
        now: float,
        frames: Sequence[Frame] = (),
    ) -> None:
        """As `Coordinator.handle`. frames: those in which the message came."""
        begin = self._file.end
        self._add(Received(endpoint, peer, now), frames or encode_frames(message))
        if isinstance(message, RolloutDone):
            self._references.note(message.rollout, Place(self._number, begin, self._file.end))
        self._coordinator.handle(endpoint, peer, message, now)

    def lose(self, endpoint: str, peer: str) -> None:
        self._add(Unreachable(endpoint, peer))
        self._coordinator.lose(endpoint, peer)

    def tick(self, now: float, *, has_heard_all: bool = True) -> None:
        self._add(Ticked(now, has_heard_all, self._unix_s.present_offset_s))
        self._coordinator.tick(now, has_heard_all=has_heard_all)

    def stop_training(self) -> None:
        self._add(StopAsked())
        self._coordinator.stop_training()

    def expect_trainer(self, now: float) -> None:
        self._add(TrainerExpected(now))
        self._coordinator.expect_trainer(now)

    def relaunch(self, now: float) -> None:
        """As `Coordinator.relaunch`: this start of the run continues the ledger of another one."""
        self._add(Relaunched(self._start, now))
        self._coordinator.relaunch(now)

    def write_counts(self, values: dict[str, float]) -> None:
        self._add(Counted(values))
        self._parts.metrics.write(0, values)

    # --- what it sends --------------------------------------------------------------------------

    def outgoing(self, now: float) -> Sequence[Outgoing]:
        """As `Coordinator.outgoing`, once all that led to these messages is written.

        Raises InputError when the disk fails or stays full.
        """
        writer, maker = self._parts.writer, self._parts.maker
        self._now = now
        writer.look()
        messages = list(self._coordinator.outgoing(now))
        self._add(
            Sent(
                now, writer.written, maker.has_dealt, len(messages), check_of(messages),
                self._coordinator.requests.built_steps,
            )
        )  # fmt: skip
        self._flush()
        most_bytes = max(LEAST_LOG_BYTES, LOG_PER_STATE * self._held_bytes)
        if self._records > MOST_RECORDS or self._file.bytes > most_bytes:
            self._cut_if_room()
        return messages

    def _flush(self) -> None:
        """Write the ledger, then what follows from it."""
        self._file.flush()
        self._parts.maker.release()
        self._parts.writer.release()
        self._parts.metrics.release()

    def farewell(self, now: float) -> Iterable[Outgoing]:
        """As `Coordinator.farewell`. The ledger ends here."""
        messages = list(self._coordinator.farewell(now))
        self._flush()
        return messages

    @property
    def is_over(self) -> bool:
        return self._coordinator.is_over

    @property
    def is_dealing(self) -> bool:
        return self._coordinator.is_dealing

    @property
    def peers(self) -> set[tuple[str, str]]:
        return self._coordinator.peers

    # --- segments -------------------------------------------------------------------------------

    def _cut_if_room(self) -> None:
        """Begin a segment and remove the one before it, or try again after CUT_AGAIN_S.

        Raises InputError when the disk has no room for a state for too long.
        """
        if time.monotonic() < self._cut_at:
            return
        try:
            file = self._begin_segment()
        except OSError as error:
            self._shortage.note(error)
            self._cut_at = time.monotonic() + CUT_AGAIN_S
            return
        self._shortage.end()
        self._file.close()
        self._file = file
        remove_segments(self._folder, before=self._number, logs_before=self._oldest_log)

    def _begin_segment(self) -> LogFile:
        """Write the state of the next segment; returns its log. Raises OSError."""
        number = self._number + 1
        # The log comes first: a queue that is killed now continues the segment that has a state.
        file = LogFile(segment_path(self._folder, number, LOG), limit_s=self._limit_s)
        began = Began(
            self._start, self._metrics_begin, self._unix_s.present_offset_s, program_digest(),
            self._now, self._coordinator.requests.built_steps, self._unix_s.ended,
        )  # fmt: skip
        named: list[Place] = []

        def write(state: BinaryIO) -> None:
            named.extend(self._references.dump(self._parts, state, number=number))

        try:
            size = write_state(self._folder, number, began, write)
        except OSError:
            file.close()
            raise
        self._number, self._records = number, 0
        self._held_bytes = size + sum(place.end - place.begin for place in named)
        self._oldest_log = min((place.segment for place in named), default=number)
        log.info(
            "segment %d of the ledger begins: a state of %d bytes names %d rollouts",
            number, size, len(named),
        )  # fmt: skip
        return file

    def remove(self) -> None:
        """The run has ended well: nobody continues the ledger."""
        self.close()
        remove_segments(self._folder)

    def close(self) -> None:
        self._file.close()


def start_of(label: str) -> str:
    """Digest of the label of a start of the run; the label is secret."""
    return hashlib.sha256(label.encode()).hexdigest()


def check_of(messages: Iterable[Outgoing]) -> int:
    """Checksum of the kinds, receivers and numbers of messages."""
    check = 0
    for endpoint, peer, message in messages:
        number = getattr(message, "lease_id", getattr(message, "request_id", None))
        number = getattr(message, "step", "") if number is None else number
        check = zlib.crc32(f"{endpoint} {peer} {type(message).__name__} {number}".encode(), check)
    return check
