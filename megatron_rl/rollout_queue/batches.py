"""Forms the batch of a step from complete groups: advantages, weights, packing, metrics. Pure.

Used by the rollout queue.
"""

from collections.abc import Sequence

import numpy as np

from megatron_rl.algorithms.credit import GroupView
from megatron_rl.algorithms.minibatch import Crediting
from megatron_rl.config.tree import TrainConfig
from megatron_rl.protocol.metrics import COMPLETIONS_DROPPED, GROUPS_DROPPED, Metric, MetricSet
from megatron_rl.protocol.packing import deal
from megatron_rl.protocol.types import (
    MinibatchShare,
    RankBatch,
    ScoredRollout,
    TrainSequence,
)  # fmt: skip
from megatron_rl.rollout_queue.groups import FLAT, DroppedGroups, Group
from megatron_rl.rollout_queue.tally import RolloutTally


def form_batch(
    step: int,
    groups: list[Group],
    *,
    dropped: DroppedGroups,
    config: TrainConfig,
    crediting: Crediting,
    dp_size: int,
) -> list[RankBatch]:
    """Each data-parallel rank's share of the batch; `dropped` only enters the metrics."""
    ranks: list[list[MinibatchShare]] = [[] for _ in range(dp_size)]
    for number in range(config.minibatches):
        # Every minibatch gets groups of all ages.
        members = groups[number :: config.minibatches]
        sequences = minibatch_sequences(members, crediting)
        dealt = deal(
            [len(sequence.token_ids) for sequence in sequences],
            budget_tokens=config.microbatch_tokens,
            dp_size=dp_size,
        )
        for rank, microbatches in enumerate(dealt):
            ranks[rank].append(
                MinibatchShare(
                    [[sequences[i] for i in microbatch] for microbatch in microbatches],
                    groups=len(members),
                    members=max(len(group.scored) for group in members),
                )
            )
    metrics = MetricSet()
    metrics.add(batch_metrics(step, groups, dropped))
    return [
        RankBatch(step, rank, minibatches, metrics.entries() if rank == 0 else {})
        for rank, minibatches in enumerate(ranks)
    ]


def minibatch_sequences(groups: Sequence[Group], crediting: Crediting) -> list[TrainSequence]:
    """Sequences of a minibatch with their advantages and weights, group by group."""
    views = [_view(group) for group in groups]
    advantages, weights = crediting.advantages(views), crediting.weights(views)
    return [
        _to_sequence(scored, advantages[number][member], weights[number][member], number, member)
        for number, group in enumerate(groups)
        for member, scored in enumerate(group.ordered)
    ]


def _view(group: Group) -> GroupView:
    scored = group.ordered
    return GroupView(
        group.prompt.id,
        rewards=np.array(group.rewards, dtype=np.float64),
        is_correct=np.array([s.score.is_correct for s in scored], dtype=bool),
        lengths=np.array([len(s.rollout.token_ids) for s in scored], dtype=np.int64),
    )


def _to_sequence(
    scored: ScoredRollout, advantage: float, weight: float, group: int, member: int
) -> TrainSequence:
    rollout = scored.rollout
    lengths = [span.end - span.start for span in rollout.spans]
    versions = np.repeat([span.version for span in rollout.spans], lengths)
    return TrainSequence(
        token_ids=np.concatenate([rollout.prompt_ids, rollout.token_ids]),
        prompt_length=len(rollout.prompt_ids),
        generator_logprobs=rollout.logprobs,
        token_versions=versions.astype(np.int32),
        advantage=float(advantage),
        weight=float(weight),
        reward=scored.score.reward,
        group=group,
        member=member,
        expert_choices=rollout.expert_choices,
    )


def batch_metrics(step: int, groups: list[Group], dropped: DroppedGroups) -> list[Metric]:
    """Metrics of a batch as it is consumed.

    rollout/*: over the groups of the batch and those dropped since the last batch, so that each
    scored rollout counts once: the batch alone would hide that prompts become solved.
    queue/*: over what is trained on, and by reason dropped groups, and completions that could not
    be graded, which are in no other number.
    """
    trained = [scored for group in groups for scored in group.ordered]
    generated = RolloutTally(trained)
    generated.fold(dropped.tally)
    spanning = sum(map(_spans_versions, trained))
    staleness = [step - scored.rollout.oldest_version for scored in trained]
    count = len(trained)
    dropped_by_reason = {FLAT: 0} | dropped.reasons
    return [
        *generated.metrics(),
        Metric("queue/staleness_versions_mean", sum(staleness), "mean", count),
        Metric("queue/staleness_versions_max", max(staleness), "max", count),
        Metric("queue/rollouts_spanning_versions", spanning, "sum", count),
        Metric("queue/rollouts_trained", count, "sum", count),
        Metric("queue/groups_trained", len(groups), "sum", len(groups)),
        *(
            Metric(f"{GROUPS_DROPPED}{reason}", number, "sum", number)
            for reason, number in dropped_by_reason.items()
        ),
        *(
            Metric(f"{COMPLETIONS_DROPPED}{reason}", number, "sum", number)
            for reason, number in dropped.completions.items()
        ),
    ]


def _spans_versions(scored: ScoredRollout) -> bool:
    return scored.rollout.oldest_version != scored.rollout.newest_version
