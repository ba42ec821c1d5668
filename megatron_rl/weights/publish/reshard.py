"""The method `reshard`: slices go from trainer shards straight into engine shards.

Runs on every trainer rank. One process group a generator, of all trainer ranks and the engine's
ranks, so that a generator that fails harms no other's. A transfer:

| rank 0 | the other trainer ranks | the engine's ranks |
|---|---|---|
| find what they send, take digests | the same | |
| Pause, then Receive | wait for its `Start` | read the plan, check their parameters, say ready |
| waits for all `ready`, sets `go` | | wait for `go` |
| opens the group, sends | open the group, send | open the group, receive, compare digests |
| reads all `done`; Resume, or once more | learn how it ended | |

Nothing is sent before every receiver is ready, and a receiver that fails closes its connections:
senders then fail at once. Only a receiver that hangs costs them the whole deadline.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.types import Fence, Hello, LeaveGroup, Pause, Receive, Resume
from megatron_rl.weights.exchange.group import open_store
from megatron_rl.weights.exchange.parcels import Ends, outgoing, send
from megatron_rl.weights.exchange.plain import PlainParameters
from megatron_rl.weights.exchange.plan import Parcel, Plan, make_plan
from megatron_rl.weights.exchange.receiver import Report
from megatron_rl.weights.exchange.transport import IPC, Buffers, Channel
from megatron_rl.weights.layout.engine_layout import engine_slices, hf_slices
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.layout.slices import Slice
from megatron_rl.weights.layout.tensor_shards import Share
from megatron_rl.weights.publish.control import Control
from megatron_rl.weights.publish.link import GeneratorLink, GeneratorLost
from megatron_rl.weights.publish.publisher import Member, Outcome

log = logging.getLogger(__name__)

ATTEMPTS = 2
"""Transfers of one publish to one generator; the second if parcels arrived damaged."""
ENGINE_MARGIN_S = 2.0
"""The senders' deadline ends so much later than the receivers': a receiver that is late then has
time to report why, and its error says more than a sender's."""


@dataclass(frozen=True)
class ExchangeSettings:
    """How to exchange."""

    host: str
    """Where the stores of the groups listen."""
    backend: str
    """Collectives of the groups, or IPC: no groups, but memory that ranks on one host share."""
    dtype: torch.dtype
    """Of elements on the wire."""
    bucket_bytes: int
    deadline_s: float
    name: str
    """Prefix of the groups' names, the same on every rank and of no other publisher."""


class Start(msgspec.Struct, frozen=True):
    """Whether one transfer takes place: what rank 0 tells the other trainer ranks."""

    reason: str = ""
    """Why it does not take place; empty when it does."""
    receive: Receive | None = None


class _Stream:
    """One trainer rank's end of the exchange with one generator."""

    def __init__(self, rounds: list[list[Parcel]]) -> None:
        self.rounds = rounds
        self.channel: Channel | None = None
        self.name = ""
        self.port = 0
        self.attempts = 0

    @property
    def store(self) -> dist.TCPStore:
        """Of the exchange; rank 0 opens it before the first transfer."""
        assert self.channel is not None
        return self.channel.store


