"""The section `[scorer]`: the engine that holds a frozen reference.

Imported by every process, as part of the configuration tree.
"""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from megatron_rl.config.section import Section


class ScorerConfig(Section):
    """The SGLang server that computes the reference's logprobs for `algorithm.reference.source` =
    "engine". It has its own GPUs, after the generators' GPUs."""

    tensor_parallel: PositiveInt = 1
    """Tensor-parallel ranks of the scorer, on one node."""
    dtype: Literal["", "float32", "bfloat16"] = ""
    """Dtype of the scorer's weights and computations; "": model.dtype."""
    quantization: str = ""
    """Quantization of the scorer's weights (SGLang's option), such as "fp8"; "": none."""
    max_running: PositiveInt = 32
    """Number of sequences in work at once. Each data-parallel replica of the trainer requests as
    many."""
    kv_tokens: PositiveInt = 65_536
    """Number of tokens in the scorer's KV cache. Must exceed generator.context_tokens."""
    nice: int = Field(default=0, ge=0, le=19)
    """Niceness of the engine's processes, where they share cores with the trainer."""
    start_timeout_s: PositiveFloat = 600.0
    """Seconds after which an engine that is not ready counts as failed."""
    max_restarts: int = Field(default=3, ge=0)
    """Restarts of the scorer within expert.scorer.restart_window_s, after 1, 2, 4 ... at most 60 s;
    then its death ends the run. The trainer repeats the requests that the dead scorer had."""
    restart_window_s: PositiveFloat = 3600.0
    """Seconds over which restarts of the scorer are counted."""
    request_timeout_s: PositiveFloat = 120.0
    """Timeout of one sequence, in seconds; then the run ends."""
    answer_within_s: PositiveFloat = 900.0
    """Seconds without any answer after which the run ends. Must exceed start_timeout_s, because
    the trainer waits through starts and restarts."""
