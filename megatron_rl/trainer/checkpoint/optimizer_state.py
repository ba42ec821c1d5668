"""The optimizer's state in the shape of the model: masters and moments of each parameter.

Runs in trainer ranks, for checkpoints. Every optimizer saves a parameter's state under
`optimizer.state.{param,exp_avg,exp_avg_sq}.KEY`, where KEY is the parameter's own key. The shards
are the model's, so any other split can read the state, with or without the distributed optimizer.
A float32 model has no masters besides its parameters, and saves none.

The distributed optimizer gives each data-parallel rank a run of every parameter's elements, one
after the other in memory. A rank saves and reads only its own runs, as boxes: rectangular parts of
a whole tensor at an offset. A run of a matrix is at most three boxes: the end of a row, whole rows,
the beginning of a row. No rank gathers other ranks' runs.

Megatron's formats are not used. In 0.16.1 the plain and the distributed optimizer cannot read each
other's format. The distributed "fully_reshardable" drops the padding between buckets, but places
parameters by offsets that count it (distrib_optimizer.py:1117 and 1489). With several buckets it
saves nearly all moments wrong.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

Sizes = tuple[int, ...]
State = dict[str, Tensor]
"""State of one parameter, float32: "param", "exp_avg", "exp_avg_sq", each in the local shape, or
several boxes of each, "exp_avg.0" and so on."""
_MOMENTS = ("exp_avg", "exp_avg_sq")
_MASTER = "param"
_PREFIX = "optimizer.state"


def sharded_optimizer_state(
    optimizer: MegatronOptimizer, model: Mapping[str, Any], *, is_loading: bool = False
) -> dict[str, dict[str, Any]]:
    """The state as sharded tensors, by a number of the parameter. Collective over all ranks.

    model: sharded state dict of this rank's chunks; its data are the parameters themselves. Tensors
    may share memory with the optimizer. With is_loading their content does not matter.
    """
    if is_loading:
        for inner in _inner(optimizer):
            if isinstance(inner, HybridDeviceOptimizer) and not inner.state:
                # Allocates the state, and changes the parameters, which are loaded too.
                inner.dummy_step()
    parts = _parts(optimizer, _by_parameter(model))
    states = (state for part in parts for state in part.sharded(is_loading=is_loading))
    return {str(number): state for number, state in enumerate(states)}


def restore_optimizer_state(
    optimizer: MegatronOptimizer, model: Mapping[str, Any], loaded: Mapping[str, State], steps: int
) -> None:
    """Put the loaded state of `sharded_optimizer_state(..., is_loading=True)` into the optimizer.

    steps: the saved `adam_steps`. The model's parameters must hold their loaded values already.
    """
    number = 0
    for part in _parts(optimizer, _by_parameter(model)):
        for parameter in part.parameters:
            part.put(parameter, loaded[str(number)])
            number += 1
    for group in optimizer.param_groups:
        group["step"] = steps
    for inner in _inner(optimizer):
        if isinstance(inner, HybridDeviceOptimizer):
            for state in inner.state.values():
                state["step"] = torch.tensor(float(steps))
            inner._sync_hdo_state_to_sub_optimizers()


def adam_steps(optimizer: MegatronOptimizer) -> int:
    """Number of Adam's updates, for its bias correction."""
    # torch's AdamW, which updates offloaded state, counts them for each parameter.
    counters = [*optimizer.param_groups]
    counters += [state for inner in _inner(optimizer) for state in inner.state.values()]
    return max((int(counter.get("step", 0)) for counter in counters), default=0)


