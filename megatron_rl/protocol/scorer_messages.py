"""Messages of the scorer's endpoint. Imported by every process.

Scorer (ROUTER) <-> the first rank of each data-parallel replica of the trainer, and generators
whose environments ask the judge (DEALERs). A Stop of the first replica ends the scorer.
"""

import msgspec
import numpy as np

from megatron_rl.protocol.limits import Count, Finite, Id, find_bad_floats
from megatron_rl.protocol.prompt import ChatMessage


class LogprobRequest(msgspec.Struct, frozen=True, tag="LogprobRequest"):
    """Compute the reference's logprobs of tokens. May be repeated until the answer comes."""

    request_id: Id
    """Unique for this trainer rank."""
    token_ids: np.ndarray  # [tokens] int32
    start: Count
    """Index of the first token with a wanted logprob; at least 1, as token 0 has none."""


class LogprobsDone(msgspec.Struct, frozen=True, tag="LogprobsDone"):
    """The answer."""

    request_id: Id
    logprobs: np.ndarray  # [tokens - start] float32; of each token given earlier tokens

    def find_fault(self) -> str:
        """Why the logprobs cannot be trained on; "" if they can."""
        return find_bad_floats("logprobs", self.logprobs)


class LogprobsFailed(msgspec.Struct, frozen=True, tag="LogprobsFailed"):
    """The engine refused the request: another try would fail too."""

    request_id: Id
    reason: str


class JudgeRequest(msgspec.Struct, frozen=True, tag="JudgeRequest"):
    """Have the judge answer messages. May be repeated until the answer comes."""

    request_id: Id
    """Unique for this generator."""
    messages: list[ChatMessage]
    verdicts: list[str]
    """Whole replies whose logprobs are wanted; []: the judge writes its reply."""
    max_tokens: Count
    """Of a written reply."""
    temperature: Finite = 0.0
    """Of a written reply; 0: greedy."""
    draw: Id = 0
    """Equal requests with another draw may have another reply."""


class Judged(msgspec.Struct, frozen=True, tag="Judged"):
    """The answer."""

    request_id: Id
    logprobs: list[Finite]
    """Of each verdict: the sum over its tokens, each given the messages and earlier tokens."""
    reply: str
    """What the judge wrote; "" where verdicts were given."""


class JudgeRefused(msgspec.Struct, frozen=True, tag="JudgeRefused"):
    """The judge cannot answer these messages: another try would fail too."""

    request_id: Id
    reason: str
