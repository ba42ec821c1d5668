"""Reference policies: where the reference's logprobs come from, behind one interface.

Used by trainer ranks. `open_reference` chooses by `algorithm.reference`:

| class              | holds                                            | moves with the policy |
|--------------------|--------------------------------------------------|-----------------------|
| `SwappedReference` | other weights for the policy's own model         | no                    |
| `EmaReference`     | the same, an exponential moving average          | yes                   |
| `Teacher`          | a separate model of another size, on these ranks | no                    |
| `ScoredReference`  | nothing: the scorer process has an engine        | no                    |
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_rl.algorithms.objective import Objective
from megatron_rl.backend import fp8
from megatron_rl.config.tree import TrainConfig
from megatron_rl.protocol.metrics import Metric
from megatron_rl.protocol.types import MinibatchShare, TrainSequence
from megatron_rl.trainer.forward_backward import Passes, output_weight
from megatron_rl.trainer.loss_inputs import Prepared
from megatron_rl.trainer.model.build import build_frozen
from megatron_rl.trainer.model.collate import MicroBatch, placeholder
from megatron_rl.trainer.model.logprobs import ReferenceLayer
from megatron_rl.trainer.model.policy import Policy
from megatron_rl.trainer.scoring_client import Scorer
from megatron_rl.trainer.value_head import prompt_features
from megatron_rl.weights.folders.load import load_weights, unwrap
from megatron_rl.weights.layout.local_names import named_tensors
from megatron_rl.weights.layout.shape import check_teacher, read_shape


class Reference(Protocol):
    """A policy that the trained one is compared with."""

    hidden: int
    """Size of its hidden states; 0: it has none here."""
    metrics: Sequence[Metric]
    """Of the last call."""

    def compute_log_probs(
        self, passes: Passes, minibatches: Sequence[MinibatchShare]
    ) -> list[list[Prepared]]:
        """What the objective reads of the reference, per minibatch and microbatch.

        Empty lists on stages that compute no loss. passes: the policy's. Collective over all
        trainer ranks.
        """


def open_reference(
    policy: Policy, objective: Objective, train: TrainConfig, scorer: Scorer | None = None
) -> Reference | None:
    """The reference that the objective reads, if any; the policy has its first weights.

    scorer: this rank's access to the scorer process, where the run has one.
    Raises InputError for a folder that the policy cannot be compared with.
    """
    cfg = objective.cfg
    if not cfg.needs_reference:
        return None
    if cfg.needs_scorer:
        assert scorer is not None, "the caller opens the scorer"
        return ScoredReference(policy, scorer)
    folder = cfg.reference.folder
    if folder is None:
        is_average = cfg.reference.policy == "ema"
        return EmaReference(policy, cfg.reference.decay) if is_average else SwappedReference(policy)
    # How long a sequence may be changes no weight.
    shape = replace(read_shape(folder), max_positions=policy.shape.max_positions)
    if shape != policy.shape:
        return Teacher(policy, folder, objective, train)
    reference = SwappedReference(policy)
    with reference.in_place():
        load_weights(policy.chunks, policy.shape, folder)
        reference.take()
    return reference


class SwappedReference:
    """Weights that take the place of the policy's for one pass.

    Each rank keeps its own part in host memory; float32 masters are not touched.
    """

    metrics: Sequence[Metric] = ()

    def __init__(self, policy: Policy, dtype: torch.dtype | None = None) -> None:
        """The weights that the policy has now. dtype: to keep them in; None: the policy's."""
        self.hidden = policy.shape.hidden
        self._chunks = policy.chunks
        # A folder fills the corrections of routers too, which are buffers.
        self._parameters = [*named_tensors(policy.chunks).values()]
        self._backend = policy.backend
        self._own = [self._backend.host_copy(p) for p in self._parameters]
        self._weights = [self._backend.host_copy(p, dtype) for p in self._parameters]
        self._backend.wait()

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

    def take(self) -> None:
        """Keep the weights that are in the policy's place now."""
        _copy(self._parameters, self._weights)
        self._backend.wait()

    def compute_log_probs(
        self, passes: Passes, minibatches: Sequence[MinibatchShare]
    ) -> list[list[Prepared]]:
        """As in `Reference`: by the policy's passes, under these weights."""
        with self.in_place():
            return _by_passes(passes, minibatches)


