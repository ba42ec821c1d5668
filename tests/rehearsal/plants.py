"""Rehearsals with a planted fault: `python -m tests.rehearsal.plants FOLDER`.

Each folder in FOLDER has a request; its name is the name of the fault, before a hyphen. One process
serves all of them, as its imports take longer than the tiny ranks.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from megatron_rl.rehearsal import engine_stand_in

if __name__ == "__main__":
    engine_stand_in.install()

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from generation.sglang_quantised import QuantisingParameters
from megatron_rl.rehearsal.engine_fp8 import FP8GlobalStateManager
from megatron_rl.rehearsal.events import REQUEST, Request
from megatron_rl.rehearsal.rank import TracedTrainer, Work
from megatron_rl.rehearsal.ranks import serve
from megatron_rl.trainer import step
from megatron_rl.trainer.model import router_replay
from megatron_rl.trainer.model.logprobs import ReferenceLayer
from megatron_rl.weights.exchange import engine_rank
from megatron_rl.weights.exchange.engine_rank import EngineRank
from megatron_rl.weights.exchange.group_transport import GroupTransport
from megatron_rl.weights.exchange.parcels import Ends
from megatron_rl.weights.exchange.plan import Rounds
from megatron_rl.weights.exchange.transport import Round, Transport
from megatron_rl.weights.sync import reshard
from megatron_rl.weights.sync.leader import Leader


def skipped(trainer: TracedTrainer, work: Work) -> Work:
    """The second data-parallel rank leaves out a reduction."""
    if parallel_state.get_data_parallel_rank() == 1:
        step.dist = SimpleNamespace(all_reduce=lambda tensor: None)
    return work


def swapped(trainer: TracedTrainer, work: Work) -> Work:
    """The second stage reduces over two groups in another order."""
    groups = [parallel_state.get_model_parallel_group(), dist.group.WORLD]
    if parallel_state.get_pipeline_model_parallel_rank() == 1:
        groups.reverse()
    _after_step(trainer, lambda: [dist.all_reduce(_tensor(), group=group) for group in groups])
    return work


def unreceived(trainer: TracedTrainer, work: Work) -> Work:
    """The last stage sends once more than the first receives."""
    if parallel_state.is_pipeline_last_stage():
        first = parallel_state.get_pipeline_model_parallel_first_rank()
        group = parallel_state.get_pipeline_model_parallel_group()
        _after_step(trainer, lambda: dist.isend(_tensor(), first, group))
    return work


def crossed(trainer: TracedTrainer, work: Work) -> Work:
    """Both stages send to each other, alone, before they receive."""
    group = parallel_state.get_pipeline_model_parallel_group()
    other = dist.get_global_rank(group, 1 - group.rank())

    def exchange() -> None:
        works = [issue(_tensor(), other, group) for issue in (dist.isend, dist.irecv)]
        for each in works:
            each.wait()

    _after_step(trainer, exchange)
    return work


def read(trainer: TracedTrainer, work: Work) -> Work:
    """The loss is read by the host."""
    loss = trainer._loss

    def take(*args: Any, **kwargs: Any) -> Any:
        found = loss(*args, **kwargs)
        float(found[0])
        return found

    trainer._loss = take
    return work


def widened(trainer: TracedTrainer, work: Work) -> Work:
    """The host widens the choices of experts before it sends them to the device."""

    def to(choices: router_replay._Choices, device: torch.device) -> torch.Tensor:
        return choices._narrow.to(device, torch.int64)

    router_replay._Choices.to = to
    return work


def awaited(trainer: TracedTrainer, work: Work) -> Work:
    """The host waits until the reference's hidden states are on the device."""

    def to(layer: ReferenceLayer, device: torch.device) -> ReferenceLayer:
        return replace(layer, hidden=layer.hidden.to(device))

    ReferenceLayer.to = to
    return work


def wide(trainer: TracedTrainer, work: Work) -> Work:
    """Hidden states stay in float32 until the step ends."""
    forward, kept = trainer._passes.forward, []

    def take(*args: Any) -> torch.Tensor:
        found = forward(*args)
        kept.extend(found.float() for _ in range(8))
        return found

    trainer._passes.forward = take
    return work


def fewer(trainer: TracedTrainer, work: Work) -> Work:
    """The second data-parallel rank takes one microbatch less."""
    is_second = parallel_state.get_data_parallel_rank() == 1
    return replace(work, microbatches=work.microbatches - is_second)


def unreduced(trainer: TracedTrainer, work: Work) -> Work:
    """Rank 1 leaves the maxima of its backward passes as they are."""
    reduce = FP8GlobalStateManager.reduce_and_update_fp8_tensors

    def take(forward: bool = True) -> None:
        if forward:
            reduce(forward)

    if dist.get_rank() == 1:
        FP8GlobalStateManager.reduce_and_update_fp8_tensors = take
    return work


def edged(trainer: TracedTrainer, work: Work) -> Work:
    """Rank 1 has the second layer in bfloat16 too."""
    if dist.get_rank() == 1:
        trainer.policy.chunks[0].config.num_layers_at_start_in_bf16 = 2
    return work


