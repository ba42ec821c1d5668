"""Logprobs as the contract of engines wants them, out of vLLM's sampler.

Imported in the vLLM process. vLLM tells logprobs either of softmax(logits), whatever the
temperature, or of what top_p leaves; the contract is softmax(logits / temperature), or
softmax(logits) of a greedy one.
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.sampler import Sampler

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.sample.metadata import SamplingMetadata

GREEDY_BELOW = 1e-5
"""vLLM takes lower temperatures for 0."""


class TemperedSampler(Sampler):
    """vLLM's sampler; its logprobs are those of the temperature."""

    def forward(
        self, logits: torch.Tensor, sampling_metadata: "SamplingMetadata", **options: Any
    ) -> SamplerOutput:
        """logits: [rows, vocabulary]."""
        divisors = tempered_divisors(sampling_metadata.temperature)
        if divisors is None or sampling_metadata.max_num_logprobs is None:
            return super().forward(logits, sampling_metadata, **options)
        # Before vLLM's own, which divides the logits in place.
        logprobs = (logits.float() / divisors.unsqueeze(1)).log_softmax(-1)
        output = super().forward(logits, sampling_metadata, **options)
        output.logprobs_tensors = self.gather_logprobs(
            logprobs,
            sampling_metadata.max_num_logprobs,
            token_ids=output.sampled_token_ids.squeeze(-1).long(),
        )
        return output


def tempered_divisors(temperatures: torch.Tensor | None) -> torch.Tensor | None:
    """[rows] what to divide logits by; None where that would be 1 for all.

    temperatures: None when all are greedy.
    """
    if temperatures is None:
        return None
    divisors = torch.where(temperatures < GREEDY_BELOW, 1.0, temperatures)
    return None if bool((divisors == 1.0).all()) else divisors


def install(core: "EngineCore") -> None:
    """Put the sampler into the core's only rank."""
    runner = core.model_executor.driver_worker.worker.model_runner
    runner.sampler = TemperedSampler(logprobs_mode="raw_logprobs")
