"""Which groups are replayed in which step. Used by the rollout queue.

What a step draws depends on the seed, the step and what there is alone, so a run that is resumed
draws the same.
"""

import collections
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.data.epochs import ShuffledEpochs
from megatron_rl.protocol.metrics import Metric
from megatron_rl.protocol.questions import normalized
from megatron_rl.protocol.rollout_files import TokensThinned, rollout_files
from megatron_rl.protocol.types import Prompt
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.rollout_queue.replay.datasets import folder_of_datasets
from megatron_rl.rollout_queue.replay.drawn import NOTHING, Drawn
from megatron_rl.rollout_queue.replay.stored_groups import StoredGroup, StoredGroups, read_groups

log = logging.getLogger(__name__)

LEFT_OUT = "queue/replay_left_out_"
"""Metrics of the queue, with the reason at the end: groups of files that are never drawn."""


class Replay(Protocol):
    """Where replayed groups come from."""

    def draw(self, step: int, sampled: list[Group]) -> Drawn:
        """The groups for the batch of a step, beside those that were sampled for it."""

    def resume_at(self, step: int) -> None:
        """The next batch is that of `step`; call before any draw."""


class NoReplay:
    """All groups are sampled."""

    def draw(self, step: int, sampled: list[Group]) -> Drawn:
        """None."""
        return NOTHING

    def resume_at(self, step: int) -> None:
        """There is nothing to go on with."""


class StoredReplay:
    """Groups of files: each once before any twice, in an order fixed by the seed."""

    def __init__(self, stored: StoredGroups, count: int, seed: int) -> None:
        """count: groups of a batch. Raises InputError where there is nothing to draw."""
        if not stored.groups:
            raise InputError(
                "replay.runs and replay.datasets hold no group to train on; left out were "
                f"{dict(stored.left_out)} groups (zero_variance: equal rewards, which "
                "algorithm.zero_variance_groups='keep' trains on; tokens_thinned: removed by "
                "queue.keep_tokens_of_steps of their run)"
            )
        self._groups, self._count = stored.groups, count
        self._epochs = ShuffledEpochs(len(stored.groups), f"{seed}/replay")
        left_out = [Metric(f"{LEFT_OUT}{name}", n, "max") for name, n in stored.left_out.items()]
        self._metrics = (Metric("queue/replay_groups", len(self._groups), "max"), *left_out)

    def draw(self, step: int, sampled: list[Group]) -> Drawn:
        """The next groups, unread: this runs in the queue's loop, which must not wait for files."""
        places = range(step * self._count, (step + 1) * self._count)
        return Drawn(tuple(self._groups[self._epochs.at(place)] for place in places), self._metrics)

    def resume_at(self, step: int) -> None:
        """Where a step begins is known from its number."""


class BufferReplay:
    """The run's own latest groups: drawn at random, none twice for a step."""

    def __init__(self, config: Config, count: int) -> None:
        """count: groups of a batch, once there are as many."""
        self._count, self._seed = count, config.run.seed
        self._max_age = config.replay.max_age
        self._run_dir = config.run.dir
        self._groups: collections.deque[Group]
        self._groups = collections.deque(maxlen=config.replay.buffer_groups)

    def draw(self, step: int, sampled: list[Group]) -> Drawn:
        """As many groups as are young enough, up to the count; then the sampled ones are kept."""
        young = [group for group in self._groups if step - oldest_version(group) <= self._max_age]
        chance = random.Random(f"{self._seed}/replay/{step}")
        drawn = chance.sample(young, min(self._count, len(young)))
        metric = Metric("queue/replay_groups", len(self._groups), "max")
        self._groups.extend(sampled)
        return Drawn(tuple(drawn), (metric,))

    def resume_at(self, step: int) -> None:
        """Fill the buffer from what is recorded of the steps before. Raises InputError."""
        found: list[StoredGroup] = []
        files = [f for f in rollout_files(self._run_dir) if f.step is not None and f.step < step]
        for file in reversed([file for file in files if not file.is_dropped]):
            try:
                found = [*read_groups(file), *found]
            except TokensThinned as error:
                log.warning("the replay buffer is not filled further: %s", error)
                break
            if len(found) >= (self._groups.maxlen or 0):
                break
        self._groups.extend(group.load(keeps_versions=True) for group in found)
        log.info("%d groups are kept to be replayed", len(self._groups))


def oldest_version(group: Group) -> int:
    """Of all its tokens."""
    return min(scored.rollout.oldest_version for scored in group.scored.values())


def open_replay(config: Config, held_out: Sequence[Prompt]) -> Replay:
    """What the configuration replays. Raises InputError for files that cannot be used."""
    count = config.replay.groups_of(config.train.prompts_per_batch)
    if not count:
        return NoReplay()
    if config.replay.buffer_groups:
        return BufferReplay(config, count)
    stored = StoredGroups()
    questions = frozenset(normalized(prompt.question) for prompt in held_out)
    for folder in _folders(config):
        stored.add_run(
            folder,
            context_tokens=config.generator.context_tokens,
            drops_zero_variance=config.algorithm.zero_variance_groups == "drop",
            held_out=questions,
        )
    log.info("%d groups to replay; left out: %s", len(stored.groups), dict(stored.left_out))
    return StoredReplay(stored, count, config.run.seed)


def _folders(config: Config) -> list[Path]:
    examples = [folder_of_datasets(config.run.dir)] if config.replay.datasets else []
    return [*config.replay.runs, *examples]
