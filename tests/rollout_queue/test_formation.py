"""A batch is dealt among data-parallel ranks as `train.packing` says."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from megatron_rl.config.tree import Config
from megatron_rl.protocol.packing import deal
from megatron_rl.protocol.sequence_cost import TOKENS, find_cost
from megatron_rl.protocol.types import Lease, Rollout, WeightsSynced
from megatron_rl.rollout_queue.batches import deal_batch, plan_batch
from megatron_rl.rollout_queue.coordinator import BATCHES
from tests.rollout_queue.makers import form_batch, make_group, make_rollout, make_score
from tests.rollout_queue.played_queue import PlayedQueue
from tests.tiny_models import write_model

BUDGET, RANKS = 4096, 2


class OfManyLengths(PlayedQueue):
    """Whose completions have 10 to 3,000 tokens."""

    made = 0

    def _rollout(self, lease: Lease, index: int) -> Rollout:
        self.made += 1
        text = f"{lease.prompt.id}/{index}"
        tokens = 10 + self.made * 7919 % 2990
        rollout = make_rollout(index, lease_id=lease.lease_id, tokens=tokens, text=text)
        return msgspec.structs.replace(rollout, token_ids=np.zeros(tokens, np.int32))


@pytest.mark.parametrize("packing", ["tokens", "flops"])
def test_sequences_are_dealt_by_what_they_cost(tmp_path: Path, packing: str) -> None:
    write_model(tmp_path / "model")
    queue = OfManyLengths(
        tmp_path,
        lambda prompt, index: make_score(float(index % 2)),
        train={"packing": packing, "microbatch_tokens": BUDGET, "prompts_per_batch": 4},
        model={"path": tmp_path / "model"},
        generator={"context_tokens": 4096},
        sampling={"max_new_tokens": 3000},
    )
    # No trainer asks for the batch, which is formed here.
    queue.serve()
    queue.coordinator.handle(BATCHES, "t", WeightsSynced(0), queue.now)
    queue.play(12)
    order = queue.coordinator._builder.build(0, RANKS)
    assert order is not None
    [plan] = plan_batch(order.groups, order.stage, order.dp_size, order.cost)
    assert len(plan.lengths) == 16

    by_tokens, expected = (
        deal(plan.lengths, budget_tokens=BUDGET, dp_size=RANKS, cost=cost)
        for cost in (TOKENS, find_cost(packing, tmp_path / "model"))
    )
    assert plan.ranks == expected
    dealt = [
        [[len(sequence.token_ids) for sequence in sequences] for sequences in share.microbatches]
        for rank in deal_batch(order)
        for share in rank.minibatches
    ]
    assert dealt == [[[plan.lengths[i] for i in m] for m in rank] for rank in expected]
    assert (expected == by_tokens) == (packing == "tokens"), "these lengths would show nothing"


def test_a_minibatch_has_places_for_its_largest_group(tmp_path: Path) -> None:
    stage = Config.model_validate({"run": {"dir": tmp_path}})
    [rank] = form_batch(0, [make_group(0, [0.0, 1.0]), make_group(1, [0.0, 1.0, 0.0])], stage)
    assert [(one.groups, one.members) for one in rank.minibatches] == [(2, 3)]