class Reshard:
    """Exchanges with all generators."""

    def __init__(
        self,
        parameters: dict[str, Tensor],
        senders: dict[int, list[Slice]],
        shape: ModelShape,
        *,
        control: Control,
        link: GeneratorLink | None,
        settings: ExchangeSettings,
    ) -> None:
        """parameters: this rank's, by local name. senders: the slices of every trainer rank."""
        self._parameters = parameters
        self._plain = PlainParameters(parameters)
        """Of the publish that is going on."""
        self._senders, self._shape = senders, shape
        self._control, self._link, self._settings = control, link, settings
        self._streams: dict[str, _Stream] = {}
        self._groups_made = 0
        self._buffers = Buffers()
        self.peak_bytes = 0
        """Most memory of buffers that this rank has needed."""

    def publish(self, members: list[Member], version: int) -> Outcome:
        """Serve one member after the other, so that each is paused for its own transfer only."""
        outcome = Outcome()
        self._open_streams(members)
        self._plain = PlainParameters(self._parameters)
        for member in members:
            reason = self._serve(member, version, outcome)
            if reason:
                outcome.failed[member.name] = reason
        self._plain.clear()
        return outcome

    # --- one generator --------------------------------------------------------------------------

    def _serve(self, member: Member, version: int, outcome: Outcome) -> str:
        """Bring one generator to the version; why that failed, the same on every rank."""
        # Before Pause: while the senders take digests, the generator still generates.
        ends, fault = self._find(member.name)
        # Ranks without a fault do not know of it, and would wait in a transfer.
        is_found = self._control.all(not fault)
        if not is_found:
            fault = fault or f"{member.name}: a trainer rank could not prepare its slices"
        paused_at = time.monotonic()
        reason, damaged = self._control.share(fault, str), 0
        # Every rank repeats or ends the loop alike, as both values come from rank 0.
        for _ in range(ATTEMPTS if is_found else 0):
            reason, damaged = self._transfer(member, ends, version, outcome)
            outcome.damaged += damaged
            if reason or not damaged:
                break
            log.warning("%d damaged parcels at %s: once more", damaged, member.name)
        if damaged and not reason:
            reason = f"{member.name}: {damaged} parcels arrived damaged, {ATTEMPTS} times"
        # Shared once more: a generator may also be lost when it is told to go on.
        reason = self._control.share(self._conclude(member, version, reason), str)
        if not reason:
            outcome.pauses_s.append(time.monotonic() - paused_at)
        return reason

    def _find(self, name: str) -> tuple[Ends, str]:
        """What this rank sends the generator, and why it could not prepare that."""
        try:
            ends = outgoing(
                self._streams[name].rounds,
                self._plain,
                self._settings.dtype,
                stages_all=self._settings.backend == IPC,
            )
        except RuntimeError as error:
            # torch's, of a device without room for what is dequantised.
            return [], f"{name}: preparing failed: {error}"
        return ends, ""

    def _transfer(
        self, member: Member, ends: Ends, version: int, outcome: Outcome
    ) -> tuple[str, int]:
        """(why it failed, damaged parcels), the same on every rank."""
        ends_at = time.monotonic() + self._settings.deadline_s + ENGINE_MARGIN_S
        start = self._control.share(self._prepare(member, version, ends_at), Start)
        if start.receive is None:
            return start.reason, 0
        fault = self._send(member.name, ends, start.receive, ends_at)
        # Where one rank could not send, the reports would not come before the deadline.
        is_sent = self._control.all(not fault)
        verdict = self._verdict(member, start.receive, ends_at, outcome) if is_sent else (fault, 0)
        found = self._control.share(verdict, tuple[str, int])
        if is_sent or found[0]:
            return found
        return f"{member.name}: a trainer rank could not send its slices", 0

    def _prepare(self, member: Member, version: int, ends_at: float) -> Start | None:
        """On rank 0: pause the generator and wait until all its ranks are ready."""
        if self._link is None:
            return None
        stream = self._streams[member.name]
        self._link.begin(member.name, member.hello.session)
        # Part of each key of this transfer, so that a late answer to an earlier one does not count.
        stream.attempts += 1
        receive = self._receive_message(member, stream, version)
        ready = self._keys("ready", receive)
        try:
            # No wait for the Ack of Pause: a generator obeys in order, so `ready` answers both.
            self._link.tell(member.name, Pause())
            self._link.tell(member.name, receive)
            self._link.wait(
                member.name, lambda: stream.store.check(ready), ends_at, "it is not ready"
            )
        except GeneratorLost as error:
            # Ranks of it that are ready wait for `go`, and would do so until their deadline.
            stream.store.set(f"go/{receive.attempt}", "0")
            return Start(str(error))
        refusals = [text for key in ready if (text := stream.store.get(key).decode())]
        stream.store.set(f"go/{receive.attempt}", "0" if refusals else "1")
        return Start(f"{member.name}: {refusals[0]}") if refusals else Start("", receive)

    def _receive_message(self, member: Member, stream: _Stream, version: int) -> Receive:
        offset = self._control.world_size
        return Receive(
            address=self._settings.host,
            port=stream.port,
            group_name=stream.name,
            backend=self._settings.backend,
            rank_offset=offset,
            world_size=offset + member.hello.world_size,
            attempt=stream.attempts,
            version=version,
            deadline_s=self._settings.deadline_s,
        )

    def _send(self, name: str, ends: Ends, receive: Receive, ends_at: float) -> str:
        """This rank's part; why it failed."""
        stream = self._streams[name]
        try:
            # Rank 0 made its channel with the store, whose port the others learn from Receive.
            if stream.channel is None:
                store = open_store(
                    receive.address, receive.port, is_master=False, timeout_s=receive.deadline_s
                )
                stream.channel = Channel(store, self._control.rank, self._buffers)
            device = next(iter(self._parameters.values())).device
            peak_bytes = send(
                ends,
                stream.channel.open(receive, device, ends_at),
                dtype=self._settings.dtype,
                version=receive.version,
                ends_at=ends_at,
            )
            self.peak_bytes = max(self.peak_bytes, peak_bytes)
        except RuntimeError as error:
            # Also torch's DistError of a store, a group or a collective is a RuntimeError.
            return f"{name}: sending failed: {error}"
        return ""

    def _verdict(
        self, member: Member, receive: Receive, ends_at: float, outcome: Outcome
    ) -> tuple[str, int]:
        """On rank 0: (why the transfer failed, damaged parcels) by the reports of all its ranks."""
        if self._link is None:
            return "", 0
        store, done = self._streams[member.name].store, self._keys("done", receive)
        try:
            self._link.wait(member.name, lambda: store.check(done), ends_at, "no report came")
            # The engine's call ends after its ranks' reports, and Resume must not come before that.
            self._link.await_ack(member.name, receive, ends_at)
        except GeneratorLost as error:
            return str(error), 0
        reports = [msgspec.json.decode(store.get(key), type=Report) for key in done]
        errors = [report.error for report in reports if report.error]
        outcome.transfers_s.append(max(report.seconds for report in reports))
        outcome.wire_bytes += sum(report.payload_bytes for report in reports)
        outcome.peak_bytes = max(outcome.peak_bytes, *(report.peak_bytes for report in reports))
        damaged = sum(report.damaged for report in reports)
        return (f"{member.name}: {errors[0]}" if errors else ""), damaged

    def _conclude(self, member: Member, version: int, reason: str) -> str:
        """On rank 0: let the generator go on, or fence it; why that failed."""
        if self._link is None:
            return reason
        ends_at = time.monotonic() + self._settings.deadline_s
        try:
            if not reason:
                # Every engine rank has reported whole parcels: the version may be served.
                self._link.ask(member.name, Resume(version), ends_at)
            else:
                # Its parameters may be half old and half new; nobody waits for it to obey.
                self._link.tell(member.name, Fence(reason))
        except GeneratorLost as error:
            return reason or str(error)
        return reason

    def _keys(self, kind: str, receive: Receive) -> list[str]:
        ranks = range(receive.rank_offset, receive.world_size)
        return [f"{kind}/{receive.attempt}/{rank}" for rank in ranks]

    # --- who is there ---------------------------------------------------------------------------

    def _open_streams(self, members: Sequence[Member]) -> None:
        """Plans for generators without one; all ranks compute the same."""
        # Counted over all members, so that trainer ranks with the same slices share the sending.
        loads: dict[int, int] = {}
        for member in members:
            if member.name in self._streams:
                continue
            self._groups_made += 1
            plan = self.plan(member.hello, loads)
            stream = _Stream(plan.of_sender(self._control.rank))
            # Unique also among runs: another publisher's group is another one.
            stream.name = f"{self._settings.name}-{self._groups_made}"
            if self._link is not None:
                self._open_store(stream, plan, member)
            self._streams[member.name] = stream

    def plan(self, hello: Hello, loads: dict[int, int]) -> Plan:
        """The exchange with an engine; loads: see `make_plan`. Raises InputError."""
        offset, settings = self._control.world_size, self._settings
        try:
            receivers = {
                offset + rank: receiver_slices(self._shape, hello, rank)
                for rank in range(hello.world_size)
            }
            return make_plan(
                self._senders,
                receivers,
                itemsize=settings.dtype.itemsize,
                bucket_bytes=settings.bucket_bytes,
                loads=loads,
            )
        except ValueError as error:
            raise InputError(f"no exchange with a generator of {hello}: {error}") from error

    def _open_store(self, stream: _Stream, plan: Plan, member: Member) -> None:
        host, timeout_s = self._settings.host, self._settings.deadline_s
        store = open_store(host, 0, is_master=True, timeout_s=timeout_s)
        stream.channel, stream.port = Channel(store, self._control.rank, self._buffers), store.port
        offset = self._control.world_size
        # Before any Receive names this store: an engine rank reads its plan as soon as it is there.
        for rank in range(offset, offset + member.hello.world_size):
            store.set(f"plan/{rank}", msgspec.json.encode(plan.of_receiver(rank)))

    def forget(self, name: str) -> None:
        """Close the group with a generator that is gone."""
        stream = self._streams.pop(name, None)
        if stream is not None and stream.channel is not None:
            stream.channel.close()

    def close(self) -> None:
        """Leave all groups."""
        for name in list(self._streams):
            if self._link is not None:
                try:
                    self._link.tell(name, LeaveGroup())
                except GeneratorLost as error:
                    log.info("%s", error)
            self.forget(name)


def receiver_slices(shape: ModelShape, hello: Hello, rank: int) -> list[Slice]:
    """Slices of one rank of a generator's engine."""
    if hello.engine == "hf":
        return hf_slices(shape)
    return engine_slices(shape, Share(rank, hello.world_size), ffn_multiple=hello.ffn_multiple)
