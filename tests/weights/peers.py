"""Trainer ranks that really sync made-up weights, beside generators that obey.

`play(setup, folder)` runs under `run_ranks`: the first ranks train, each further one hosts a
generator. The folder holds what the generators noted and which steps the trainer has finished.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from generation import weight_client
from megatron_rl.protocol.wire import DeadlineExceeded
from megatron_rl.weights.exchange.transport import FOLDER, IPC
from megatron_rl.weights.layout.place import Place, place_of
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.layout.slices import Share
from megatron_rl.weights.layout.trainer_layout import trainer_slices
from megatron_rl.weights.sync import leader
from megatron_rl.weights.sync.control import Control
from megatron_rl.weights.sync.leader import ExchangeSettings
from megatron_rl.weights.sync.link import GeneratorLink, Outcome
from megatron_rl.weights.sync.reshard import Reshard
from megatron_rl.weights.sync.syncer import WeightSyncer
from megatron_rl.weights.sync.turns import MemoryTurns
from tests.lossy_router import Loss, LossyRouter
from tests.weights.made_up import SHAPE, allocate, fill, own_device
from tests.weights.scripted_generators import Generator, host
from tools.bench.weights_exchanges import limited_links

PATIENCE_S = 60.0
POLL_S = 0.02
SLOW_RANK_S = 0.2
"""By which each further rank gives what it has freed back later."""


@dataclass(frozen=True)
class Setup:
    """A play."""

    port: int
    generators: tuple[Generator, ...]
    script: tuple[str, ...]
    """What the trainer does: "sync V"; "start V" and "join 0", the same in two parts; "admit
    N", until N generators hold the version; "meet N", until N have said hello; "told N", until N
    versions are announced; "rest S" for so many seconds; "compute S": the GPU does; "spoil V": the
    parameters become those of V, as by an optimizer step; "release 0": the engines give their
    memory back; "await N": a batch, until N engines are starting."""
    method: str = "reshard"
    """Of the section `weights`, or "nccl": reshard on a GPU that all share."""
    device: str = "cpu"
    """Of the trainer's parameters, where the method is not "nccl"."""
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    shape: ModelShape = SHAPE
    deadline_s: float = 60.0
    grace_s: float = 60.0
    join_timeout_s: float = 60.0
    bucket_bytes: int = 2048
    groups: int = 1
    takes_turns: bool = False
    """Engines give their memory back while the trainer computes."""
    start_timeout_s: float = 60.0
    link_bytes_per_s: int = 0
    """What a rank sends to an engine rank at most; 0: no limit."""

    losing: tuple[str, ...] = ()
    """Kinds of which rank 0's socket loses the first message; then all repetitions are quick."""

    @property
    def trainers(self) -> int:
        return self.tensor * self.pipeline * self.data


@dataclass
class Step:
    """What a trainer rank saw in one step of the script."""

    seconds: float
    metrics: dict[str, float]
    held: dict[str, int]
    outcomes: list[Outcome] = field(default_factory=list)
    error: str = ""
    dropped: dict[str, str] = field(default_factory=dict)
    """Generators that were dropped, also where no method failed them, with the reason."""
    announced: tuple[int, ...] = ()
    """Versions that rank 0 would have told the queue of by the end of the step."""

    @property
    def failed(self) -> dict[str, str]:
        return {name: why for each in self.outcomes for name, why in each.failed.items()}


