"""The reference policy in a separate engine: a frozen model that the scorer process holds.

Used by trainer ranks. The leader of each model replica asks for the logprobs of its whole batch.
All ranks of the replica get these logprobs instead of running a pass of the reference.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from megatron.core import parallel_state

from megatron_rl.config.tree import Config
from megatron_rl.protocol.keys import load_keys
from megatron_rl.protocol.metrics import Metric
from megatron_rl.protocol.types import MinibatchShare, TrainSequence
from megatron_rl.trainer.leader import TURN_S, Leader
from megatron_rl.trainer.loss_tokens import Known
from megatron_rl.trainer.model.collate import placeholder
from megatron_rl.trainer.model.policy import Policy
from megatron_rl.trainer.passes import Passes
from megatron_rl.trainer.scoring_client import ScoringClient


class ScoredReference:
    """Logprobs of given tokens; nothing else of the reference is known."""

    is_average = False

    def __init__(self, leader: Leader, client: ScoringClient | None, policy: Policy) -> None:
        """client: on the leader of the replica, None on its other ranks."""
        self._leader, self._client, self._policy = leader, client, policy
        self.metrics: list[Metric] = []
        """Metrics of the last batch, as this rank's replica saw it."""

    def find(self, passes: Passes, minibatches: Sequence[MinibatchShare]) -> list[list[Known]]:
        """Its logprobs, of each microbatch; nothing on stages that compute no loss.

        Every trainer rank must call it. Raises as `ScoringClient.take`.
        """
        started = time.monotonic()
        shares = [self._shares(minibatch) for minibatch in minibatches]
        everything = [s for microbatches in shares for share in microbatches for s in share]
        again = self._client.asked_again if self._client else 0
        logprobs = self._ask(everything)
        self.metrics = [
            Metric("wait/reference_s", time.monotonic() - started, "max"),
            Metric("scorer/requests", len(everything), "sum"),
            Metric("scorer/tokens", sum(len(s.token_ids) for s in everything), "sum"),
        ]
        if self._client is not None:
            self.metrics.append(
                Metric("scorer/asked_again", self._client.asked_again - again, "sum")
            )
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return [[] for _ in minibatches]
        parts = iter(self._divided(logprobs, [share for each in shares for share in each]))
        return [[next(parts) for _ in microbatches] for microbatches in shares]

    def _shares(self, minibatch: MinibatchShare) -> list[list[TrainSequence]]:
        """The microbatches that the policy's passes will take, without their placeholders."""
        missing = -len(minibatch.microbatches) % self._policy.microbatch_multiple
        return [*minibatch.microbatches, *([] for _ in range(missing))]

    def _ask(self, sequences: list[TrainSequence]) -> np.ndarray:
        """[completion tokens, end to end] float32, on all ranks of the replica."""
        if self._client is not None:
            self._client.begin(sequences)
        frame = self._leader.read(self._poll)
        # A replica without a sequence has an answer too: the first number stands for that.
        return np.frombuffer(frame, dtype=np.float32)[1:]

    def _poll(self) -> bytearray:
        assert self._client is not None
        found = self._client.take(TURN_S)
        if found is None:
            return bytearray()
        return bytearray(np.append(np.float32(0.0), found).tobytes())

    def _divided(
        self, logprobs: np.ndarray, shares: Sequence[Sequence[TrainSequence]]
    ) -> list[Known]:
        counts = [sum(len(s.token_ids) - s.prompt_length for s in share) for share in shares]
        assert len(logprobs) == sum(counts)
        parts = np.split(logprobs, np.cumsum(counts)[:-1])
        nothing = np.zeros(len(placeholder().generator_logprobs), np.float32)
        return [
            Known(reference_logprobs=torch.tensor(part if share else nothing).to(self._device))
            for part, share in zip(parts, shares, strict=True)
        ]

    @property
    def _device(self) -> torch.device:
        return self._policy.device

    def follow(self, gather: Callable[[], None]) -> None:
        """It stays as it is."""


@contextmanager
def open_scored_reference(
    cfg: Config, policy: Policy, leader: Leader
) -> Iterator[ScoredReference | None]:
    """The reference of the run's scorer, where it has one; tells the scorer to end at the end."""
    if not cfg.algorithm.needs_scorer:
        yield None
        return
    dp_rank, ports = parallel_state.get_data_parallel_rank(), cfg.ports
    if not leader.is_this_rank:
        yield ScoredReference(leader, None, policy)
        return
    client = ScoringClient(
        f"{ports.host}:{ports.scorer}",
        f"trainer-{dp_rank}-reference",
        keys=load_keys(ports.keys_dir),
        label=ports.label,
        max_open=cfg.scorer.max_running,
        answer_within_s=cfg.scorer.answer_within_s,
    )
    with client:
        yield ScoredReference(leader, client, policy)
        if dp_rank == 0:
            client.stop()