def _inner(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """The inner optimizers; a rank without parameters of a kind has none for it."""
    return [part.optimizer for part in optimizer.chained_optimizers if part.optimizer is not None]


def _by_parameter(model: Mapping[str, Any]) -> dict[Tensor, ShardedTensor | ShardedTensorFactory]:
    sharded, _ = extract_sharded_tensors_and_factories(dict(model))
    return {entry.data: entry for entry in nested_values(sharded)}


def _parts(
    optimizer: MegatronOptimizer, owners: Mapping[Tensor, Any]
) -> Iterator["_Replicated | _Distributed"]:
    """Megatron's optimizers: one for dense parameters, one for experts."""
    for part in optimizer.chained_optimizers:
        if part.optimizer is None:
            continue
        if not isinstance(part.optimizer, HybridDeviceOptimizer):
            # Moments of 0 before the first step, as Adam starts.
            part.init_state_fn(part.optimizer, part.config)
        if isinstance(part, DistributedOptimizer):
            yield _Distributed(part, owners)
        else:
            yield _Replicated(part, owners)


class _Replicated:
    """An optimizer that holds the whole state of this rank's parameters."""

    def __init__(self, part: MegatronOptimizer, owners: Mapping[Tensor, Any]) -> None:
        masters = {id(getattr(p, "main_param", p)): p for p in owners if isinstance(p, Tensor)}
        self._owners = owners
        self._states: dict[Tensor, State] = {}
        for group in part.optimizer.param_groups:
            for master in group["params"]:
                parameter = masters[id(master)]
                state = {name: part.optimizer.state[master][name] for name in _MOMENTS}
                if master is not parameter:
                    state[_MASTER] = master
                self._states[parameter] = state

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters, in a fixed order."""
        return list(self._states)

    def sharded(self, *, is_loading: bool) -> Iterator[dict[str, Any]]:
        """The optimizer's own tensors, parameter by parameter."""
        for parameter, state in self._states.items():
            owner = self._owners[parameter]
            yield {
                name: make_sharded_optimizer_tensor(owner, tensor, f"{_PREFIX}.{name}")
                for name, tensor in state.items()
            }

    def put(self, parameter: Tensor, state: State) -> None:
        """Set the state of a parameter."""
        with torch.no_grad():
            for name, tensor in self._states[parameter].items():
                tensor.copy_(state[name])


class _Distributed:
    """An optimizer that holds a share of the state; the replicas together hold it whole."""

    def __init__(self, part: DistributedOptimizer, owners: Mapping[Tensor, Any]) -> None:
        self._part, self._owners = part, owners
        self._names = (*_MOMENTS, _MASTER) if part.config.bf16 else _MOMENTS
        self._runs: dict[Tensor, tuple[int, int]] = {
            parameter: (ranges["param"].start, ranges["param"].end)
            for of_dtype in part.gbuf_ranges
            for ranges_of_buckets in of_dtype.values()
            for of_bucket in ranges_of_buckets
            for parameter, ranges in of_bucket["param_map"].items()
        }
        """The range of elements that this replica holds, by parameter."""

    @property
    def parameters(self) -> list[Tensor]:
        """Parameters that this replica holds a part of, in a fixed order."""
        return list(self._runs)

    def sharded(self, *, is_loading: bool) -> Iterator[dict[str, Any]]:
        """This replica's share: the optimizer's own memory; for loading, new host memory."""
        for parameter, (start, end) in self._runs.items():
            owner = self._owners[parameter]
            boxes = boxes_of(owner, parameter.shape, start, end)
            if is_loading:
                # Zeros: rows that pad the vocabulary may not be in the checkpoint.
                state = {name: torch.zeros(end - start) for name in self._names}
            else:
                state = self._part._get_main_param_and_optimizer_states(parameter)
            yield {
                f"{name}.{number}": box.sharded(
                    f"{_PREFIX}.{name}.{box.of.key}", state[name].detach(), start
                )
                for name in self._names
                for number, box in enumerate(boxes)
            }

    def put(self, parameter: Tensor, state: State) -> None:
        """Set this replica's part of the state of a parameter."""
        start, end = self._runs[parameter]
        # A float32 model's masters are views of its parameters, which are loaded.
        share = {_MASTER: parameter.detach().flatten()[start:end]}
        for name in self._names:
            boxes = [state[f"{name}.{number}"] for number in range(len(state) // len(self._names))]
            share[name] = torch.cat([box.flatten() for box in boxes])
        with torch.no_grad():
            self._part._set_main_param_and_optimizer_states(parameter, share)


@dataclass(frozen=True)
class Box:
    """A part of this rank's shard of a parameter that is a box of the whole tensor."""

    start: int
    """First element, in the shard's order in memory; the others follow."""
    size: Sizes
    of: ShardedTensor
    """The shard of the whole tensor, without data."""
    offset: Sizes
    """In the whole tensor."""

    @property
    def end(self) -> int:
        """One after the last element."""
        return self.start + prod(self.size)

    def sharded(self, key: str, run: Tensor, run_start: int) -> ShardedTensor:
        """The box's elements, a view of a run of the shard.

        run: [elements] from element `run_start` of the shard on.
        """
        data = run[self.start - run_start : self.end - run_start].view(self.size)
        return ShardedTensor(
            key,
            data,
            data.dtype,
            local_shape=self.size,
            global_shape=self.of.global_shape,
            global_offset=self.offset,
            axis_fragmentations=None,
            # The last part numbers data-parallel replicas; only this replica has the box.
            replica_id=(*self.of.replica_id[:-1], 0),
            allow_shape_mismatch=self.of.allow_shape_mismatch,
        )


def boxes_of(
    owner: ShardedTensor | ShardedTensorFactory, shape: torch.Size, start: int, end: int
) -> list[Box]:
    """Elements [start, end) of a rank's shard of a parameter; in their order.

    owner: the parameter in the model's sharded state. shape: of the shard.
    """
    boxes = []
    for part, first in _whole_tensors(owner, shape):
        last = first + prod(part.local_shape)
        low, high = max(start, first), min(end, last)
        for corner, size in runs_as_boxes(part.local_shape, low - first, high - first):
            # Where experts have their own axis, the shard has none.
            lead = len(part.global_shape) - len(corner)
            inner = (*(0 for _ in range(lead)), *corner)
            offset = tuple(a + b for a, b in zip(part.global_offset, inner, strict=True))
            at = first + sum(
                place * prod(part.local_shape[axis + 1 :]) for axis, place in enumerate(corner)
            )
            boxes.append(Box(at, (*(1 for _ in range(lead)), *size), part, offset))
    return boxes


def _whole_tensors(
    owner: ShardedTensor | ShardedTensorFactory, shape: torch.Size
) -> Iterator[tuple[ShardedTensor, int]]:
    """The saved tensors of a shard, and the first element of each: gate and up are two."""
    if isinstance(owner, ShardedTensor):
        yield owner.without_data(), 0
        return
    # "meta" allocates nothing, but a view has its offset.
    whole = torch.empty(shape, device="meta")
    built = owner.build_fn(owner.key, whole, owner.replica_id, None)
    for part in nested_values({"": built}):
        assert part.data.is_contiguous(), f"{owner.key} is not kept in the order of its memory"
        yield part.without_data(), part.data.storage_offset()


def runs_as_boxes(shape: Sizes, start: int, end: int) -> Iterator[tuple[Sizes, Sizes]]:
    """(corner, size) of boxes that hold elements [start, end) of a tensor, in their order."""
    if start >= end:
        return
    if not shape:
        yield (), ()
        return
    inner = prod(shape[1:])
    (row, low), (last, high) = divmod(start, inner), divmod(end, inner)
    if low:
        stop = high if row == last else inner
        yield from _in_row(row, shape, low, stop)
        row += 1
    if row < last:
        yield (row, *(0 for _ in shape[1:])), (last - row, *shape[1:])
    if row <= last:
        yield from _in_row(last, shape, 0, high)


def _in_row(row: int, shape: Sizes, start: int, end: int) -> Iterator[tuple[Sizes, Sizes]]:
    for corner, size in runs_as_boxes(shape[1:], start, end):
        yield (row, *corner), (1, *size)