def reordered(trainer: TracedTrainer, work: Work) -> Work:
    """Rank 0 sends the second and the third round of a weight sync in another order."""
    prepare = reshard.outgoing

    def take(*args: Any, **kwargs: Any) -> Ends:
        first, second, third, *others = prepare(*args, **kwargs)
        return [first, third, second, *others]

    if dist.get_rank() == 0:
        reshard.outgoing = take
    return work


def left(trainer: TracedTrainer, work: Work) -> Work:
    """Rank 0 waits once more in a lane that the others have left."""
    send = reshard.send

    def take(ends: Ends, transport: GroupTransport, **kwargs: Any) -> None:
        send(ends, transport, **kwargs)
        lane = next(iter(transport.lanes.values()))
        dist.all_reduce(torch.zeros(1, device="meta"), group=lane.group)

    if dist.get_rank() == 0:
        reshard.send = take
    return work


def omitted(number: int) -> None:
    """An engine rank leaves out the last round of a weight sync."""
    if number == FIRST_ENGINE_RANK:
        _prepare_engine(lambda rounds, dtype: (rounds[:-1], dtype))


def retyped(number: int) -> None:
    """An engine rank takes the elements of a weight sync for float32."""
    if number == FIRST_ENGINE_RANK:
        _prepare_engine(lambda rounds, dtype: (rounds, torch.float32))


def narrowed(number: int) -> None:
    """An engine rank that quantises takes the elements of a weight sync for its codes."""
    make = EngineRank.__init__

    def take(engine: EngineRank, parameters: Any, rank: int, dtype: Any, **kwargs: Any) -> None:
        make(engine, parameters, rank, torch.float8_e4m3fn, **kwargs)

    if number == FIRST_ENGINE_RANK:
        EngineRank.__init__ = take


def miscounted(number: int) -> None:
    """An engine rank that quantises expects one element less of each parameter."""
    begin = QuantisingParameters.begin

    def take(parameters: QuantisingParameters, elements: Mapping[str, int]) -> None:
        begin(parameters, {name: count - 1 for name, count in elements.items()})

    if number == FIRST_ENGINE_RANK:
        QuantisingParameters.begin = take


def regrouped(trainer: TracedTrainer, work: Work) -> Work:
    """Rank 1 serves the groups of engines in another order."""
    parties = Leader._parties

    def take(leader: Leader, numbers: Mapping[str, int]) -> Iterator[tuple[int, list[str]]]:
        return reversed([*parties(leader, numbers)])

    if dist.get_rank() == 1:
        Leader._parties = take
    return work


def halved(number: int) -> None:
    """An engine takes the first engines for its group, in the place of every second one."""

    def take(leader: Leader, numbers: Mapping[str, int]) -> Iterator[tuple[int, list[str]]]:
        names = list(numbers)
        return iter([(0, names[:2]), (0, names[2:])])

    if number == FIRST_ENGINE_RANK + 1:
        Leader._parties = take


def unreleased(number: int) -> None:
    """An engine rank does not say that it has taken the first round out of shared memory."""
    receive = engine_rank.receive

    def take(ends: Any, transport: Transport, **kwargs: Any) -> Any:
        release = transport.release

        def leave(parcels: Round) -> None:
            if parcels:
                transport.release = release

        transport.release = leave
        return receive(ends, transport, **kwargs)

    if number == FIRST_ENGINE_RANK:
        engine_rank.receive = take


def _prepare_engine(change: Callable[[Rounds, torch.dtype], tuple[Rounds, torch.dtype]]) -> None:
    prepare = engine_rank.incoming

    def take(rounds: Rounds, parameters: Any, dtype: torch.dtype, **kwargs: Any) -> Any:
        rounds, dtype = change(rounds, dtype)
        return prepare(rounds, parameters, dtype, **kwargs)

    engine_rank.incoming = take


FIRST_ENGINE_RANK = 2
"""Of a trainer of two ranks."""
ENGINE_PLANTS = {
    plant.__name__: plant for plant in (omitted, retyped, narrowed, miscounted, halved, unreleased)
}
PLANTS: dict[str, Callable[[TracedTrainer, Work], Work]] = {
    plant.__name__: plant
    for plant in (
        skipped,
        swapped,
        unreceived,
        crossed,
        read,
        widened,
        awaited,
        wide,
        fewer,
        unreduced,
        edged,
        reordered,
        left,
        regrouped,
    )
}
"""The faults of trainer ranks; a rehearsal with another name is sound."""


def _tensor() -> torch.Tensor:
    return torch.zeros(4, device="meta")


def _after_step(trainer: TracedTrainer, action: Callable[[], object]) -> None:
    gather = trainer.gather

    def take() -> None:
        gather()
        action()

    trainer.gather = take


def main(folder: Path) -> None:
    for place in sorted(folder.iterdir()):
        request = msgspec.json.decode((place / REQUEST).read_bytes(), type=Request)
        name = place.name.partition("-")[0]
        serve(place, request, PLANTS.get(name), ENGINE_PLANTS.get(name))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
