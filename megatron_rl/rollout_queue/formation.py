"""Forms the batch of a step, once there are groups for it: chosen, replayed, and looked back at.

Used by the rollout queue.
"""

from typing import NamedTuple

from megatron_rl.algorithms.minibatch import find_crediting
from megatron_rl.config.tree import Config
from megatron_rl.protocol.sequence_cost import find_cost
from megatron_rl.protocol.types import RankBatch
from megatron_rl.rollout_queue.batches import Fill, fill_minibatch, form_batch
from megatron_rl.rollout_queue.groups import DroppedGroups, Group, GroupBook
from megatron_rl.rollout_queue.replay.draw import Replay
from megatron_rl.rollout_queue.training_groups import TrainingGroups


class Formed(NamedTuple):
    """A batch, and what it was made of."""

    step: int
    shares: list[RankBatch]
    """By data-parallel rank."""
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
        replay: Replay,
        fill: Fill = fill_minibatch,
    ) -> None:
        self._fill = fill
        self._crediting = find_crediting(config.algorithm)
        self._cost = find_cost(config.train.packing, config.model.path)
        self._training = training
        self._book = book
        self._replay = replay

    def form(self, step: int, dp_size: int) -> Formed | None:
        """The batch of a step, by the sizes of its stage; None while groups for it are missing."""
        training = self._training
        numbers = training.choose_batch(self._book, step)
        if numbers is None:
            return None
        training.schedule.log_beginning(step)
        groups, dropped = self._book.take(numbers, step)
        training.note_trained(groups)
        shares = form_batch(
            step,
            groups,
            replayed=self._replay.draw(step, groups),
            dropped=dropped,
            stage=training.schedule.at(step),
            crediting=self._crediting,
            dp_size=dp_size,
            cost=self._cost,
            more=training.metrics(step),
            fill=self._fill,
        )
        training.note_batch(shares[0], self._book)
        return Formed(step, shares, groups, dropped)
