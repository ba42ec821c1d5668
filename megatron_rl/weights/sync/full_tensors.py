"""The methods `broadcast` and `disk`: trainer rank 0 sends full tensors.

Run on every trainer rank. Engines that load weights only in Hugging Face's form need them. They are
also the baseline of `reshard`. All generators are paused from the first bucket to the last.
"""

import logging
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.protocol.nccl_settings import check_settings, own_settings
from megatron_rl.protocol.types import (
    Bucket,
    JoinGroup,
    LeaveGroup,
    Load,
    Pause,
)
from megatron_rl.weights.exchange.group import close_group, is_of_devices, join_group, open_store
from megatron_rl.weights.sync.control import Control
from megatron_rl.weights.sync.link import POLL_S, Conversation, GeneratorLink, GeneratorLost
from megatron_rl.weights.sync.members import ExchangeSettings, Member, Outcome

log = logging.getLogger(__name__)

Buckets = Iterator[list[tuple[str, Tensor]]]
"""Full tensors under HF names, in buckets; empty on ranks other than 0."""
KEPT_FOLDERS = 2
"""Versions kept on disk: a dropped generator may still read the last but one."""


class Broadcast:
    """Buckets of full tensors, broadcast to the ranks of each engine."""

    def __init__(
        self,
        buckets: Callable[[], Buckets],
        *,
        control: Control,
        link: GeneratorLink | None,
        settings: ExchangeSettings,
    ) -> None:
        """buckets: called on every rank for each weight sync."""
        self._buckets = buckets
        self._control, self._link, self._settings = control, link, settings
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._groups_made = 0

    def sync(self, members: list[Member], version: int) -> Outcome:
        """Bring all members to the version."""
        outcome = Outcome()
        if self._link is None:
            # The gathering of buckets waits for rank 0 as long as sending one may take. Before the
            # first bucket rank 0 may wait expert.weights.deadline_s for each lost generator; the
            # other ranks await its signal.
            self._control.share("", str)
            for _ in self._buckets():
                pass
        else:
            paused = Conversation(self._link, members, outcome, self._settings.deadline_s)
            for member in members:
                self._join(member, paused)
            paused.ask(Pause())
            # The signal that the other ranks wait for.
            self._control.share("", str)
            for bucket in self._buckets():
                self._send(bucket, version, paused)
                outcome.wire_bytes += sum(tensor.nbytes for _, tensor in bucket)
            paused.resume(version)
        outcome.failed = self._control.share(outcome.failed, dict[str, str])
        return outcome

    def _join(self, member: Member, paused: Conversation) -> None:
        if member.name in self._groups or self._link is None:
            return
        settings = self._settings
        if is_of_devices(settings.backend):
            check_settings(own_settings(), member.hello.nccl)
        self._groups_made += 1
        name, size = f"{settings.name}-{self._groups_made}", 1 + member.hello.world_size
        deadline_s = settings.deadline_s
        store = open_store(settings.host, 0, is_master=True, timeout_s=deadline_s)
        message = JoinGroup(
            settings.host, store.port, 1, size, name, settings.backend, deadline_s
        )  # fmt: skip
        try:
            # Both sides return from forming the group only when all are in it: no wait in between.
            self._link.tell(member.name, message)
            self._groups[member.name] = join_group(
                store, 0, size, name=name, backend=settings.backend, timeout_s=deadline_s
            )
            self._link.await_ack(member.name, message, time.monotonic() + deadline_s)
        except (GeneratorLost, dist.DistError) as error:
            paused.lose(member.name, f"{member.name} did not join: {error}")

    def _send(self, bucket: list[tuple[str, Tensor]], version: int, paused: Conversation) -> None:
        message = Bucket(
            names=[name for name, _ in bucket],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            shapes=[list(tensor.shape) for _, tensor in bucket],
            version=version,
        )
        flat = torch.cat([tensor.contiguous().view(torch.uint8).flatten() for _, tensor in bucket])
        for name in list(paused.names):
            try:
                self._send_to(name, message, flat)
            except (GeneratorLost, RuntimeError) as error:
                paused.lose(name, f"{name}: {error}")

    def _send_to(self, name: str, message: Bucket, flat: Tensor) -> None:
        """Broadcast to one engine; its Failed or the deadline ends the broadcast."""
        assert self._link is not None
        ends_at = time.monotonic() + self._settings.deadline_s
        self._link.tell(name, message)
        # Asynchronous: a blocking broadcast that the engine refused would last until its deadline.
        work = dist.broadcast(flat, src=0, group=self._groups[name], async_op=True)
        self._link.wait(name, work.is_completed, ends_at, "a broadcast did not end")
        work.wait(timedelta(seconds=max(POLL_S, ends_at - time.monotonic())))
        self._link.await_ack(name, message, ends_at)

    def forget(self, name: str) -> None:
        """Close the group with a lost generator."""
        group = self._groups.pop(name, None)
        if group is not None:
            close_group(group)

    def close(self) -> None:
        """Leave all groups."""
        for name in list(self._groups):
            _say_goodbye(self._link, name)
            self.forget(name)


class Disk:
    """A Hugging Face folder for each version, read by every engine."""

    def __init__(
        self,
        save: Callable[[Path], None],
        folder: Path,
        *,
        control: Control,
        link: GeneratorLink | None,
        deadline_s: float,
    ) -> None:
        """save: collective, writes the model to a folder; folder: where the versions go."""
        self._save, self._folder = save, folder
        self._control, self._link, self._deadline_s = control, link, deadline_s
        self._names: set[str] = set()
        self._saved = -1
        """Version of the newest folder."""

    def sync(self, members: list[Member], version: int) -> Outcome:
        """Bring all members to the version; they generate while rank 0 writes the folder."""
        outcome = Outcome()
        target = self._folder / f"version_{version:06d}"
        if version != self._saved:
            self._remove_from(target)
            self._save(target)
            self._saved = version
        if self._link is not None:
            paused = Conversation(self._link, members, outcome, self._deadline_s)
            paused.ask(Pause())
            paused.ask(Load(str(target), version))
            paused.resume(version)
            self._names |= {member.name for member in members}
            for old in sorted(self._folder.glob("version_*"))[:-KEPT_FOLDERS]:
                shutil.rmtree(old)
        outcome.failed = self._control.share(outcome.failed, dict[str, str])
        return outcome

    def _remove_from(self, target: Path) -> None:
        """On rank 0: remove this and later versions that an earlier syncer left."""
        if self._control.rank == 0:
            for old in self._folder.glob("version_*"):
                if old.name >= target.name:
                    shutil.rmtree(old)

    def forget(self, name: str) -> None:
        """Nothing is held for a generator."""
        self._names.discard(name)

    def close(self) -> None:
        """Let the generators look for another syncer."""
        for name in self._names:
            _say_goodbye(self._link, name)


def _say_goodbye(link: GeneratorLink | None, name: str) -> None:
    if link is not None:
        try:
            link.tell(name, LeaveGroup())
        except GeneratorLost as error:
            log.info("%s", error)
