"""Builds a batch from complete groups: train sequences, advantages, weights, packing, metrics.

Used by the rollout queue. Pure, except `deal_batch`, which reads replayed groups. `plan_batch`
needs only lengths, so the simulator can plan batches without arrays.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from megatron_rl.algorithms.advantage_estimators import GroupView
from megatron_rl.algorithms.minibatch import AdvantageFunctions
from megatron_rl.config.tree import Config
from megatron_rl.protocol.metrics import (
    COMPLETIONS_DROPPED,
    GROUPS_DROPPED,
    Metric,
    MetricSet,
    Reduce,
)
from megatron_rl.protocol.packing import Microbatch, deal
from megatron_rl.protocol.rollout import TurnReturn, given_ranges
from megatron_rl.protocol.sequence_cost import TOKENS, SequenceCost
from megatron_rl.protocol.types import (
    GoldAnswer,
    MinibatchShare,
    RankBatch,
    ScoredRollout,
    TrainSequence,
)
from megatron_rl.rollout_queue.drop_reasons import ZERO_VARIANCE
from megatron_rl.rollout_queue.groups import NO_VERSION, DroppedGroups, Group, has_gold
from megatron_rl.rollout_queue.replay import NOTHING, Drawn
from megatron_rl.rollout_queue.tally import RolloutTally

_WHOLE = -1
"""In place of a turn index: a completion is compared as a whole."""


@dataclasses.dataclass(frozen=True)
class MinibatchPlan:
    """Which sequences of a minibatch go to which rank."""

    groups: list[Group]
    lengths: list[int]
    """Tokens of each sequence, group by group, prompt included."""
    ranks: list[list[Microbatch]]
    """[data-parallel size][same count on every rank], with indices into `lengths`."""
    temperature: float = 1.0
    """Sampling temperature of the batch's stage."""


def plan_batch(
    groups: list[Group], stage: Config, dp_size: int, cost: SequenceCost = TOKENS
) -> list[MinibatchPlan]:
    """Plan each minibatch of these groups, without arrays. cost: see `BatchOrder`."""
    plans = []
    train, temperature = stage.train, stage.sampling.temperature
    for number in range(train.minibatches):
        # Every minibatch gets groups of all ages.
        members = groups[number :: train.minibatches]
        lengths = [length_of(group, scored) for group in members for scored in group.ordered]
        ranks = deal(lengths, budget_tokens=train.microbatch_tokens, dp_size=dp_size, cost=cost)
        plans.append(MinibatchPlan(members, lengths, ranks, temperature))
    return plans


Fill = Callable[[MinibatchPlan, AdvantageFunctions], list[MinibatchShare]]
"""Computes the share of each data-parallel rank of a planned minibatch."""


def fill_minibatch(
    plan: MinibatchPlan, advantage_functions: AdvantageFunctions
) -> list[MinibatchShare]:
    """Each rank's share, with token arrays, advantages and weights."""
    sequences = minibatch_sequences(plan.groups, advantage_functions)
    assert [len(sequence.token_ids) for sequence in sequences] == plan.lengths
    return [
        MinibatchShare(
            [[sequences[i] for i in microbatch] for microbatch in microbatches],
            groups=len(plan.groups),
            members=max(len(group.scored) for group in plan.groups),
            temperature=plan.temperature,
        )
        for microbatches in plan.ranks
    ]


@dataclasses.dataclass(frozen=True)
class BatchOrder:
    """A batch before its sequences are dealt to ranks. Its groups no longer change."""

    step: int
    groups: list[Group]
    """Groups sampled for this batch."""
    dropped: DroppedGroups
    """Counts since the previous batch."""
    replayed: Drawn
    stage: Config
    advantage_functions: AdvantageFunctions
    dp_size: int
    cost: SequenceCost
    """Ranks get equal shares of this cost."""
    metrics: dict[str, tuple[float, float, Reduce]]
    """name -> (sum, count, reduce)."""


def order_batch(
    step: int,
    groups: list[Group],
    *,
    replayed: Drawn = NOTHING,
    dropped: DroppedGroups,
    stage: Config,
    advantage_functions: AdvantageFunctions,
    dp_size: int,
    cost: SequenceCost = TOKENS,
    more: Sequence[Metric] = (),
) -> BatchOrder:
    """Collect the groups and metrics of a batch; `dropped` and `more` only add metrics.

    groups: sampled for this batch. replayed: counts in `queue/replayed_*` only. Replayed groups may
    have another sampling temperature, since importance ratios divide by their recorded logprobs.
    """
    metrics = MetricSet()
    metrics.add([*batch_metrics(step, groups, dropped), *replayed.metrics(step), *more])
    return BatchOrder(
        step, groups, dropped, replayed, stage, advantage_functions, dp_size, cost,
        metrics.entries(),
    )  # fmt: skip


