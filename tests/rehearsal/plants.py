"""Rehearsals with a planted fault: `python -m tests.rehearsal.plants FOLDER`.

Each folder in FOLDER has a request; its name is the name of the fault, before a hyphen. One process
serves all of them, as its imports take longer than the tiny ranks.
"""

import sys
from collections.abc import Callable
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

from megatron_rl.rehearsal.events import REQUEST, Request
from megatron_rl.rehearsal.rank import TracedTrainer, Work
from megatron_rl.rehearsal.ranks import serve
from megatron_rl.trainer import step


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


def read(trainer: TracedTrainer, work: Work) -> Work:
    """The loss is read by the host."""
    loss = trainer._loss

    def take(*args: Any) -> Any:
        found = loss(*args)
        float(found[0])
        return found

    trainer._loss = take
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


PLANTS: dict[str, Callable[[TracedTrainer, Work], Work] | None] = {
    "sound": None,
    **{plant.__name__: plant for plant in (skipped, swapped, unreceived, read, wide, fewer)},
}


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
        serve(place, request, PLANTS[place.name.partition("-")[0]])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
