"""Sampling of tokens by inverting the cumulative distribution, for SGLang on the CPU.

Imported by SGLang's scheduler processes. torch.multinomial takes 97 ms for 64 rows of 49152
probabilities on one core, `sample` 5 ms; and where nothing but the temperature shapes a
distribution, a loop in C++ draws from the logits and tells the logprobs in 2 ms, with neither
probabilities nor a table of logprobs. A request with a seed draws by its own uniform numbers.
"""

from types import ModuleType
from typing import Any

import torch
from seeded_draws import uniforms

from megatron_rl.backend.cpu.kernels import engine_loops


def sample(probs: torch.Tensor, uniform: torch.Tensor | None = None) -> torch.Tensor:
    """[rows] int64 index drawn from each row of probs, [rows, vocabulary].

    The rows need not be normalised. The threshold lies in (0, total], so an index of probability 0
    is never drawn. uniform: [rows] in (0, 1]; None: from torch's stream.
    """
    cumulative = probs.cumsum(-1)
    if uniform is None:
        # torch.rand is in [0, 1): a threshold of 0 would pick index 0 even at probability 0.
        uniform = 1.0 - torch.rand(probs.shape[0], 1, dtype=probs.dtype, device=probs.device)
    # The last sum, not 1: rounding leaves it a little off, and rows need not be normalised.
    threshold = uniform.reshape(-1, 1).to(probs.dtype) * cumulative[:, -1:]
    # A tiny uniform may underflow to a threshold of 0.
    threshold.clamp_min_(torch.finfo(probs.dtype).tiny)
    return torch.searchsorted(cumulative, threshold).squeeze(-1)


def install(sampler: ModuleType) -> None:
    """Replace the sampling of `sglang.srt.layers.sampler`."""

    def sampling_from_probs_torch(
        probs: torch.Tensor,
        sampling_seed: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return sample(probs, _uniforms(sampling_seed, positions)).to(torch.int32)

    def multinomial_with_seed(
        logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        return sample(logprobs.exp(), uniforms(seed, positions)).unsqueeze(1)

    # SGLang's own needs a kernel that the CPU build lacks.
    sampler.multinomial_with_seed = multinomial_with_seed
    sampler.sampling_from_probs_torch = sampling_from_probs_torch
    if hasattr(sampler, "Sampler"):
        _install_draw(sampler)


def _install_draw(sampler: ModuleType) -> None:
    """Let `Sampler` draw from logits where the temperature alone shapes the distribution."""
    forward = sampler.Sampler.forward
    tells_original = sampler.SGLANG_RETURN_ORIGINAL_LOGPROB

    def draw_or_forward(
        self: Any,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int] | None,
        token_ids_logprobs: list[list[int] | None] | None,
        positions: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        wants_more = any(top_logprobs_nums or ()) or any(
            ids is not None for ids in token_ids_logprobs or ()
        )
        if (
            options.get("logprob_logits") is not None
            or (return_logprob and (wants_more or tells_original))
            or self.enable_deterministic
            or self.use_log_softmax_logprob
            or not is_shaped_by_temperature(sampling_info)
            or not engine_loops.are_available()
        ):
            # The output layer may have left them in the dtype of its product.
            logits_output.next_token_logits = logits_output.next_token_logits.float()
            return forward(
                self, logits_output, sampling_info, return_logprob, top_logprobs_nums,
                token_ids_logprobs, positions, **options,
            )  # fmt: skip
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        uniform = _uniforms(sampling_info.sampling_seed, positions)
        tokens, logprobs = draw(logits, sampling_info.temperatures, uniform)
        if return_logprob:
            logits_output.next_token_logprobs = logprobs
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens

    sampler.Sampler.forward = draw_or_forward


def is_shaped_by_temperature(sampling_info: Any) -> bool:
    """Whether all requests sample from softmax(logits / temperature)."""
    return (
        not sampling_info.is_all_greedy
        and not sampling_info.need_top_p_sampling
        and not sampling_info.need_top_k_sampling
        and not sampling_info.need_min_p_sampling
        and sampling_info.sampling_mask_batch_indices is None
    )


def _uniforms(seeds: torch.Tensor | None, positions: torch.Tensor | None) -> torch.Tensor | None:
    if seeds is None:
        return None
    assert positions is not None, "SGLang passes the positions of all rows"
    return uniforms(seeds, positions)


def draw(
    logits: torch.Tensor, temperatures: torch.Tensor, uniform: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """([rows] int32 tokens, [rows] logprobs) of logits [rows, vocabulary].

    uniform: as in `sample`.
    """
    if uniform is None:
        uniform = 1.0 - torch.rand(logits.shape[0], dtype=torch.float64)
    tokens, logprobs = engine_loops.sample(
        logits, temperatures.reshape(-1).float().contiguous(), uniform
    )
    return tokens.to(torch.int32), logprobs