def deal_batch(order: BatchOrder, fill: Fill = fill_minibatch) -> list[RankBatch]:
    """Each data-parallel rank's share of the batch.

    Raises InputError as `Drawn.load`, and for advantages or weights that are not finite.
    """
    groups = [*order.groups, *order.replayed.load()]
    plans = plan_batch(groups, order.stage, order.dp_size, order.cost)
    filled = [fill(plan, order.advantage_functions) for plan in plans]
    return [
        RankBatch(order.step, rank, list(minibatches), order.metrics if rank == 0 else {})
        for rank, minibatches in enumerate(zip(*filled, strict=True))
    ]


def minibatch_sequences(
    groups: Sequence[Group], advantage_functions: AdvantageFunctions
) -> list[TrainSequence]:
    """Sequences of a minibatch with their advantages and weights, group by group."""
    sequences = [[sequence_of(group, scored) for scored in group.ordered] for group in groups]
    views = [_view(group, mine) for group, mine in zip(groups, sequences, strict=True)]
    weights = advantage_functions.weights(views)
    advantages = compute_advantages(groups, views, advantage_functions)
    return [
        msgspec.structs.replace(
            sequence,
            advantage=advantages.whole.get((number, member), 0.0),
            turn_advantages=advantages.by_turn.get((number, member), sequence.turn_advantages),
            weight=float(weights[number][member]),
            group=number,
            member=member,
        )
        for number, mine in enumerate(sequences)
        for member, sequence in enumerate(mine)
    ]


class Advantages(NamedTuple):
    """Normalized advantages of a minibatch, by (group, member)."""

    whole: dict[tuple[int, int], float]
    """Of completions."""
    by_turn: dict[tuple[int, int], np.ndarray]
    """[target tokens] float32 of completions in groups whose replies are rewarded."""


def compute_advantages(
    groups: Sequence[Group], views: Sequence[GroupView], advantage_functions: AdvantageFunctions
) -> Advantages:
    """Estimate the advantages of all completions or their replies, and normalize them together.

    A reply's reward is its return. The estimator compares it with the replies at the same turn
    index of the members that got so far. Normalization is over all of the minibatch, whatever the
    turn index: who reaches a turn depends on the policy.
    """
    returns = [group.turn_returns for group in groups]
    estimates = [
        _estimate_turns(view, mine, advantage_functions)
        if mine
        else ([(n, _WHOLE) for n in range(len(view.rewards))], advantage_functions.estimate(view))
        for view, mine in zip(views, returns, strict=True)
    ]
    normalized = advantage_functions.normalize([found for _, found in estimates])
    values = {
        (number, *place): float(value)
        for number, ((places, _), found) in enumerate(zip(estimates, normalized, strict=True))
        for place, value in zip(places, found, strict=True)
    }
    return Advantages(
        {place[:2]: value for place, value in values.items() if place[2] == _WHOLE},
        {
            (number, member): np.concatenate(
                [np.full(r.tokens, values[number, member, r.number], np.float32) for r in replies]
            )
            for number, mine in enumerate(returns)
            for member, replies in enumerate(mine)
        },
    )


def _estimate_turns(
    view: GroupView, returns: list[list[TurnReturn]], advantage_functions: AdvantageFunctions
) -> tuple[list[tuple[int, int]], np.ndarray]:
    """((member, number of the reply) of each reply of a group, [replies] float64)."""
    places, estimates = [], []
    for turn in sorted({one.number for mine in returns for one in mine}):
        found = [(m, one) for m, mine in enumerate(returns) for one in mine if one.number == turn]
        members = [m for m, _ in found]
        reached = dataclasses.replace(
            view,
            rewards=np.array([one.value for _, one in found]),
            is_correct=view.is_correct[members],
            is_well_formed=view.is_well_formed[members],
            lengths=np.array([one.tokens for _, one in found], np.int64),
            classes=view.classes[members] if len(view.classes) else view.classes,
        )
        places += [(member, turn) for member in members]
        # Nothing to compare with: the reply is neither better nor worse.
        is_alone = len(members) == 1
        estimates.append(np.zeros(1) if is_alone else advantage_functions.estimate(reached))
    return places, np.concatenate(estimates)


def _view(group: Group, sequences: Sequence[TrainSequence]) -> GroupView:
    scores = [scored.score for scored in group.ordered]
    return GroupView(
        group.prompt.id,
        rewards=np.array(group.rewards, dtype=np.float64),
        is_correct=np.array([score.is_correct for score in scores], dtype=bool),
        is_well_formed=np.array([score.is_well_formed for score in scores], dtype=bool),
        lengths=np.array([len(s.generator_logprobs) for s in sequences], dtype=np.int64),
        classes=np.array([group.classes[i] for i in sorted(group.classes)], dtype=np.int64),
    )


