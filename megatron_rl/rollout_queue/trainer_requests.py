"""Answers the trainer's requests: builds batches, and sends the states of checkpoints.

Used by the rollout queue. Every data-parallel leader asks for its share of a batch, in any order,
and may repeat this until the batch of the next step is built. A state is sent when all earlier
records are on the disk, since a run that resumes from it does not write them again.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple

from megatron_rl.algorithms.minibatch import find_advantage_functions
from megatron_rl.config.tree import Config
from megatron_rl.protocol.queue_state import QueueState
from megatron_rl.protocol.sequence_cost import find_cost
from megatron_rl.protocol.types import NextBatch, Prompt, RankBatch, Stop
from megatron_rl.protocol.wire import WireError
from megatron_rl.rollout_queue.batches import BatchOrder, order_batch
from megatron_rl.rollout_queue.group_end import GroupEnd
from megatron_rl.rollout_queue.record import Recorder
from megatron_rl.rollout_queue.replay import NOTHING, open_replay
from megatron_rl.rollout_queue.training_groups import TrainingGroups

log = logging.getLogger(__name__)


class BatchRequests:
    """Open requests by data-parallel rank."""

    def __init__(self, steps: int) -> None:
        self._all_steps = self._steps = steps
        self.is_stopped = False
        """No further batch is built, though steps are left."""
        self._first_step = 0
        self.built_steps = 0
        """Number of built batches, including one that is still dealt to ranks."""
        self._requests: dict[int, tuple[str, NextBatch]] = {}
        """Rank -> (peer, request)."""
        self._stopped: set[int] = set()
        self._dp_size = 0
        self._answered: dict[int, int] = {}
        """Rank -> step of the last answered request."""
        self._repeated: set[int] = set()
        """Ranks whose last request was an old one."""

    def resume_at(self, step: int) -> None:
        """Count the batches before `step` as built; call before the first request."""
        self._first_step = self.built_steps = step

    def forget_ranks(self) -> None:
        """All ranks of the trainer are new, and ask again, also for their Stop."""
        self._requests.clear()
        self._answered.clear()
        self._repeated.clear()
        self._stopped.clear()

    def stop(self) -> None:
        """Build no further batch: answer later requests with Stop."""
        if self.built_steps < self._steps:
            self._steps, self.is_stopped = self.built_steps, True

    def forget_stop(self) -> None:
        """Build the remaining batches after all."""
        self._steps, self.is_stopped = self._all_steps, False

    def ask(self, peer: str, request: NextBatch) -> None:
        """Note a request. Raises WireError if it can never be answered."""
        if self._dp_size not in (0, request.dp_size) or request.dp_rank >= request.dp_size:
            raise WireError(
                f"{peer} asks as data-parallel rank {request.dp_rank} of {request.dp_size}, others "
                f"as ranks of {self._dp_size}"
            )
        if self._is_repeated(request):
            return
        has_built = self.built_steps > self._first_step
        if request.step < self.built_steps - has_built:
            raise WireError(
                f"{peer} asks for the batch of step {request.step}, but that of step "
                f"{self.built_steps - 1} is built: the trainer went back without the queue. "
                "Start both again, with the same checkpoint.resume"
            )
        self._dp_size = request.dp_size
        self._requests[request.dp_rank] = peer, request

    def _is_repeated(self, request: NextBatch) -> bool:
        """Whether an answer crossed this request. A trainer that went back asks more than once."""
        rank, step = request.dp_rank, request.step
        if step >= self._answered.get(rank, -1):
            self._repeated.discard(rank)
            return False
        if rank in self._repeated:
            return False
        self._repeated.add(rank)
        return True

    def next_to_build(self) -> tuple[int, int] | None:
        """(step, dp_size) of a batch that a rank waits for and that is not built."""
        for _, request in self._requests.values():
            if self.built_steps <= request.step < self._steps:
                return request.step, request.dp_size
        return None

    def begin(self, step: int) -> None:
        """The batch of a step is built and will be dealt."""
        self.built_steps = step + 1

    def answers(self, batch: Sequence[RankBatch]) -> list[tuple[str, RankBatch | Stop]]:
        """(peer, share) of each request that can be answered; Stop beyond the last step.

        batch: shares of the latest batch by rank; empty before it is dealt.
        """
        answers: list[tuple[str, RankBatch | Stop]] = []
        for rank, (peer, request) in list(self._requests.items()):
            if request.step >= self._steps:
                why = f"all {self._steps} steps are done"
                if self.is_stopped:
                    why = "the run is asked to stop"
                answers.append((peer, Stop(why)))
                self._stopped.add(rank)
            elif batch and request.step == self.built_steps - 1:
                answers.append((peer, batch[rank]))
            else:
                continue
            self._answered[rank] = request.step
            del self._requests[rank]
        return answers

    @property
    def waiting_ranks(self) -> list[int]:
        return sorted(self._requests)

    @property
    def waits(self) -> list[tuple[str, str]]:
        """(trainer of a data-parallel rank, what it does or waits for)."""
        waiting = [
            (f"trainer-{rank}", f"waits for the batch of step {request.step + 1}")
            for rank, (_, request) in self._requests.items()
        ]
        at_work = [
            (f"trainer-{rank}", f"takes step {step + 1}")
            for rank, step in self._answered.items()
            if rank not in self._requests and rank not in self._stopped
        ]
        return sorted(waiting + at_work)

    @property
    def is_dismissed(self) -> bool:
        return self._dp_size > 0 and len(self._stopped) == self._dp_size


class BatchBuilder:
    """Builds the batch of a step when its groups are complete."""

    def __init__(
        self, config: Config, training: TrainingGroups, ends: GroupEnd, held_out: Sequence[Prompt]
    ) -> None:
        """held_out: prompts that are not replayed. Raises InputError as `open_replay`."""
        self._advantage_functions = find_advantage_functions(config.algorithm)
        self._cost = find_cost(config.train.packing, config.model.path)
        self._training = training
        self._ends = ends
        self._replay = open_replay(config, held_out)

    def resume_at(self, step: int) -> None:
        """Resume at `step`; call before the first batch."""
        if self._replay is not None:
            self._replay.resume_at(step)

    def build(self, step: int, dp_size: int) -> BatchOrder | None:
        """The batch of a step; None while groups are missing."""
        training = self._training
        taken = self._ends.take_batch(step)
        if taken is None:
            return None
        groups, dropped = taken
        training.schedule.log_beginning(step)
        order = order_batch(
            step,
            groups,
            replayed=self._replay.draw(step, groups) if self._replay is not None else NOTHING,
            dropped=dropped,
            stage=training.schedule.at(step),
            advantage_functions=self._advantage_functions,
            dp_size=dp_size,
            cost=self._cost,
            more=training.metrics(step),
        )
        # Before the batch is dealt, because the metrics decide which groups are opened next.
        training.note_batch(RankBatch(step, 0, [], order.metrics))
        return order


class _Saving(NamedTuple):
    peer: str
    state: QueueState
    records: int
    """Number of record jobs that must be on the disk first."""


class StateRequests:
    """States that wait for the disk, in order."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._waiting: list[_Saving] = []
        self._latest: QueueState | None = None

    def is_repeated(self, peer: str, step: int, *, built_steps: int) -> bool:
        """Whether the state after `step` was asked for before; then it is sent again.

        A restarted trainer asks again, after later batches.
        """
        if any(one.peer == peer and one.state.step == step for one in self._waiting):
            return True
        if self._latest is None or not step == self._latest.step < built_steps:
            return False
        log.info("%s asks again for the state after step %d", peer, step)
        self.put(peer, self._latest)
        return True

    def put(self, peer: str, state: QueueState) -> None:
        """Queue a state until all records so far are on the disk."""
        self._latest = state
        self._waiting.append(_Saving(peer, state, self._recorder.writer.put))

    def answers(self) -> list[tuple[str, QueueState]]:
        """(peer, state) of the requests whose records are all on the disk."""
        answers = []
        while self._waiting and self._recorder.writer.written >= self._waiting[0].records:
            saving = self._waiting.pop(0)
            answers.append((saving.peer, saving.state))
        return answers