def play(setup: Setup, folder: Path) -> Any:
    """Steps of a trainer rank, or the notes of a generator."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if setup.losing:
        # This process was forked for the play.
        leader.REPORT_S = 0.3
        weight_client.HELLO_S, weight_client.HELLO_KNOWN_S, weight_client.ASK_S = 0.2, 1.0, 0.2
    with limited_links(setup.link_bytes_per_s):
        if rank < setup.trainers:
            return train(setup, folder, rank)
        return host(setup.port, setup.generators[rank - setup.trainers], folder)


def train(setup: Setup, folder: Path, rank: int) -> list[Step]:
    address = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=setup.trainers)
    assert dist.group.WORLD is not None
    control = Control(dist.group.WORLD)
    loss = Loss(set(setup.losing))
    router = LossyRouter("127.0.0.1", setup.port, loss=loss) if rank == 0 else None
    link = GeneratorLink(router) if router is not None else None
    version = [0]
    method, update = open_method(setup, control, link, folder, version)
    outcomes: list[Outcome] = []
    record_outcomes(method, outcomes)
    replicas = sum(generator.starts_after < 0 for generator in setup.generators)
    syncer = WeightSyncer(
        method, control, link, replicas=replicas, join_timeout_s=setup.join_timeout_s,
        overlaps=not setup.takes_turns, turns=open_turns(setup, control, link, folder),
    )  # fmt: skip
    announced: list[int] = []
    dropped: dict[str, str] = {}
    record_drops(syncer, dropped)
    syncer.await_generators()
    steps = []
    for number, action in enumerate(setup.script):
        outcomes.clear()
        dropped.clear()
        started = time.monotonic()
        error = act(action, syncer, link, version, update, announced)
        metrics = {metric.name: metric.value for metric in syncer.metrics}
        seconds = time.monotonic() - started
        held, told = dict(syncer._held), tuple(announced)
        steps.append(Step(seconds, metrics, held, list(outcomes), error, dict(dropped), told))
        if rank == 0:
            (folder / f"step-{number}").touch()
        if error:
            break
    syncer.close()
    if router is not None:
        time.sleep(0.3)  # for the last words
        (folder / "lost").write_text("\n".join(loss.kinds))
        (folder / "end").touch()
        router.close()
    return steps


def act(
    action: str,
    syncer: WeightSyncer,
    link: GeneratorLink | None,
    version: list[int],
    update: Callable[[], None],
    announced: list[int],
) -> str:
    """One step; the error that ends the play."""
    word, number = action.split()
    match word:
        case "sync":
            version[0] = int(number)
            update()
            try:
                syncer.sync(int(number))
            except DeadlineExceeded as error:
                return str(error)
        case "start":
            version[0] = int(number)
            update()
            syncer.start(int(number), partial(announced.append, int(number)))
        case "join":
            syncer.join()
        case "spoil":
            version[0] = int(number)
            update()
        case "meet" if link is not None:
            link.await_peers(int(number), PATIENCE_S)
        case "release":
            syncer.release()
        case "told" if link is not None:
            await_count(announced, int(number))
        case "await":
            ends_at = time.monotonic() + PATIENCE_S
            # As many times on every rank.
            while syncer._control.share(link is None or len(link._starting) < int(number), bool):
                assert time.monotonic() < ends_at, "no engine starts"
                syncer.admit()
                time.sleep(POLL_S)
        case "rest":
            time.sleep(float(number))
        case "compute":
            fill_stream(float(number))
        case "admit":
            admit(syncer, int(number))
    return ""


def fill_stream(seconds: float) -> None:
    """Queue products on the GPU for so long, faster than it computes them."""
    factor = torch.ones(4096, 4096, device="cuda")
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        torch.mm(factor, factor)


def await_count(announced: list[int], number: int) -> None:
    ends_at = time.monotonic() + PATIENCE_S
    while len(announced) < number:
        assert time.monotonic() < ends_at, f"only {announced} were announced"
        time.sleep(POLL_S)


def admit(syncer: WeightSyncer, number: int) -> None:
    ends_at = time.monotonic() + PATIENCE_S
    while len(syncer._held) < number:
        assert time.monotonic() < ends_at, f"only {syncer._held} came back"
        syncer.admit()
        time.sleep(POLL_S)


def open_turns(
    setup: Setup, control: Control, link: GeneratorLink | None, folder: Path
) -> MemoryTurns | None:
    if not setup.takes_turns:
        return None

    def free_cache() -> None:
        time.sleep(SLOW_RANK_S * control.rank)
        (folder / f"freed-{control.rank}-{time.time_ns()}").touch()

    return MemoryTurns(
        control,
        link,
        deadline_s=setup.deadline_s,
        start_timeout_s=setup.start_timeout_s,
        free_cache=free_cache,
    )


def open_method(
    setup: Setup, control: Control, link: GeneratorLink | None, folder: Path, version: list[int]
) -> tuple[Reshard, Callable[[], None]]:
    """The method, and what makes the parameters those of `version[0]`."""
    name = control.share(f"weights-{time.time_ns()}", str)
    backend = {"ipc": IPC, "folder": FOLDER, "nccl": "nccl"}.get(setup.method, "gloo")
    device = own_device("cuda" if backend == "nccl" else setup.device, f"trainer-{control.rank}")
    settings = ExchangeSettings(
        "127.0.0.1", backend, torch.float32, setup.bucket_bytes, setup.deadline_s, name,
        setup.grace_s, groups=setup.groups,
        folder=str(folder / "weights") if backend == FOLDER else "",
        keeps=not setup.takes_turns,
    )  # fmt: skip
    like = Place(Share(0, setup.tensor), Share(0, setup.pipeline), Share())
    places = [place_of(rank, setup.trainers, like) for rank in range(setup.trainers)]
    mine = trainer_slices(setup.shape, places[control.rank])
    parameters = allocate(mine, device)

    method = Reshard(
        parameters, places[control.rank], setup.shape, control=control, link=link, settings=settings
    )
    return method, lambda: fill(parameters, mine, setup.shape, version[0])


def record_drops(syncer: WeightSyncer, dropped: dict[str, str]) -> None:
    real = syncer._drop

    def recorded(name: str, reason: str) -> None:
        dropped[name] = reason
        real(name, reason)

    syncer._drop = recorded  # type: ignore[method-assign]


def record_outcomes(method: Reshard, outcomes: list[Outcome]) -> None:
    real = method.end

    def recorded() -> Outcome:
        outcomes.append(real())
        return outcomes[-1]

    method.end = recorded  # type: ignore[method-assign]
