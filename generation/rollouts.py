"""Generates the completions of leases, one for each index. Used by the generator."""

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import NamedTuple

import numpy as np

from generation.engine import Completion, Engine
from generation.gold_answers import find_gold
from generation.health import Activity, EngineHealth
from megatron_rl.config.algorithm import GoldConfig
from megatron_rl.protocol.render import Renderer
from megatron_rl.protocol.rollout import narrow_choices
from megatron_rl.protocol.types import GoldAnswer, Lease, Rollout

RENDERED_PROMPTS = 256


class Work(NamedTuple):
    """What generates, and what counts it."""

    engine: Engine
    renderer: Renderer
    health: EngineHealth
    activity: Activity


class Completions:
    """Completions of prompts without an environment."""

    def __init__(self, work: Work, gold: GoldConfig | None) -> None:
        """gold: find the place of the reference answer in completions."""
        self._engine, self._renderer, self._health, self._activity = work
        self._gold = gold
        self._rendered: dict[tuple[str, str, int], list[int]] = {}
        """(prompt, task, length limit) -> ids, in order of last use."""

    async def rollouts(self, lease: Lease) -> AsyncIterator[Rollout]:
        """The rollouts of a lease, as each finishes. Raises RenderError, EngineError."""
        began_at, waiting = time.monotonic(), len(lease.indices)
        self._activity.change(began_at, waiting)
        try:
            prompt_ids = self._render(lease)
            answers = self._engine.generate(prompt_ids, lease.sampling, lease.indices)
            async with aclosing(answers):
                async for completion in answers:
                    waiting -= 1
                    self._health.note_progress()
                    self._activity.change(time.monotonic(), -1, len(completion.token_ids))
                    yield self._make_rollout(lease, prompt_ids, completion, began_at)
        finally:
            self._activity.change(time.monotonic(), -waiting)

    def _render(self, lease: Lease) -> list[int]:
        """Token ids of the prompt, cached: a group has many leases, and tokenizing blocks."""
        limit = lease.sampling.max_new_tokens
        key = (lease.prompt.id, lease.prompt.task, limit)
        if (ids := self._rendered.pop(key, None)) is None:
            prompt = lease.prompt
            ids = self._renderer.render(
                prompt.messages, limit, task=prompt.task, is_program=prompt.is_program
            )
        self._rendered[key] = ids
        if len(self._rendered) > RENDERED_PROMPTS:
            del self._rendered[next(iter(self._rendered))]
        return ids

    def _make_rollout(
        self, lease: Lease, prompt_ids: list[int], completion: Completion, began_at: float
    ) -> Rollout:
        """began_at: monotonic seconds of the lease's arrival."""
        first_at, renderer = completion.first_token_at, self._renderer
        text = renderer.decode(completion.token_ids)
        found: GoldAnswer | None = None
        if self._gold is not None:
            found = find_gold(
                completion.token_ids, text, answer=lease.prompt.answer, cfg=self._gold,
                renderer=renderer, room_tokens=renderer.context_tokens - len(prompt_ids),
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
