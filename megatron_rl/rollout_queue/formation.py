"""Forms the batch of a step, once there are groups for it: chosen, replayed, and looked back at.

Used by the rollout queue.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megatron_rl.algorithms.minibatch import find_advantage_functions
from megatron_rl.config.tree import Config
from megatron_rl.protocol.sequence_cost import find_cost
from megatron_rl.protocol.types import Prompt, RankBatch
from megatron_rl.rollout_queue.batches import BatchOrder, order_batch
from megatron_rl.rollout_queue.groups import DroppedGroups, Group, GroupBook
from megatron_rl.rollout_queue.replay.draw import open_replay
from megatron_rl.rollout_queue.training_groups import TrainingGroups


class Formed(NamedTuple):
    """A batch, and what it was made of."""

    order: BatchOrder
    """What is dealt to ranks."""
    groups: list[Group]
    """Sampled for it."""
    dropped: DroppedGroups
    """Since the batch before."""


class Formation:
    """Takes groups out of the book, and tells the schedule of stages what became of them."""

    def __init__(
        self,
        config: Config,
        training: TrainingGroups,
        book: GroupBook,
        held_out: Sequence[Prompt],
    ) -> None:
        """held_out: prompts that are not replayed. Raises InputError, as `open_replay`."""
        self._advantage_functions = find_advantage_functions(config.algorithm)
        self._cost = find_cost(config.train.packing, config.model.path)
        self._training = training
        self._book = book
        self._replay = open_replay(config, held_out)

    def resume_at(self, step: int) -> None:
        """The next batch is that of `step`; call before any batch."""
        self._replay.resume_at(step)

    def form(self, step: int, dp_size: int) -> Formed | None:
        """The batch of a step, by the sizes of its stage; None while groups for it are missing."""
        training = self._training
        # Asked after every message: most of the time a glance says that groups are missing.
        ready = self._book.ready_of(training.schedule.stage_at(step))
        if ready < training.schedule.at(step).sampled_groups:
            return None
        numbers = training.choose_batch(self._book, step)
        if numbers is None:
            return None
        training.schedule.log_beginning(step)
        groups, dropped = self._book.take(numbers, step)
        training.note_trained(groups)
        order = order_batch(
            step,
            groups,
            replayed=self._replay.draw(step, groups),
            dropped=dropped,
            stage=training.schedule.at(step),
            advantage_functions=self._advantage_functions,
            dp_size=dp_size,
            cost=self._cost,
            more=training.metrics(step),
        )
        # What is opened next follows from the metrics, and must not wait until the batch is dealt.
        training.note_batch(RankBatch(step, 0, [], order.metrics), self._book)
        return Formed(order, groups, dropped)
