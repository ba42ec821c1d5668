"""A reference of another size: a frozen model next to the policy, divided over the same ranks.

Used by trainer ranks. It waits in host memory, and is on the device for its pass alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from megatron_rl.algorithms.objective import Objective
from megatron_rl.config.tree import TrainConfig
from megatron_rl.protocol.types import MinibatchShare
from megatron_rl.trainer.loss_tokens import Known
from megatron_rl.trainer.model.build import build_frozen
from megatron_rl.trainer.model.policy import Policy
from megatron_rl.trainer.passes import Passes
from megatron_rl.weights.folders.load import load_weights
from megatron_rl.weights.layout.shape import check_parallel, check_teacher, read_shape


class Teacher:
    """A separate model that is not trained."""

    is_average = False

    def __init__(
        self, policy: Policy, folder: Path, objective: Objective, train: TrainConfig
    ) -> None:
        """Raises InputError for a folder that does not fit the policy's tokens or ranks."""
        shape = read_shape(folder)
        check_teacher(shape, policy.shape, folder, is_exact=objective.needs_reference_kl)
        check_parallel(shape, policy.parallel)
        # Generators choose experts of the policy alone; and buffers of one size are the policy's.
        train = train.model_copy(update={"router_replay": False, "pad_microbatches": False})
        cfg = policy.cfg.model_copy(update={"train": train})
        chunks = build_frozen(policy.backend, cfg, shape)
        load_weights(chunks, shape, folder)
        self.parameters = [p for chunk in chunks for p in chunk.parameters()]
        self._host = [policy.backend.host_copy(p) for p in self.parameters]
        self._leave_device()
        own = replace(policy, shape=shape, chunks=chunks, cfg=cfg)
        self._passes = Passes(own, objective, train, vocab=min(shape.vocab, policy.shape.vocab))

    @property
    def hidden(self) -> int:
        """Size of its hidden states."""
        return self._passes.policy.shape.hidden

    def find(self, passes: Passes, minibatches: Sequence[MinibatchShare]) -> list[list[Known]]:
        """The objective's inputs from it, per microbatch; passes: the policy's, not needed."""
        with self._on_device():
            return self._passes.as_reference(minibatches)

    def follow(self, gather: Callable[[], None]) -> None:
        """It stays as it is."""

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        device = self._passes.policy.device
        for parameter, weight in zip(self.parameters, self._host, strict=True):
            parameter.data = weight.to(device, non_blocking=True)
        try:
            yield
        finally:
            self._leave_device()

    def _leave_device(self) -> None:
        for parameter, weight in zip(self.parameters, self._host, strict=True):
            parameter.data = weight
