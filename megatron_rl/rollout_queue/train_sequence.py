"""What is trained on of a scored rollout: itself, or its thoughts and the reference answer.

Used by the rollout queue. Pure.
"""

import msgspec
import numpy as np

from megatron_rl.protocol.types import GoldAnswer, ScoredRollout, TrainSequence
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.rollout_queue.selection import has_gold

NO_VERSION = -1
"""Of tokens that no policy of the run sampled."""


def sequence_of(group: Group, scored: ScoredRollout) -> TrainSequence:
    """The sequence of a completion of a group, without its advantage, weight and place."""
    sequence = _as_sampled(scored, _identity(group, scored))
    gold = _gold_of(group, scored)
    return sequence if gold is None else _with_gold(sequence, gold)


def length_of(group: Group, scored: ScoredRollout) -> int:
    """Tokens of that sequence, prompt included."""
    gold = _gold_of(group, scored)
    completion = len(scored.rollout.token_ids)
    if gold is not None:
        completion = gold.thought_tokens + len(gold.token_ids)
    return len(scored.rollout.prompt_ids) + completion


def _gold_of(group: Group, scored: ScoredRollout) -> GoldAnswer | None:
    """The reference answer that takes the place of the sampled one."""
    return scored.rollout.gold if group.learns_gold and has_gold(scored) else None


def _identity(group: Group, scored: ScoredRollout) -> tuple[int, int]:
    """As the run records it."""
    is_own = group.opened_version != NO_VERSION
    return (group.number, scored.rollout.index) if is_own else (-1, 0)


def _as_sampled(scored: ScoredRollout, identity: tuple[int, int]) -> TrainSequence:
    rollout = scored.rollout
    lengths = [span.end - span.start for span in rollout.spans]
    versions = np.repeat(np.array([span.version for span in rollout.spans], np.int32), lengths)
    return TrainSequence(
        token_ids=np.concatenate([rollout.prompt_ids, rollout.token_ids]),
        prompt_length=len(rollout.prompt_ids),
        generator_logprobs=rollout.logprobs,
        token_versions=versions,
        advantage=0.0,
        weight=0.0,
        reward=scored.score.reward,
        expert_choices=rollout.expert_choices,
        rollout=identity,
    )


def _with_gold(sequence: TrainSequence, gold: GoldAnswer) -> TrainSequence:
    """The sampled answer and what follows it make room for the reference answer."""
    kept, count = gold.thought_tokens, len(gold.token_ids)
    nothing = np.zeros(count, np.float32)
    unsampled = np.full(count, NO_VERSION, np.int32)
    return msgspec.structs.replace(
        sequence,
        token_ids=np.concatenate(
            [sequence.token_ids[: sequence.prompt_length + kept], gold.token_ids]
        ),
        generator_logprobs=np.concatenate([sequence.generator_logprobs[:kept], nothing]),
        token_versions=np.concatenate([sequence.token_versions[:kept], unsampled]),
        gold_tokens=count,
    )
