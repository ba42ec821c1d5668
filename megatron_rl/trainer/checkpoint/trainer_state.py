"""The trainer's state in a checkpoint, as Megatron's sharded state, and how it is restored.

Runs in trainer ranks. Any split can read model weights and optimizer state. Random states belong to
a rank; only the same tensor and pipeline sizes restore them, other splits start from `run.seed`.
"""

import dataclasses
import logging
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)

from megatron_rl.config.errors import InputError
from megatron_rl.trainer.checkpoint.optimizer_state import (
    adam_steps,
    restore_optimizer_state,
    sharded_optimizer_state,
)
from megatron_rl.trainer.model.policy import Policy
from megatron_rl.trainer.reference import EmaReference
from megatron_rl.trainer.step import Trainer
from megatron_rl.weights.folders.finite import check_loaded
from megatron_rl.weights.folders.load import unwrap
from megatron_rl.weights.layout.shape import ModelShape

log = logging.getLogger(__name__)
_AVERAGE = "reference_"


def sharded_state(trainer: Trainer, step: int) -> dict[str, Any]:
    """Everything to save after batch number `step`. Collective over all ranks.

    Tensors may share memory with the trainer.
    """
    trainer.gather()
    model = _model_state(trainer.policy)
    return {
        **model,
        **_average_state(trainer),
        "optimizer": sharded_optimizer_state(trainer.optimizer, model),
        "random": _random_state(trainer.policy),
        "common": {
            "step": step,
            "optimizer_steps": trainer.steps_done,
            "adam_steps": adam_steps(trainer.optimizer),
            "shape": dataclasses.asdict(trainer.policy.shape),
            "model_parallel_sizes": list(_model_parallel_sizes()),
            "value_head": trainer.value_head and trainer.value_head.state(),
        },
    }


def restore(trainer: Trainer, folder: Path) -> int:
    """Put a checkpoint's state into a trainer that has taken no step; returns the step of it.

    Collective over all ranks. Raises InputError when the checkpoint does not fit the model.
    """
    common = dist_checkpointing.load_common_state_dict(str(folder))["common"]
    _check_shape(trainer.policy, common["shape"], folder)
    model = _model_state(trainer.policy)
    wanted = {
        **model,
        **_average_state(trainer),
        "optimizer": sharded_optimizer_state(trainer.optimizer, model, is_loading=True),
    }
    is_same_split = tuple(common["model_parallel_sizes"]) == _model_parallel_sizes()
    if is_same_split:
        wanted["random"] = _random_state(trainer.policy)
    try:
        loaded = dist_checkpointing.load(wanted, str(folder), _shared_load(folder))
    except (CheckpointingException, KeyError) as error:
        raise InputError(f"{folder} does not fit the model to be trained: {error}") from error
    _restore_average(trainer, loaded)
    for name, chunk in _chunks(trainer.policy).items():
        chunk.load_state_dict(loaded[name])
    check_loaded(*trainer.policy.weights, folder)
    # Again, as the tensors of the first dict may have moved into the loaded one.
    model = _model_state(trainer.policy)
    restore_optimizer_state(
        trainer.optimizer, model, loaded["optimizer"], steps=common["adam_steps"]
    )
    trainer.steps_done = common["optimizer_steps"]
    if trainer.value_head is not None and common.get("value_head") is not None:
        trainer.value_head.restore(common["value_head"])
    if is_same_split:
        trainer.policy.backend.set_random_states(loaded["random"])
    else:
        log.info("other tensor or pipeline sizes than in %s: random states start anew", folder)
    return common["step"]


def _shared_load(folder: Path) -> FullyParallelLoadStrategyWrapper:
    """Each replica reads a part of the state, and sends it to the others."""
    return FullyParallelLoadStrategyWrapper(
        get_default_load_sharded_strategy(str(folder)),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    )


def _chunks(policy: Policy) -> dict[str, Any]:
    return {f"model{number}": unwrap(chunk) for number, chunk in enumerate(policy.chunks)}


def _model_state(policy: Policy) -> dict[str, Any]:
    return {name: chunk.sharded_state_dict() for name, chunk in _chunks(policy).items()}


def _average_state(trainer: Trainer) -> dict[str, Any]:
    """State of a moving-average reference, in float32. A resumed run reads other references from
    their source."""
    reference = trainer.reference
    if not isinstance(reference, EmaReference):
        return {}
    with reference.lent():
        state = {
            f"{_AVERAGE}{name}": chunk.sharded_state_dict(prefix=f"{_AVERAGE}.")
            for name, chunk in _chunks(trainer.policy).items()
        }
        for leaf in nested_values(state):
            if isinstance(leaf, ShardedTensor | ShardedTensorFactory):
                leaf.data = leaf.data.detach().to("cpu", copy=True)
    return state


def _restore_average(trainer: Trainer, loaded: dict[str, Any]) -> None:
    reference = trainer.reference
    if not isinstance(reference, EmaReference):
        return
    with reference.lent():
        for name, chunk in _chunks(trainer.policy).items():
            state = loaded[f"{_AVERAGE}{name}"]
            chunk.load_state_dict({k.removeprefix(f"{_AVERAGE}."): v for k, v in state.items()})


def _model_parallel_sizes() -> tuple[int, int]:
    return (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )


def _random_state(policy: Policy) -> ShardedObject:
    place = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    return ShardedObject(
        "random",
        policy.backend.random_states(),
        _model_parallel_sizes(),
        place,
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )


def _check_shape(policy: Policy, saved: dict[str, Any], folder: Path) -> None:
    mine = dataclasses.asdict(policy.shape)
    # Fields that an earlier release did not know have the value that its models had.
    known = {field.name: field.default for field in dataclasses.fields(ModelShape)} | saved
    differing = [name for name in mine if known[name] != mine[name]]
    if differing:
        name = differing[0]
        raise InputError(
            f"{folder} holds another model than model.path: its {name} is {known[name]!r}, "
            f"that of model.path is {mine[name]!r}. Resume with the model that the run began with"
        )
