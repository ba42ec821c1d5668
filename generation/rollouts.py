"""Makes the rollout of a finished completion. Pure; used by the generator."""

import numpy as np

from generation.engine import Completion
from generation.gold_answers import find_gold
from megatron_rl.config.algorithm import GoldConfig
from megatron_rl.protocol.expert_choices import narrow_choices
from megatron_rl.protocol.render import Renderer
from megatron_rl.protocol.types import GoldAnswer, Lease, Rollout


def make_rollout(
    lease: Lease, prompt_ids: list[int], completion: Completion, *,
    renderer: Renderer, gold: GoldConfig | None, began_at: float,
) -> Rollout:  # fmt: skip
    """The rollout. began_at: monotonic seconds of the lease's arrival."""
    first_at = completion.first_token_at
    text = renderer.decode(completion.token_ids)
    found: GoldAnswer | None = None
    if gold is not None:
        found = find_gold(
            completion.token_ids, text, answer=lease.prompt.answer, cfg=gold, renderer=renderer,
            room_tokens=renderer.context_tokens - len(prompt_ids),
        )  # fmt: skip
    return Rollout(
        lease_id=lease.lease_id,
        index=completion.index,
        prompt_ids=np.array(prompt_ids, dtype=np.int32),
        token_ids=np.array(completion.token_ids, dtype=np.int32),
        logprobs=np.array(completion.logprobs, dtype=np.float32),
        spans=completion.spans,
        finish_reason=completion.finish_reason,
        text=text,
        expert_choices=narrow_choices(np.frombuffer(completion.expert_choices, dtype=np.int32)),
        prompt_tail=renderer.tail(prompt_ids),
        first_token_s=first_at - began_at if first_at >= 0 else -1.0,
        gold=found,
    )
