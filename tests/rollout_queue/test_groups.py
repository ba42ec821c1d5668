import dataclasses
import math
import pickle
import random

import numpy as np
import pytest
from msgspec.structs import replace

from megatron_rl.config.tree import Config, TrainConfig
from megatron_rl.protocol.metrics import MetricSet
from megatron_rl.protocol.rollout import ConversationTurn
from megatron_rl.protocol.types import Score, ScoredRollout, VersionSpan
from megatron_rl.rollout_queue.drop_reasons import ZERO_VARIANCE
from megatron_rl.rollout_queue.groups import DroppedGroups, Group, GroupBook
from megatron_rl.rollout_queue.tally import RolloutTally
from tests.rollout_queue.makers import form_batch, make_group, make_rollout


def reduced(entries: dict) -> dict[str, float]:
    metrics = MetricSet()
    metrics.add_entries(entries)
    return metrics.values()


def test_flat_group_is_dropped_and_counted_and_frees_its_place() -> None:
    book = GroupBook()
    flat, useful = make_group(0, [0.1, 0.1]), make_group(1, [1.0, 0.1])
    for group in (flat, useful):
        book.open(group)
    book.drop(flat, ZERO_VARIANCE)
    assert flat.has_zero_variance and not useful.has_zero_variance
    assert book.untrained_of(0) == book.complete == 1
    groups, dropped = book.take([1], 3)
    assert (
        groups == [useful] and dropped.reasons == {"zero_variance": 1} and dropped.tally.count == 2
    )
    assert (book.untaken, book.untrained_of(0)) == (0, 1)
    book.finish_training(3)
    assert book.untrained_of(0) == 1
    book.finish_training(4)
    assert book.untrained_of(0) == 0


def test_groups_left_at_the_end_are_returned_and_marked() -> None:
    book = GroupBook()
    book.open(make_group(0, [1.0, 0.1]))
    assert [group.is_abandoned for group in book.abandon()] == [True]
    assert book.untrained_of(0) == 0


@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_batch_holds_every_sequence_once_and_groups_stay_in_one_minibatch(dp_size: int) -> None:
    chance = np.random.default_rng(0)
    groups = [
        make_group(
            n, [1.0, 0.1, 0.1], tokens=chance.integers(1, 30, 3).tolist(), prompt_tokens=n + 1
        )
        for n in range(5)
    ]
    config = Config(
        train=TrainConfig(minibatches=2, microbatch_tokens=40, prompts_per_batch=5, group_size=3)
    )
    ranks = form_batch(0, groups, config, dp_size=dp_size)
    assert [share.dp_rank for share in ranks] == list(range(dp_size))
    minibatch_of: dict[int, set[int]] = {}
    sequences = 0
    for share in ranks:
        assert len(share.minibatches) == 2
        for number, minibatch in enumerate(share.minibatches):
            assert len(minibatch.microbatches) == len(ranks[0].minibatches[number].microbatches)
            for sequence in (s for m in minibatch.microbatches for s in m):
                sequences += 1
                # The makers' prompt lengths tell groups apart.
                minibatch_of.setdefault(sequence.prompt_length, set()).add(number)
    assert sequences == 15 and sorted(minibatch_of) == [1, 2, 3, 4, 5]
    assert all(len(numbers) == 1 for numbers in minibatch_of.values())


@pytest.mark.parametrize("dp_size", [1, 3, 8])
def test_groups_that_lost_completions_make_a_batch_like_others(dp_size: int) -> None:
    rewards = [[1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.5, 1.0, 0.0]]
    groups = [make_group(n, values, prompt_tokens=n + 1) for n, values in enumerate(rewards)]
    for group in groups:
        group.size, lost = 4, range(len(group.scored), 4)
        group.lost = dict.fromkeys(lost, "ungradable")
        assert group.is_complete
    dropped = DroppedGroups()
    dropped.completions["ungradable"] = 3
    config = Config(train=TrainConfig(prompts_per_batch=3, group_size=4, microbatch_tokens=10))
    ranks = form_batch(0, groups, config, dropped=dropped, dp_size=dp_size)
    counts = {len(share.minibatches[0].microbatches) for share in ranks}
    assert len(counts) == 1
    sequences = [s for share in ranks for m in share.minibatches[0].microbatches for s in m]
    assert len(sequences) == 9
    weights = [3 * sequence.weight for sequence in sequences]
    assert sum(weights) == pytest.approx(1.0)
    # Each group has a third of the weight, however many completions of three tokens are left.
    for prompt_length, members in ((1, 2), (2, 4), (3, 3)):
        of_group = [s for s in sequences if s.prompt_length == prompt_length]
        assert [s.weight for s in of_group] == pytest.approx([1 / (3 * 3 * members)] * members)
        assert sum(s.advantage for s in of_group) == pytest.approx(0.0)
    values = reduced(ranks[0].metrics)
    assert (
        values["queue/rollouts_trained"] == 9
        and values["queue/completions_dropped_ungradable"] == 3
    )
    assert values["rollout/reward"] == pytest.approx((1 + 1 + 1.5) / 9)


