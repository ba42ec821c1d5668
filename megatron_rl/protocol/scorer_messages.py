"""What trainer ranks and the scorer say to each other.

Imported by every process. On the scorer's endpoint: scorer (ROUTER) <-> the first rank of each
data-parallel replica of the trainer (DEALER). A Stop of the first of them ends the scorer.
"""

import msgspec
import numpy as np


class LogprobRequest(msgspec.Struct, frozen=True, tag="LogprobRequest"):
    """Say how likely the reference makes these tokens. May be sent again while it is unanswered."""

    request_id: int
    """Of this trainer rank."""
    token_ids: np.ndarray  # [tokens] int32
    start: int
    """The first token whose logprob is wanted; at least 1, as the first of all has none."""


class LogprobsDone(msgspec.Struct, frozen=True, tag="LogprobsDone"):
    """The answer."""

    request_id: int
    logprobs: np.ndarray  # [tokens - start] float32; of each token given those before it


class LogprobsFailed(msgspec.Struct, frozen=True, tag="LogprobsFailed"):
    """The engine refused the request: another try would fail too."""

    request_id: int
    reason: str
