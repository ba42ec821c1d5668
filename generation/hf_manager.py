"""transformers' continuous batching: its settings, its requests, and how it draws tokens.

Used by `hf_engine.py`.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager

from generation.engine import EngineSetup
from megatron_rl.protocol.types import Sampling

Decode = Callable[[list[int]], str]
_SPECIAL_TOKENS = 4
"""Tokens without text that may be among the tokens of a stop string."""
PAGE_TOKENS = 32
PREFILL_TOKENS = 512
"""Fewest tokens that one forward pass may process."""
NOT_ONE = 2.0
"""A default other than 1 makes transformers create the processor for per-request temperatures."""


@dataclass(slots=True)
class Request:
    """One completion in flight."""

    index: int
    results: asyncio.Queue[Any]
    stop: tuple[str, ...] = ()
    """Strings that end it."""
    cuts: list[tuple[int, int]] = field(default_factory=list)
    """(version replaced, tokens sampled by then) of each weight sync since it began."""
    is_stale: bool = False
    """A weight sync came between the beginning and the end of its prompt."""
    generator: torch.Generator | None = None
    """Draws its tokens; None: the process's stream."""

    def ends_at_text(self, token_ids: list[int], decode: Decode | None) -> bool:
        """Whether the last token completes a stop string."""
        if not self.stop or not token_ids:
            return False
        assert decode is not None, "generate() has refused the request"
        # A token with text has at least one byte.
        tail = max(len(text.encode()) for text in self.stop) + _SPECIAL_TOKENS
        text = decode(token_ids[-tail:])
        return any(stop in text for stop in self.stop)


def first_token_at(timestamps: list[float] | None, tokens: int) -> float:
    """Time of the first token by time.monotonic(); -1 when transformers forgot it.

    timestamps: of the tokens by time.perf_counter(). An evicted and restarted request has
    timestamps of its later tokens alone.
    """
    if timestamps is None or len(timestamps) != tokens:
        return -1.0
    return time.monotonic() - (time.perf_counter() - timestamps[0])


def one_by_one(sampling: Sampling, indices: list[int]) -> list[tuple[Sampling, list[int]]]:
    """A request for each completion, with its seed if there are seeds."""
    seeds = sampling.draw_seeds or (None,) * len(indices)
    return [
        (msgspec.structs.replace(sampling, draw_seeds=() if seed is None else (seed,)), [index])
        for index, seed in zip(indices, seeds, strict=True)
    ]


def open_manager(
    model: PreTrainedModel, setup: EngineSetup, requests: Mapping[str, Request]
) -> ContinuousBatchingManager:
    """The manager of a model's completions, not started.

    requests: those in flight, by transformers' name. setup.is_deterministic: a forward pass has one
    of them, because rows of a product round otherwise with other numbers of rows.
    """
    generation = GenerationConfig(
        do_sample=True,
        temperature=NOT_ONE,
        top_k=0,
        top_p=1.0,
        eos_token_id=list(setup.stop_ids) or -1,
        pad_token_id=0,
    )
    batching = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=-(-setup.kv_tokens // PAGE_TOKENS),
        max_batch_tokens=max(PREFILL_TOKENS, setup.max_running),
        max_requests_per_batch=1 if setup.is_deterministic else setup.max_running,
        # No prefix is shared between requests, so none of older weights either.
        allow_block_sharing=False,
        # The pause is exact only when no further pass is in flight.
        use_async_batching=False,
        use_cuda_graph=False,
        return_logprobs=True,
        per_request_processors=True,
        seed=setup.seed,
    )
    manager = model.init_continuous_batching(
        generation_config=generation, continuous_batching_config=batching
    )
    if setup.is_deterministic:
        _draw_by_request(manager, requests)
    return manager


def _draw_by_request(manager: ContinuousBatchingManager, requests: Mapping[str, Request]) -> None:
    """Let the generator of each request draw its tokens. Call before it starts.

    requests: by transformers' name. transformers 5 draws all rows from the process's stream.
    """
    create = manager._create_batch_processor

    def create_drawing() -> Any:
        processor = create()
        batch = processor.inputs_and_outputs

        def sample(scores: torch.Tensor, output_ids: torch.Tensor) -> None:
            probs = scores[0].softmax(-1)
            names = [one.state.request_id for one in batch.requests_in_batch if one.has_new_token]
            # A request that was given up is in no table.
            owners = [requests.get(name) for name in names]
            streams = [None if owner is None else owner.generator for owner in owners]
            rows = zip(probs, streams, strict=True)
            tokens = torch.cat([torch.multinomial(row, 1, generator=own) for row, own in rows])
            logprobs = probs.gather(1, tokens[:, None])[:, 0].log()
            output_ids[0, : len(names)].copy_(tokens)
            # As transformers' own `_sample`: the bits of a float in an integer's place.
            output_ids[1, : len(names)].copy_(logprobs.view(torch.int32))

        processor.model_runner._sample = sample
        return processor

    manager._create_batch_processor = create_drawing