def test_sequence_carries_prompt_completion_logprobs_and_versions() -> None:
    group = make_group(0, [1.0, 0.1], tokens=[4, 2], versions=(3, 4), prompt_tokens=2)
    config = Config(train=TrainConfig(prompts_per_batch=1, group_size=2, microbatch_tokens=100))
    [share] = form_batch(5, [group], config)
    longest = share.minibatches[0].microbatches[0][0]
    assert longest.token_ids.tolist() == [0, 1, 100, 101, 102, 103]
    assert longest.token_versions.tolist() == [3, 4, 4, 4]
    assert longest.generator_logprobs.tolist() == [-0.5] * 4
    assert longest.weight == pytest.approx(1 / 6) and longest.advantage == pytest.approx(1.0)


def test_batch_metrics_match_hand_worked_numbers() -> None:
    groups = [
        make_group(0, [1.0, 0.0], tokens=[4, 2], versions=(3, 4)),
        make_group(1, [1.0, 0.0], tokens=[6, 8], versions=(5,)),
    ]
    dropped = DroppedGroups()
    dropped.add(make_group(2, [0.0, 0.0], tokens=[5, 5]), ZERO_VARIANCE)
    unfinished = make_group(3, [])
    dropped.add(unfinished, "prompt_unrenderable")
    config = Config(train=TrainConfig(prompts_per_batch=2, group_size=2))
    first, second = form_batch(5, groups, config, dropped=dropped, dp_size=2)
    assert second.metrics == {}
    assert reduced(first.metrics) == pytest.approx(
        {
            "rollout/reward": 2 / 6,
            "rollout/correct": 2 / 6,
            "rollout/format": 1.0,
            "rollout/length_tokens": 30 / 6,
            "rollout/truncated": 0.0,
            "reward/format": 0.1,
            "reason/correct": 2,
            "reason/wrong_answer": 4,
            "queue/staleness_versions_mean": (2 + 2 + 0 + 0) / 4,
            "queue/staleness_versions_max": 2,
            "queue/rollouts_spanning_versions": 2,
            "queue/rollouts_trained": 4,
            "queue/groups_trained": 2,
            "queue/groups_dropped_zero_variance": 1,
            "queue/groups_dropped_prompt_unrenderable": 1,
        }
    )


def test_part_of_the_reward_that_few_rollouts_have_is_a_mean_over_all_of_them() -> None:
    def tally(*parts: dict[str, float]) -> RolloutTally:
        return RolloutTally(
            ScoredRollout(make_rollout(), Score(sum(p.values()), p, "correct")) for p in parts
        )

    trained, dropped = tally({"format": 0.1, "style": 0.5}), tally({"format": 0.0}, {"format": 0.1})
    trained.fold(dropped)
    metrics = MetricSet()
    metrics.add(trained.metrics())
    values = metrics.values()
    assert values["reward/style"] == pytest.approx(0.5 / 3)
    assert values["reward/format"] == pytest.approx(0.2 / 3)


def test_sums_are_exact_in_any_order_and_do_not_grow_with_the_groups() -> None:
    chance = random.Random(0)
    rewards = [chance.uniform(-1, 1) * 10.0 ** chance.randint(-30, 30) for _ in range(3000)]
    groups = [make_group(n, rewards[n : n + 3]) for n in range(0, 3000, 3)]
    sizes = set()
    for _ in range(3):
        chance.shuffle(groups)
        dropped = DroppedGroups()
        for number, group in enumerate(groups):
            dropped.add(group, ZERO_VARIANCE)
            if number in (9, 999):
                sizes.add(len(pickle.dumps(dropped.tally)))
        [reward] = [one for one in dropped.tally.metrics() if one.name == "rollout/reward"]
        assert reward.value == math.fsum(rewards) and reward.count == 3000
    assert max(sizes) < min(sizes) + 20


