"""Messages of the scorer's endpoint. Imported by every process.

Scorer (ROUTER) <-> the first rank of each data-parallel replica of the trainer (DEALER). A Stop of
the first replica ends the scorer.
"""

import msgspec
import numpy as np

from megatron_rl.protocol.limits import Count, Id, find_bad_floats


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
