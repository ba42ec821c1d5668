"""A trainer rank of tools.bench.weights: weight syncs in turn by every method and notes how it
went.

Entry, under torchrun: `python -m tools.bench.weights_ranks --config FILE`. Rank 0 writes
a list of `Sample` to RUN_DIR/samples.json.
"""

import os
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import msgspec
import torch
import torch.distributed as dist

from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.protocol.process import run_main, set_up_logging
from megatron_rl.protocol.wire import Router
from megatron_rl.trainer.model.policy import Policy, open_policy
from megatron_rl.trainer.train import open_method
from megatron_rl.weights.exchange import parcels, sender
from megatron_rl.weights.sync.control import Control
from megatron_rl.weights.sync.link import GeneratorLink
from megatron_rl.weights.sync.members import Member, Outcome
from megatron_rl.weights.sync.reshard import Reshard, receiver_slices
from megatron_rl.weights.sync.syncer import Method
from tools.bench.measuring import rotations, start_peak, status_bytes
from tools.bench.weights_exchanges import limited_links, send_floor, send_raw
from tools.bench.weights_figures import (
    FLOOR,
    LINK_VARIABLE,
    METHODS_VARIABLE,
    OVERLAP,
    RAW,
    REPEATS_VARIABLE,
    RESHARD,
    Sample,
)

AWAY_S = 0.02


class Wrapped:
    """A reshard that weight syncs in another way."""

    def __init__(self, method: Reshard) -> None:
        self._method = method
        self.forget, self.close = method.forget, method.close


class Raw(Wrapped):
    """The bytes of a reshard without its parcels; with digests at the senders for the floor."""

    def __init__(self, method: Reshard, *, is_floor: bool) -> None:
        super().__init__(method)
        self._send = send_floor if is_floor else send_raw
        self._digest = parcels.digest_in_place if is_floor else lambda packets: None

    def sync(self, members: list[Member], version: int) -> Outcome:
        """Exchange as many bytes as the members need."""
        with (
            patch.object(sender, "send", self._send),
            patch.object(parcels, "digest_in_place", self._digest),
        ):
            return self._method.sync(members, version)


class Overlapped(Wrapped):
    """Reshard in threads, while the caller does something else."""

    stall_s = 0.0
    """How long the caller waited in the last weight sync."""

    def sync(self, members: list[Member], version: int) -> Outcome:
        """Begin, be away until it is over on rank 0, end."""
        started = time.monotonic()
        self._method.begin(members, version)
        self.stall_s = time.monotonic() - started
        control = self._method._control
        while not control.share(self._method.is_over(), bool):
            time.sleep(AWAY_S)
        started = time.monotonic()
        outcome = self._method.end()
        self.stall_s += time.monotonic() - started
        return outcome


def main(cfg: Config, repeats: int) -> None:
    """Set up this rank, weight sync, write the samples."""
    with ExitStack() as stack:
        policy = stack.enter_context(open_policy(cfg))
        link = None
        if int(os.environ["RANK"]) == 0:
            router = stack.enter_context(Router(cfg.ports.host, cfg.ports.weights))
            link = GeneratorLink(router)
            link.await_peers(cfg.generator.replicas, cfg.weights.join_timeout_s)
        control = Control(policy.backend.host_group(3 * cfg.weights.deadline_s))
        peers = link.peers if link is not None else {}
        members = [Member(name, hello) for name, hello in sorted(peers.items())]
        members = control.share(members, list[Member])
        names = os.environ[METHODS_VARIABLE].split(",")
        methods = {name: make_method(name, cfg, policy, control, link) for name in names}
        link_bytes_per_s = int(os.environ[LINK_VARIABLE])
        with limited_links(link_bytes_per_s):
            samples = sync_all(methods, members, control, policy, repeats)
        for method in methods.values():
            method.close()
        if control.rank == 0:
            (cfg.run.dir / "samples.json").write_bytes(msgspec.json.encode(samples))


def make_method(
    name: str, cfg: Config, policy: Policy, control: Control, link: GeneratorLink | None
) -> Method:
    """The product's own, or Raw."""
    product_name = RESHARD if name in (RAW, FLOOR, OVERLAP) else name
    weights = cfg.weights.model_copy(update={"method": product_name})
    method = open_method(
        cfg.model_copy(update={"weights": weights}), policy, control=control, link=link
    )
    if not isinstance(method, Reshard):
        return method
    # The loader inside the engine knows by it what kind of transfer comes.
    method._settings = replace(method._settings, name=f"{name}-{method._settings.name}")
    if name in (RAW, FLOOR):
        return Raw(method, is_floor=name == FLOOR)
    return Overlapped(method) if name == OVERLAP else method


def sync_all(
    methods: dict[str, Method],
    members: list[Member],
    control: Control,
    policy: Policy,
    repeats: int,
) -> list[Sample]:
    """Every method once in each repeat, in a rotating order; the first repeat is left out."""
    slices = [
        part
        for member in members
        for rank in range(member.hello.world_size)
        for part in receiver_slices(policy.shape, member.hello, rank)
    ]
    itemsize = next(policy.chunks[0].parameters()).dtype.itemsize
    minimum = itemsize * sum(part.size for part in slices)
    samples, version = [], 0
    for repeat, names in enumerate(rotations(list(methods), repeats + 1)):
        for name in names:
            version += 1
            sample = measure(name, methods[name], members, control, version)
            if repeat:
                samples.append(msgspec.structs.replace(sample, minimum_bytes=minimum))
    return samples


def measure(
    name: str, method: Method, members: list[Member], control: Control, version: int
) -> Sample:
    """One weight sync."""
    control.all(True)
    start_peak()
    resident, loopback, started = status_bytes("VmRSS"), loopback_bytes(), time.monotonic()
    outcome = method.sync(members, version)
    seconds, loopback = time.monotonic() - started, loopback_bytes() - loopback
    growth = status_bytes("VmHWM") - resident
    if outcome.failed or outcome.damaged:
        raise RuntimeError(f"{name}: {outcome.damaged} damaged parcels, {outcome.failed}")
    peak = method.peak_bytes if isinstance(method, Reshard) else 0
    return Sample(
        name,
        seconds,
        outcome.transfers_s,
        outcome.pauses_s,
        outcome.wire_bytes,
        loopback,
        0,
        _most(peak),
        outcome.peak_bytes,
        _most(growth),
        method.stall_s if isinstance(method, Overlapped) else seconds,
    )


def _most(value: int) -> int:
    """The largest of all ranks' values."""
    held = torch.tensor([value])
    dist.all_reduce(held, op=dist.ReduceOp.MAX)
    return int(held)


def loopback_bytes() -> int:
    """What the loopback device has taken in."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split()[1])
    raise RuntimeError("/proc/net/dev has no loopback device")


def start() -> int:
    """Entry of a rank."""
    cfg = load_config(Path(sys.argv[sys.argv.index("--config") + 1]))
    role = f"trainer-{os.environ.get('RANK', '0')}"
    set_up_logging(role, cfg.run.dir / "logs")
    return run_main(role, partial(main, cfg, int(os.environ[REPEATS_VARIABLE])))


if __name__ == "__main__":
    sys.exit(start())
