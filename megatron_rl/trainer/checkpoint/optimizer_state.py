"""The optimizer's state in the shape of the model: masters and moments, whole for each parameter.

Runs in trainer ranks, for checkpoints. Whatever optimizer wrote it, the state of a parameter stands
under `optimizer.state.{param,exp_avg,exp_avg_sq}.KEY`, where KEY is the parameter's own key and the
shards are the model's: so it is read back under any other split, with or without the distributed
optimizer. A float32 model has no masters beside its parameters, and saves none.

Megatron's own formats are not used. In 0.16.1 that of the plain optimizer and that of the
distributed one cannot be read as one another; and the latter, "fully_reshardable", drops the
padding between buckets but places parameters by offsets that count it (distrib_optimizer.py:1117
and 1489), so that with several buckets nearly all moments are saved wrong.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

State = dict[str, Tensor]
"""Of one parameter, each tensor in its local shape, float32: "param", "exp_avg", "exp_avg_sq"."""
_MOMENTS = ("exp_avg", "exp_avg_sq")
_MASTER = "param"
_CHUNK_ELEMENTS = 1 << 24
"""Elements of a rank's shard that are gathered at once: bounds the memory that it takes."""


def sharded_optimizer_state(
    optimizer: MegatronOptimizer, model: Mapping[str, Any], *, is_loading: bool = False
) -> dict[str, dict[str, Any]]:
    """The state as sharded tensors, by a number of the parameter. Collective over all ranks.

    model: sharded state dict of this rank's chunks, its data the parameters themselves. Tensors may
    share memory with the optimizer. With is_loading their content is of no account.
    """
    if is_loading:
        for inner in _inner(optimizer):
            if isinstance(inner, HybridDeviceOptimizer) and not inner.state:
                # Allocates the state, and changes the parameters, which are loaded too.
                inner.dummy_step()
    owners = _by_parameter(model)
    states = (
        state for part in _parts(optimizer, owners) for state in part.states(is_loading=is_loading)
    )
    return {
        str(number): {
            name: make_sharded_optimizer_tensor(
                owners[parameter], tensor, f"optimizer.state.{name}"
            )
            for name, tensor in state.items()
        }
        for number, (parameter, state) in enumerate(states)
    }


def restore_optimizer_state(
    optimizer: MegatronOptimizer, model: Mapping[str, Any], loaded: Mapping[str, State], steps: int
) -> None:
    """Take in what was loaded in place of `sharded_optimizer_state(..., is_loading=True)`.

    steps: the saved `adam_steps`. The model's parameters must hold their loaded values by now.
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
    """Updates that Adam has made, for its bias correction."""
    # torch's AdamW, which updates offloaded state, counts them for each parameter.
    counters = [*optimizer.param_groups]
    counters += [state for inner in _inner(optimizer) for state in inner.state.values()]
    return max((int(counter.get("step", 0)) for counter in counters), default=0)


def _inner(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that make the updates; a rank without parameters of a kind has none."""
    return [part.optimizer for part in optimizer.chained_optimizers if part.optimizer is not None]


def _by_parameter(model: Mapping[str, Any]) -> dict[Tensor, ShardedTensor | ShardedTensorFactory]:
    sharded, _ = extract_sharded_tensors_and_factories(dict(model))
    return {entry.data: entry for entry in nested_values(sharded)}


def _parts(
    optimizer: MegatronOptimizer, owners: Mapping[Tensor, Any]
) -> Iterator["_Replicated | _Distributed"]:
    """Megatron has an optimizer each for dense parameters and for experts."""
    for part in optimizer.chained_optimizers:
        if part.optimizer is None:
            continue
        if not isinstance(part.optimizer, HybridDeviceOptimizer):
            # Moments of 0 where no step was taken yet: what Adam would start from.
            part.init_state_fn(part.optimizer, part.config)
        if isinstance(part, DistributedOptimizer):
            yield _Distributed(part)
        else:
            yield _Replicated(part, owners)


