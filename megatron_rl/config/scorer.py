"""The section `[scorer]`: the engine that holds a frozen reference.

Imported by every process, as part of the configuration tree.
"""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from megatron_rl.config.section import Section


class ScorerConfig(Section):
    """The SGLang server that gives the reference's logprobs where `algorithm.reference.source` is
    "engine"; it has GPUs of its own, behind those of the generators."""

    tensor_parallel: PositiveInt = 1
    """Its ranks, on one node."""
    dtype: Literal["", "float32", "bfloat16"] = ""
    """Of its weights and computations; "": model.dtype."""
    quantization: str = ""
    """How SGLang keeps its weights, such as "fp8" (its option of that name); "" as they come."""
    max_running: PositiveInt = 32
    """Sequences in work at once; each data-parallel replica of the trainer has as many asked for.
    """
    kv_tokens: PositiveInt = 65_536
    """Tokens that its KV cache holds; above generator.context_tokens."""
    nice: int = Field(default=0, ge=0, le=19)
    """CPU priority given up by the engine, where it shares cores with the trainer."""
    start_timeout_s: PositiveFloat = 600.0
    """An engine that is not ready by then has failed."""
    max_restarts: int = Field(default=3, ge=0)
    """Restarts of the scorer within scorer.restart_window_s, after 1, 2, 4 ... at most 60 s; then
    its death ends the run. The trainer repeats the requests that the dead scorer had."""
    restart_window_s: PositiveFloat = 3600.0
    """Seconds over which restarts of the scorer are counted."""
    request_timeout_s: PositiveFloat = 120.0
    """An engine that takes longer for one sequence has failed; the run ends."""
    answer_within_s: PositiveFloat = 900.0
    """The run ends when the trainer has waited so long without any answer; above start_timeout_s,
    as it waits through starts and restarts."""

    def check(self, *, context_tokens: int, temperature: float) -> None:
        """Raise ValueError where it cannot score what is trained on.

        context_tokens: the longest sequence; temperature: of sampling.
        """
        if temperature != 1.0:
            raise ValueError(
                f"sampling.temperature={temperature:g} with algorithm.reference.source='engine': "
                "SGLang gives logprobs of given tokens at temperature 1 alone, which are not those "
                "that the trainer compares; set it to 1, or algorithm.reference.source='trainer'"
            )
        if self.kv_tokens <= context_tokens:
            raise ValueError(
                f"scorer.kv_tokens={self.kv_tokens} does not hold one sequence of "
                f"generator.context_tokens={context_tokens}: raise it"
            )
        if self.answer_within_s <= max(self.start_timeout_s, self.request_timeout_s):
            raise ValueError(
                f"scorer.answer_within_s={self.answer_within_s:g} is not above "
                f"scorer.start_timeout_s={self.start_timeout_s:g} and scorer.request_timeout_s="
                f"{self.request_timeout_s:g}: the trainer would give up an engine that starts; "
                "raise it"
            )
