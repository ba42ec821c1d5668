"""What trainer ranks under test do: load a model, change it, weight sync it as the product does.

The functions run inside `run_ranks`.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_rl.config.tree import Config
from megatron_rl.trainer.model.policy import Policy, open_policy
from megatron_rl.trainer.train import open_control, open_syncer
from megatron_rl.weights.exchange import parcels
from megatron_rl.weights.exchange.parcels import Ends
from megatron_rl.weights.folders.export import save_hf
from megatron_rl.weights.sync import reshard
from megatron_rl.weights.sync.syncer import WeightSyncer

ADMIT_S = 100.0
ORIGINAL, ORIGINAL_SEND = parcels.pack, reshard.send


@dataclass(frozen=True)
class Blow:
    """A signal that trainer rank 0 sends during the weight sync of a version."""

    version: int
    pids: tuple[int, ...]
    number: int = signal.SIGKILL
    after_parcels: int = 0
    """It is sent before this many parcels are sent; 0: before the weight sync."""


@dataclass(frozen=True)
class Script:
    """What the ranks sync and what happens meanwhile."""

    exports: tuple[Path, ...]
    """Version k is saved to exports[k]."""
    salt: float = 0.0
    blows: tuple[Blow, ...] = ()
    parcel_s: float = 0.0
    """Each parcel waits so long before it is sent."""
    slow_receiver: int = 0
    """Only parcels of ranks that send to this receiver of the plan do; 0: all."""
    admits_until: int = 0
    """After the last version, admit until so many generators hold it; failing that, fail."""


@dataclass(frozen=True)
class WeightsSynced:
    """What one weight sync was like."""

    metrics: dict[str, float]
    seconds: float
    parcels: int = 0
    """How many this rank packed."""


def sync_script(cfg: Config, script: Script) -> list[WeightsSynced]:
    """Sync all versions; on every rank, what each was like."""
    torch.set_num_threads(1)
    found = []
    with (
        open_policy(cfg) as policy,
        open_syncer(cfg, policy, open_control(cfg, policy)) as weights,
    ):
        for version, export in enumerate(script.exports):
            change(policy, 1.01 + script.salt)
            save_hf(export, policy.chunks, policy.shape, source=cfg.model.path)
            packed: list[float] = []
            parcels.pack = instrumented(script, version, packed)
            one = timed(weights, lambda version=version: weights.sync(version))
            found.append(replace(one, parcels=len(packed)))
        if script.admits_until:
            found.append(timed(weights, lambda: admit(cfg, weights, script.admits_until)))
    return found


def change(policy: Policy, factor: float) -> None:
    with torch.no_grad():
        for chunk in policy.chunks:
            for parameter in chunk.parameters():
                parameter.mul_(factor)


def timed(weights: WeightSyncer, work: Callable[[], None]) -> WeightsSynced:
    started = time.monotonic()
    work()
    metrics = {metric.name: metric.value for metric in weights.metrics}
    return WeightsSynced(metrics, time.monotonic() - started)


def instrumented(script: Script, version: int, packed: list[float]) -> Callable:
    """`pack` that notes its times, and strikes on rank 0 when it is time."""
    is_first = os.environ["RANK"] == "0"
    blows = [blow for blow in script.blows if blow.version == version and is_first]
    for blow in blows:
        if not blow.after_parcels:
            strike(blow)

    here = threading.local()

    def send(ends: Ends, transport: Any, **options: Any) -> None:
        here.receivers = {end.peer for parcels in ends for end in parcels} | {0}
        ORIGINAL_SEND(ends, transport, **options)

    reshard.send = send

    def pack(*args: object, **options: object) -> torch.Tensor:
        packed.append(time.monotonic())
        for blow in blows:
            if len(packed) == blow.after_parcels:
                strike(blow)
        if script.slow_receiver in here.receivers:
            time.sleep(script.parcel_s)
        return ORIGINAL(*args, **options)

    return pack


def strike(blow: Blow) -> None:
    for pid in blow.pids:
        os.kill(pid, blow.number)


def admit(cfg: Config, weights: WeightSyncer, wanted: int) -> None:
    """Admit as the trainer does while it waits for a batch, until enough hold the version."""
    ends_at = time.monotonic() + ADMIT_S
    count = 0
    while count < wanted:
        assert time.monotonic() < ends_at, f"{count} of {wanted} generators came back"
        weights.admit()
        count = weights._control.share(len(weights._held), int)
        time.sleep(0.2)
