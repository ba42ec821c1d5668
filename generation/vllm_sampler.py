"""A sampler for vLLM that returns logprobs as the contract of engines defines them.

Imported in the vLLM process. vLLM's logprobs are those of softmax(logits) at any temperature, or
those after top_p. The contract is softmax(logits / temperature), or softmax(logits) if greedy.
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.sampler import Sampler

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.sample.metadata import SamplingMetadata

GREEDY_BELOW = 1e-5
"""vLLM treats lower temperatures as 0."""


class TemperedSampler(Sampler):
    """vLLM's sampler with logprobs at the temperature."""

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
    """[rows] divisors of the logits; None: all are 1.

    temperatures: None: all rows are greedy.
    """
    if temperatures is None:
        return None
    divisors = torch.where(temperatures < GREEDY_BELOW, 1.0, temperatures)
    return None if bool((divisors == 1.0).all()) else divisors


def install(core: "EngineCore") -> None:
    """Put the sampler into the core's only rank."""
    runner = core.model_executor.driver_worker.worker.model_runner
    runner.sampler = TemperedSampler(logprobs_mode="raw_logprobs")
