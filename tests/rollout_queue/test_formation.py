"""A batch is dealt among data-parallel ranks as `train.packing` says."""

from pathlib import Path

import pytest

from megatron_rl.protocol.packing import deal
from megatron_rl.protocol.sequence_cost import TOKENS, find_cost
from megatron_rl.protocol.types import Lease, Published, Rollout
from megatron_rl.rollout_queue.batches import MinibatchPlan, fill_minibatch
from megatron_rl.rollout_queue.coordinator import BATCHES
from tests.rollout_queue.makers import make_rollout, make_score
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
        return make_rollout(index, lease_id=lease.lease_id, tokens=tokens, text=text)


@pytest.mark.parametrize("packing", ["tokens", "flops"])
def test_sequences_are_dealt_by_what_they_cost(tmp_path: Path, packing: str) -> None:
    write_model(tmp_path / "model")
    queue = OfManyLengths(
        tmp_path,
        lambda prompt, index: make_score(float(index % 2)),
        train={"packing": packing, "microbatch_tokens": BUDGET, "groups_per_batch": 4},
        model={"path": tmp_path / "model"},
        generator={"context_tokens": 4096},
        sampling={"max_new_tokens": 3000},
    )
    formation = queue.coordinator._formation
    plans: list[MinibatchPlan] = []
    formation._fill = lambda plan, crediting: plans.append(plan) or fill_minibatch(plan, crediting)
    # No trainer asks for the batch, which is formed here.
    queue.serve()
    queue.coordinator.handle(BATCHES, "t", Published(0), queue.now)
    queue.play(12)
    assert formation.form(0, RANKS) is not None
    [plan] = plans
    assert len(plan.lengths) == 16

    by_tokens, expected = (
        deal(plan.lengths, budget_tokens=BUDGET, dp_size=RANKS, cost=cost)
        for cost in (TOKENS, find_cost(packing, tmp_path / "model"))
    )
    assert plan.ranks == expected
    assert (expected == by_tokens) == (packing == "tokens"), "these lengths would show nothing"