class EmaReference(SwappedReference):
    """An exponential moving average of the policy's weights."""

    def __init__(self, policy: Policy, decay: float) -> None:
        # A moving average in bfloat16 would stand still: its steps are below the rounding.
        super().__init__(policy, torch.float32)
        self._decay = decay

    def follow(self, gather: Callable[[], None]) -> None:
        """After a step of the optimizer; gather: completes the policy's parameters."""
        gather()
        with torch.no_grad():
            for weight, parameter in zip(self._weights, self._parameters, strict=True):
                average = weight.to(parameter.device, non_blocking=True)
                average.lerp_(parameter.float(), 1 - self._decay)
                weight.copy_(average, non_blocking=True)
        self._backend.wait()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """The policy's modules hold the average as their parameters inside, to save and load it.

        The average is not rounded to the model's dtype. The policy's own parameters are put aside:
        torch drops the hooks of a parameter whose `data` changes dtype or device, and Megatron
        collects gradients by these hooks (megatron-core 0.16.1, distributed_data_parallel.py:341).
        """
        averages = {
            parameter: torch.nn.Parameter(weight, requires_grad=False)
            for parameter, weight in zip(self._parameters, self._weights, strict=True)
        }
        own = [
            (held, name, tensor)
            for chunk in self._chunks
            for module in chunk.modules()
            for held in (module._parameters, module._buffers)
            for name, tensor in held.items()
            if tensor in averages
        ]
        for held, name, parameter in own:
            held[name] = averages[parameter]
        try:
            yield
        finally:
            for held, name, parameter in own:
                held[name] = parameter


class Teacher:
    """A frozen model of another size next to the policy, divided over the same ranks.

    It waits in host memory, and is on the device for its pass alone. It may lack ids that pad the
    policy's vocabulary, and knows neither a sampled one of them nor what follows it. These tokens
    take the generator's logprobs, so that their log ratio is 0 on-policy.
    """

    metrics: Sequence[Metric] = ()

    def __init__(
        self, policy: Policy, folder: Path, objective: Objective, train: TrainConfig
    ) -> None:
        """Raises InputError for a folder that does not fit the policy's tokens or ranks."""
        shape = read_shape(folder)
        is_exact = objective.cfg.kl.is_exact
        check_teacher(shape, policy.shape, folder, is_exact=is_exact, parallel=policy.parallel)
        # Generators choose experts of the policy alone; and buffers of one size are the policy's.
        train = train.model_copy(update={"router_replay": False, "pad_microbatches": False})
        cfg = policy.cfg.model_copy(update={"train": train})
        chunks = build_frozen(policy.backend, cfg, shape)
        load_weights(chunks, shape, folder)
        self.hidden = shape.hidden
        self._vocab, self._lacks_ids = shape.vocab, shape.vocab < policy.shape.vocab
        self.parameters = [p for chunk in chunks for p in chunk.parameters()]
        self._host = [policy.backend.host_copy(p) for p in self.parameters]
        _point(self.parameters, self._host)
        own = replace(policy, shape=shape, chunks=chunks, cfg=cfg)
        self._passes = Passes(own, objective, train, vocab=min(shape.vocab, policy.shape.vocab))

    def compute_log_probs(
        self, passes: Passes, minibatches: Sequence[MinibatchShare]
    ) -> list[list[Prepared]]:
        """As in `Reference`: by the teacher's own passes."""
        if not self._lacks_ids:
            return self._by_own_passes(minibatches)
        found = self._by_own_passes([_with_ids_below(self._vocab, m) for m in minibatches])
        return [
            _with_logprobs_of_generator(prepared, minibatch, self._vocab)
            for prepared, minibatch in zip(found, minibatches, strict=True)
        ]

    def _by_own_passes(self, minibatches: Sequence[MinibatchShare]) -> list[list[Prepared]]:
        device = self._passes.policy.device
        _point(self.parameters, [weight.to(device, non_blocking=True) for weight in self._host])
        try:
            return _by_passes(self._passes, minibatches)
        finally:
            _point(self.parameters, self._host)
            fp8.free_codes(self._passes.policy.chunks)


