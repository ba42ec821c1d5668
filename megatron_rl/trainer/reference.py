"""The reference policy: copies of weights that take the place of the policy's for one pass.

Used by trainer ranks. Each rank keeps its own part in host memory; float32 masters are not touched.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl.algorithms.objective import Objective
from megatron_rl.config.tree import TrainConfig
from megatron_rl.protocol.types import MinibatchShare
from megatron_rl.trainer.loss_tokens import Known
from megatron_rl.trainer.model.policy import Policy
from megatron_rl.trainer.passes import Passes
from megatron_rl.trainer.teacher import Teacher
from megatron_rl.weights.folders.load import load_weights
from megatron_rl.weights.layout.shape import read_shape


class Reference:
    """Weights besides the policy's own."""

    def __init__(self, policy: Policy, decay: float | None = None) -> None:
        """The weights that the policy has now; decay: they follow it as a moving average."""
        self._parameters = [p for chunk in policy.chunks for p in chunk.parameters()]
        self._decay = decay
        self._hidden = policy.shape.hidden
        self._backend = policy.backend
        self._own = [self._backend.host_copy(p) for p in self._parameters]
        # A moving average in bfloat16 would stand still: its steps are below the rounding.
        dtype = None if decay is None else torch.float32
        self._weights = [self._backend.host_copy(p, dtype) for p in self._parameters]

    @property
    def is_average(self) -> bool:
        """Whether it follows the policy."""
        return self._decay is not None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The policy has the reference's weights inside, and its own again outside.

        The policy's parameters must be complete (`Trainer.gather`). The copies follow each other in
        the device's stream; the host waits for none of them.
        """
        _copy(self._parameters, self._own)
        _copy(self._weights, self._parameters)
        try:
            yield
        finally:
            _copy(self._own, self._parameters)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """The policy's parameters are the reference's own tensors inside, as saving one needs it.

        They keep dtype and device: a moving average is not rounded to the model's dtype.
        """
        own = [parameter.data for parameter in self._parameters]
        _point(self._parameters, self._weights)
        try:
            yield
        finally:
            _point(self._parameters, own)

    @property
    def hidden(self) -> int:
        """Size of its hidden states."""
        return self._hidden

    def find(self, passes: Passes, minibatches: Sequence[MinibatchShare]) -> list[list[Known]]:
        """The objective's inputs from it, per microbatch, by the policy's passes."""
        with self.in_place():
            return passes.as_reference(minibatches)

    def take(self) -> None:
        """From now on the reference has the weights that are in the policy's place."""
        _copy(self._parameters, self._weights)
        self._backend.wait()

    def follow(self, gather: Callable[[], None]) -> None:
        """After a step of the optimizer; gather: completes the policy's parameters."""
        if self._decay is None:
            return
        gather()
        with torch.no_grad():
            for weight, parameter in zip(self._weights, self._parameters, strict=True):
                average = weight.to(parameter.device, non_blocking=True)
                average.lerp_(parameter.float(), 1 - self._decay)
                weight.copy_(average, non_blocking=True)
        self._backend.wait()


def open_reference(
    policy: Policy, objective: Objective, train: TrainConfig
) -> Reference | Teacher | None:
    """The reference that the objective reads, if any; the policy has its first weights.

    One that an engine holds is opened by `scored_reference.py`.
    Raises InputError for a folder that the policy cannot be compared with.
    """
    cfg = objective.cfg
    if not cfg.needs_reference:
        return None
    assert not cfg.needs_scorer, "the caller opens a reference that an engine holds"
    folder = cfg.reference.folder
    if folder is None:
        return Reference(policy, cfg.reference.decay if cfg.reference.policy == "ema" else None)
    # How long a sequence may be changes no weight.
    shape = replace(read_shape(folder), max_positions=policy.shape.max_positions)
    if shape != policy.shape:
        return Teacher(policy, folder, objective, train)
    reference = Reference(policy)
    with reference.in_place():
        load_weights(policy.chunks, policy.shape, folder)
        reference.take()
    return reference


def _point(parameters: list[Tensor], tensors: list[Tensor]) -> None:
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.data = tensor


@torch.no_grad()
def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        if source.dtype != target.dtype:
            # On the device: the host converts slowly, and the copy would wait for it.
            device = target.device if source.device.type == "cpu" else source.device
            source = source.to(device, non_blocking=True).to(target.dtype)
        target.copy_(source, non_blocking=True)