def batch_metrics(step: int, groups: list[Group], dropped: DroppedGroups) -> list[Metric]:
    """Metrics of a batch.

    rollout/* covers the groups of the batch and the groups dropped since the last batch, so each
    scored rollout counts once; the batch alone would hide that prompts become solved. queue/*
    covers the groups sampled for the batch, and counts dropped groups and completions by reason.
    """
    trained = [scored for group in groups for scored in group.ordered]
    generated = RolloutTally()
    for group in groups:
        generated.add(group.ordered, group.prompt.task)
    generated.fold(dropped.tally)
    spanning = sum(
        scored.rollout.oldest_version != scored.rollout.newest_version for scored in trained
    )
    staleness = [step - scored.rollout.oldest_version for scored in trained]
    count = len(trained)
    learning_gold = sum(group.learns_gold for group in groups)
    dropped_groups = {ZERO_VARIANCE: 0} | dropped.reasons
    counts = [
        ("queue/rollouts_spanning_versions", spanning, count),
        ("queue/rollouts_trained", count, count),
        ("queue/groups_trained", len(groups), len(groups)),
        *([("queue/groups_learning_gold", learning_gold, len(groups))] if learning_gold else []),
        *((GROUPS_DROPPED + why, n, n) for why, n in dropped_groups.items()),
        *((COMPLETIONS_DROPPED + why, n, n) for why, n in dropped.completions.items()),
    ]
    return [
        *generated.metrics(),
        Metric("queue/staleness_versions_mean", sum(staleness), "mean", count),
        Metric("queue/staleness_versions_max", max(staleness, default=0), "max", count),
        *(Metric(name, value, "sum", of) for name, value, of in counts),
    ]


def sequence_of(group: Group, scored: ScoredRollout) -> TrainSequence:
    """The train sequence of a completion, without advantage, weight and place in the batch."""
    sequence = _as_sampled(group, scored)
    gold = _gold_of(group, scored)
    return sequence if gold is None else _with_gold(sequence, gold)


def length_of(group: Group, scored: ScoredRollout) -> int:
    """Tokens of the train sequence of a completion, prompt included."""
    gold = _gold_of(group, scored)
    completion = len(scored.rollout.token_ids)
    if gold is not None:
        completion = gold.thought_tokens + len(gold.token_ids)
    return len(scored.rollout.prompt_ids) + completion


def _gold_of(group: Group, scored: ScoredRollout) -> GoldAnswer | None:
    """The reference answer that replaces the sampled answer, if any."""
    return scored.rollout.gold if group.learns_gold and has_gold(scored) else None


def _as_sampled(group: Group, scored: ScoredRollout) -> TrainSequence:
    rollout = scored.rollout
    logprobs, given = rollout.logprobs, given_ranges(rollout.spans)
    if given:
        logprobs = np.concatenate([logprobs[span.start : span.end] for span in rollout.spans])
    return TrainSequence(
        token_ids=np.concatenate([rollout.prompt_ids, rollout.token_ids]),
        prompt_length=len(rollout.prompt_ids),
        generator_logprobs=logprobs,
        version_runs=[(span.version, span.end - span.start) for span in rollout.spans],
        given=given,
        row_starts=rollout.row_starts,
        advantage=0.0,
        weight=0.0,
        reward=scored.score.reward,
        expert_choices=rollout.expert_choices,
        # As recorded, if this run sampled it.
        rollout=(-1, 0) if group.opened_version == NO_VERSION else (group.number, rollout.index),
    )


def _first_runs(runs: Sequence[tuple[int, int]], tokens: int) -> Iterator[tuple[int, int]]:
    """The runs of versions of the first tokens."""
    for version, count in runs:
        if (taken := min(count, tokens)) > 0:
            yield version, taken
        tokens -= taken


def _with_gold(sequence: TrainSequence, gold: GoldAnswer) -> TrainSequence:
    """Replace the sampled answer and all later tokens by the reference answer."""
    kept, count = gold.thought_tokens, len(gold.token_ids)
    nothing = np.zeros(count, np.float32)
    return msgspec.structs.replace(
        sequence,
        token_ids=np.concatenate(
            [sequence.token_ids[: sequence.prompt_length + kept], gold.token_ids]
        ),
        generator_logprobs=np.concatenate([sequence.generator_logprobs[:kept], nothing]),
        version_runs=[*_first_runs(sequence.version_runs, kept), (NO_VERSION, count)],
        gold_tokens=count,
    )