class ScoredReference:
    """The frozen model of the scorer process: logprobs of given tokens, and nothing else."""

    hidden = 0

    def __init__(self, policy: Policy, scorer: Scorer) -> None:
        self._policy, self._scorer = policy, scorer

    @property
    def metrics(self) -> Sequence[Metric]:
        """Of the last batch, as this rank's replica saw it."""
        return self._scorer.metrics

    def compute_log_probs(
        self, passes: Passes, minibatches: Sequence[MinibatchShare]
    ) -> list[list[Prepared]]:
        """As in `Reference`, by the scorer. Raises as `ScoringClient.take`."""
        shares = [passes.padded_microbatches(minibatch) for minibatch in minibatches]
        flat = [share for each in shares for share in each]
        logprobs = self._scorer.score([sequence for share in flat for sequence in share])
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return [[] for _ in minibatches]
        counts = [sum(len(s.generator_logprobs) for s in share) for share in flat]
        assert len(logprobs) == sum(counts)
        parts = np.split(logprobs, np.cumsum(counts)[:-1])
        nothing = np.zeros(len(placeholder().generator_logprobs), np.float32)
        found = iter(
            Prepared(
                reference_logprobs=torch.tensor(part if share else nothing).to(self._policy.device)
            )
            for part, share in zip(parts, flat, strict=True)
        )
        return [[next(found) for _ in each] for each in shares]


def _by_passes(passes: Passes, minibatches: Sequence[MinibatchShare]) -> list[list[Prepared]]:
    """What the objective reads of the weights that are in place, per minibatch and microbatch."""
    objective, model = passes.objective, unwrap(passes.policy.chunks[-1])
    host_copy = passes.policy.backend.host_copy
    weight: Tensor | None = None
    if objective.cfg.kl.is_exact and model.post_process:
        # An update computes the reference's logits again. Host memory holds what that needs: the
        # hidden states of all completion tokens of a batch, and one output layer. The device's
        # stream writes and reads them; the host waits for neither.
        weight = host_copy(output_weight(model))

    def read(batch: MicroBatch, _: Prepared, selected: Tensor) -> Prepared:
        layer = None
        if weight is not None:
            layer = ReferenceLayer(host_copy(selected, weight.dtype), weight)
        return Prepared(
            reference_logprobs=passes.compute_log_probs(batch, selected).logprobs,
            reference_layer=layer,
            features=prompt_features(selected, batch) if objective.cfg.learns_value else None,
        )

    return [passes.forward_only(passes.inputs(minibatch), read) for minibatch in minibatches]


def _with_ids_below(vocab: int, minibatch: MinibatchShare) -> MinibatchShare:
    """The same with other ids replaced by the last one: an embedding takes no others."""
    microbatches = [
        [msgspec.structs.replace(s, token_ids=s.token_ids.clip(max=vocab - 1)) for s in share]
        for share in minibatch.microbatches
    ]
    return msgspec.structs.replace(minibatch, microbatches=microbatches)


def _with_logprobs_of_generator(
    prepared: list[Prepared], minibatch: MinibatchShare, vocab: int
) -> list[Prepared]:
    """The same with the generator's logprobs from the first id of a sequence on that is not below
    `vocab`."""
    found = list(prepared)
    # Stages that compute no loss prepared nothing; microbatches that fill up the schedule are last.
    for number, (one, share) in enumerate(zip(prepared, minibatch.microbatches, strict=False)):
        lacks = [_lacks(s, vocab) for s in share]
        if not any(each.any() for each in lacks):
            continue
        own = one.reference_logprobs
        assert own is not None
        sampled = torch.from_numpy(np.concatenate([s.generator_logprobs for s in share]))
        is_lacking = torch.from_numpy(np.concatenate(lacks)).to(own.device)
        filled = sampled.to(own.device, own.dtype).where(is_lacking, own)
        found[number] = replace(one, reference_logprobs=filled)
    return found


def _lacks(sequence: TrainSequence, vocab: int) -> np.ndarray:
    """[target tokens] bool: the token, or one before it, is not below `vocab`."""
    return np.logical_or.accumulate(sequence.token_ids >= vocab)[sequence.targets]


def _point(parameters: list[Tensor], tensors: list[Tensor]) -> None:
    """Give frozen parameters other memory; one that is trained would lose its hooks."""
    assert not any(parameter.requires_grad for parameter in parameters)
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
