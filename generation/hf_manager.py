"""transformers' continuous batching: its settings, and how it draws tokens.

Used by `hf_engine.py`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager

from generation.engine import EngineSetup
from generation.hf_requests import Request

PAGE_TOKENS = 32
PREFILL_TOKENS = 512
"""Fewest tokens that one forward pass may process."""
NOT_ONE = 2.0
"""A default other than 1 makes transformers create the processor for per-request temperatures."""


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


def seeded_generator(seed: int) -> torch.Generator:
    """A separate stream of random numbers."""
    generator = torch.Generator(torch.get_default_device())
    generator.manual_seed(seed)
    return generator


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
