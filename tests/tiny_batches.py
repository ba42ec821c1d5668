"""One small minibatch, and each data-parallel rank's share of it; for tests of the trainer."""

import numpy as np
from megatron.core import parallel_state

from megatron_rl.protocol.packing import deal
from megatron_rl.protocol.types import MinibatchShare, TrainSequence

VOCAB = 200
GROUPS, MEMBERS = 3, 3
GIVEN = {3: [(5, 9), (12, 14)], 5: [(4, 6)]}
"""Sequence -> its given ranges: these two are conversations."""


def make_sequences(
    seed: int = 11, *, has_groups: bool = False, has_gold: bool = False
) -> list[TrainSequence]:
    """Nine of different lengths. has_groups: prompts of the same length are the same. has_gold: the
    last tokens of the first two groups are of reference answers, but for completions of one token.
    """
    rng = np.random.default_rng(seed)
    lengths = [(5, 9), (3, 4), (7, 1), (4, 20), (6, 2), (2, 13), (5, 5), (3, 8), (1, 3)]
    targets = [
        completion - sum(end - start for start, end in GIVEN.get(number, []))
        for number, (_, completion) in enumerate(lengths)
    ]
    sequences = [
        TrainSequence(
            token_ids=rng.integers(0, VOCAB, prompt + completion).astype(np.int32),
            prompt_length=prompt,
            generator_logprobs=rng.normal(-5, 0.3, targets[number]).astype(np.float32),
            version_runs=[(0, targets[number])],
            advantage=float(rng.normal()),
            weight=1 / sum(targets),
            reward=float(number % 2),
            group=number // MEMBERS,
            member=number % MEMBERS,
            given=GIVEN.get(number, []),
            gold_tokens=min(3, completion - 1) if has_gold and number < 2 * MEMBERS else 0,
        )
        for number, (prompt, completion) in enumerate(lengths)
    ]
    if has_groups:
        prompts = {s.prompt_length: s.token_ids[: s.prompt_length].copy() for s in sequences}
        for sequence in sequences:
            sequence.token_ids[: sequence.prompt_length] = prompts[sequence.prompt_length]
    return sequences


def my_share(
    budget_tokens: int,
    seed: int = 11,
    *,
    has_groups: bool = False,
    has_gold: bool = False,
    temperature: float = 1.0,
) -> MinibatchShare:
    """This data-parallel rank's part of the same minibatch."""
    sequences = make_sequences(seed, has_groups=has_groups, has_gold=has_gold)
    dp_size = parallel_state.get_data_parallel_world_size()
    lengths = [len(sequence.token_ids) for sequence in sequences]
    dealt = deal(lengths, budget_tokens=budget_tokens, dp_size=dp_size)
    mine = dealt[parallel_state.get_data_parallel_rank()]
    microbatches = [[sequences[i] for i in microbatch] for microbatch in mine]
    return MinibatchShare(microbatches, groups=GROUPS, members=MEMBERS, temperature=temperature)