class _Replicated:
    """An optimizer that holds the whole state of this rank's parameters."""

    def __init__(self, part: MegatronOptimizer, owners: Mapping[Tensor, Any]) -> None:
        masters = {id(getattr(p, "main_param", p)): p for p in owners if isinstance(p, Tensor)}
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

    def states(self, *, is_loading: bool) -> Iterator[tuple[Tensor, State]]:
        """The optimizer's own tensors."""
        yield from self._states.items()

    def put(self, parameter: Tensor, state: State) -> None:
        """Take in the state of a parameter."""
        with torch.no_grad():
            for name, tensor in self._states[parameter].items():
                tensor.copy_(state[name])


class _Distributed:
    """An optimizer that holds a shard of the state; the replicas together hold it whole."""

    def __init__(self, part: DistributedOptimizer) -> None:
        self._part = part
        self._names = (*_MOMENTS, _MASTER) if part.config.bf16 else _MOMENTS

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters, in a fixed order."""
        return [parameter for buffer in self._part.buffers for parameter in buffer.param_index_map]

    def states(self, *, is_loading: bool) -> Iterator[tuple[Tensor, State]]:
        """Whole states in host memory; unless they are to be loaded, collective over replicas."""
        if is_loading:
            for parameter in self.parameters:
                # Zeros: rows that pad the vocabulary may not be in the checkpoint.
                yield parameter, {name: torch.zeros(parameter.shape) for name in self._names}
            return
        for buffer, of_dtype in zip(self._part.buffers, self._part.gbuf_ranges, strict=True):
            [ranges_of_buckets] = of_dtype.values()
            whole = [
                {name: self._gather(bucket, ranges["param_map"], name) for name in self._names}
                for bucket, ranges in zip(buffer.buckets, ranges_of_buckets, strict=True)
            ]
            for parameter, (start, end, number) in buffer.param_index_map.items():
                offset = buffer.buckets[number].offset
                flat = {name: t[start - offset : end - offset] for name, t in whole[number].items()}
                yield parameter, {name: t.view(parameter.shape) for name, t in flat.items()}

    def _gather(self, bucket: Any, param_map: Mapping[Tensor, Any], name: str) -> Tensor:
        """[elements of the bucket] float32 in host memory, on every replica."""
        group = self._part.data_parallel_group
        elements = bucket.grad_data.numel() // group.size()
        shard = torch.zeros(elements, dtype=torch.float32, device=bucket.grad_data.device)
        for parameter, ranges in param_map.items():
            local = ranges["gbuf_local"]
            state = self._part._get_main_param_and_optimizer_states(parameter)
            shard[local.start : local.end].copy_(state[name].detach())
        whole = torch.empty(group.size(), elements)
        for start in range(0, elements, _CHUNK_ELEMENTS):
            piece = shard[start : start + _CHUNK_ELEMENTS]
            pieces = [torch.empty_like(piece) for _ in range(group.size())]
            dist.all_gather(pieces, piece, group=group)
            for rank, received in enumerate(pieces):
                whole[rank, start : start + len(piece)].copy_(received)
        return whole.flatten()

    def put(self, parameter: Tensor, state: State) -> None:
        """Keep this replica's shard of the state of a parameter."""
        # A float32 model's masters are views of its parameters, which are loaded.
        whole = {_MASTER: parameter, **state}
        for of_dtype in self._part.gbuf_ranges:
            for ranges_of_buckets in of_dtype.values():
                for ranges in ranges_of_buckets:
                    if parameter in ranges["param_map"]:
                        mine = ranges["param_map"][parameter]["param"]
                        shards = {
                            name: tensor.detach().flatten()[mine.start : mine.end]
                            for name, tensor in whole.items()
                        }
                        with torch.no_grad():
                            self._part._set_main_param_and_optimizer_states(parameter, shards)