def test_tasks_are_told_apart_and_later_replies_by_the_cache() -> None:
    def spoken(reward: float, *cached: int) -> ScoredRollout:
        turns = [
            ConversationTurn(0, 1, place - 1, [], "", 0.0, 0.0, 10, count)
            for place, count in enumerate(cached)
        ]
        reason = "correct" if reward else "out_of_turns"
        score = Score(reward, {"environment": reward}, reason, is_outcome=True)
        return ScoredRollout(replace(make_rollout(), conversation=turns), score)

    total = RolloutTally([spoken(1.0, 5, 8)], "game")
    metrics = MetricSet()
    metrics.add(total.metrics())
    assert not any(name.startswith("task/") for name in metrics.values())
    total.add([spoken(0.0, 9), spoken(1.0, 0, 4, 6)], "chat")
    metrics = MetricSet()
    metrics.add(total.metrics())
    found = metrics.values()
    # Of 10 tokens each; first replies have nothing to find.
    assert found["environment/cached_share"] == (8 + 4 + 6) / 30
    assert found["task/game/environment/cached_share"] == 0.8
    assert found["task/chat/environment/cached_share"] == 0.5
    assert found["task/game/rollout/correct"] == 1.0
    assert found["task/chat/rollout/reward"] == 0.5
    assert (found["task/chat/reason/out_of_turns"], found["reason/correct"]) == (1, 2)
    assert "task/chat/reward/environment" not in found


def test_turns_and_given_tokens_are_means_over_conversations_and_lengths_over_all() -> None:
    def spoken(*edges: int) -> ScoredRollout:
        spans = [VersionSpan(0, *pair) for pair in zip(edges[::2], edges[1::2], strict=True)]
        rollout = replace(make_rollout(tokens=edges[-1]), spans=spans)
        return ScoredRollout(rollout, Score(1.0, {}, "correct", is_outcome=True))

    def found(*tallies: RolloutTally) -> list[float]:
        total, metrics = RolloutTally(), MetricSet()
        for tally in tallies:
            total.fold(tally)
        metrics.add(total.metrics())
        names = ("environment/turns", "environment/given_tokens", "rollout/length_tokens")
        return [metrics.values()[name] for name in names]

    # Three turns of 4 sampled tokens with 2 given ones, and one turn of 3; others have 3.
    long, short = spoken(0, 1, 2, 4, 5, 6), spoken(0, 3)
    plain = ScoredRollout(make_rollout(), Score(1.0, {}, "correct"))
    assert found(RolloutTally([long]), RolloutTally([short])) == [2.0, 1.0, 3.5]
    assert found(RolloutTally([long, plain, plain])) == [3.0, 2.0, 10 / 3]


def test_counts_by_stage_are_those_of_a_look_at_every_group() -> None:
    chance, book = random.Random(0), GroupBook()
    alive: dict[int, Group] = {}
    ready: set[int] = set()
    for number in range(600):
        event = chance.choices(["open", "ready", "drop", "take", "abandon"], [8, 8, 2, 2, 0.1])[0]
        if event == "open":
            alive[number] = dataclasses.replace(
                make_group(number, [0.1]), stage=chance.randint(0, 2)
            )
            book.open(alive[number])
        elif event == "ready" and alive.keys() - ready:
            ready.add(chosen := chance.choice(sorted(alive.keys() - ready)))
            book.note_ready(alive[chosen])
        elif event == "drop" and alive:
            group = alive.pop(chance.choice(sorted(alive)))
            ready.discard(group.number)
            book.drop(group, ZERO_VARIANCE)
        elif event == "take" and ready:
            numbers = chance.sample(sorted(ready), min(3, len(ready)))
            book.take(numbers, step=number)
            ready.difference_update(numbers)
            alive = {n: group for n, group in alive.items() if n not in numbers}
        elif event == "abandon":
            assert {group.number for group in book.abandon()} == alive.keys()
            alive, ready = {}, set()
        for stage in range(3):
            mine = {n for n, group in alive.items() if group.stage == stage}
            assert (book.untaken_of(stage), book.ready_of(stage)) == (len(mine), len(mine & ready))
        assert book.untaken == len(alive)
