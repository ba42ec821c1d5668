"""A resumed queue opens again what was neither trained on nor dropped, then goes on."""

import collections
import random

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.data.prompts import PromptSets
from megatron_rl.protocol.queue_state import QueueState, UnfinishedGroup
from megatron_rl.rollout_queue.drop_reasons import ZERO_VARIANCE
from megatron_rl.rollout_queue.training_groups import TrainingGroups
from tests.rollout_queue.makers import make_group, make_prompt

PROMPTS, BATCH = 40, 4
CONFIG = Config.model_validate({"train": {"group_size": 2}})


def prompt_sets(count: int = PROMPTS) -> PromptSets:
    return PromptSets([[make_prompt(str(n)) for n in range(count)]], [1.0], [], 0)


class Queue:
    """Opens, completes, drops and trains on groups at random, as the coordinator would."""

    def __init__(self, state: QueueState | None) -> None:
        self.training = TrainingGroups(prompt_sets(), CONFIG)
        self.book = self.training.book
        self.opened = 0
        if state is not None:
            self.training.restore(state)
            self.opened = state.groups_opened

    def step(self, chance: random.Random) -> list[UnfinishedGroup]:
        """Groups that a batch counts: trained on, or dropped for zero variance."""
        while self.book.complete < BATCH or chance.random() < 0.7:
            group = self.training.open(self.opened, version=0)
            self.opened = max(self.opened, group.number + 1)
            self.book.open(group)
            if chance.random() < 0.7:
                rewards = [0.0, 0.0] if chance.random() < 0.3 else [0.0, 1.0]
                group.scored = make_group(0, rewards).scored
                if group.has_zero_variance:
                    self.book.drop(group, ZERO_VARIANCE)
        numbers = [group.number for group in self.book.candidates() if group.is_complete][:BATCH]
        groups, dropped = self.book.take(numbers, 0)
        self.book.finish_training(1)
        return [UnfinishedGroup(g.number, g.prompt.id) for g in groups] + dropped.unfinished

    def save(self, step: int) -> QueueState:
        return self.training.state(step, groups_opened=self.opened)


@pytest.mark.parametrize("seed", range(5))
def test_no_prompt_is_lost_or_counted_twice_over_many_resumptions(seed: int) -> None:
    chance = random.Random(seed)
    queue, counted = Queue(None), []
    for step in range(30):
        counted += queue.step(chance)
        if chance.random() < 0.4:
            state = queue.save(step)
            queue.step(chance)  # lost with the process
            queue = Queue(state)
    rest = [group.prompt_id for group in queue.save(30).unfinished]
    of_prompt = collections.Counter([group.prompt_id for group in counted] + rest)
    draws = queue.save(30).cursor.draws
    assert draws > 2 * PROMPTS and sum(of_prompt.values()) == draws
    # Epochs are whole: no prompt may be ahead of another by more than the one that is running.
    assert set(of_prompt.values()) <= {draws // PROMPTS, draws // PROMPTS + 1}
    numbers = [group.number for group in counted]
    assert len(set(numbers)) == len(numbers)


def test_repeated_group_keeps_number_and_seed_but_not_its_version() -> None:
    queue = Queue(None)
    first = queue.training.open(0, version=3)
    queue.book.open(first)
    queue.opened = 1
    state = queue.save(5)
    again = Queue(state).training.open(state.groups_opened, version=5)
    assert (again.number, again.prompt, again.sampling) == (0, first.prompt, first.sampling)
    assert again.opened_version == 5
    second = TrainingGroups(prompt_sets(), CONFIG)
    second.restore(state)
    assert [second.open(state.groups_opened, 5).number for _ in range(2)] == [0, 1]


def test_groups_abandoned_at_the_end_are_opened_when_the_run_is_made_longer() -> None:
    queue = Queue(None)
    queue.book.open(queue.training.open(0, version=0))
    queue.book.abandon()
    assert [group.number for group in queue.save(5).unfinished] == [0]


def test_other_prompts_than_the_saved_ones_are_refused() -> None:
    queue = Queue(None)
    queue.book.open(queue.training.open(0, version=0))
    state = queue.save(1)
    with pytest.raises(InputError, match="sources of .40. train prompts.*this run has 1 of .39."):
        TrainingGroups(prompt_sets(39), CONFIG).restore(state)
    other = PromptSets([[make_prompt(f"x{n}") for n in range(PROMPTS)]], [1.0], [], 0)
    with pytest.raises(InputError, match="names the prompt '.*', which the prompt sources lack"):
        TrainingGroups(other, CONFIG).restore(state)
