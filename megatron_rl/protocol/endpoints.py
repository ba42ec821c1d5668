"""The endpoints of a run and the messages of each.

Imported by every process. One ROUTER serves an endpoint, and DEALERs connect to it. Any other kind
of message is a decode error on either side.
"""

import functools
from typing import Any, NamedTuple, get_args

from megatron_rl.protocol import types
from megatron_rl.protocol.node_messages import NodeState, RunPhase


class Endpoint(NamedTuple):
    """The message types that each side of an endpoint may receive, as unions."""

    name: str
    router_hears: Any
    dealer_hears: Any


PROMPTS = Endpoint("prompts", types.FromGenerator, types.ToGenerator)
"""Queue <-> generators."""
VERIFY = Endpoint("verify", types.FromVerifier, types.ToVerifier)
"""Queue <-> verifiers."""
BATCHES = Endpoint("batches", types.FromLeader, types.ToLeader)
"""Queue <-> data-parallel leaders of the trainer."""
WEIGHTS = Endpoint("weights", types.FromMember, types.ToMember)
"""Trainer rank 0 <-> generators."""
NODES = Endpoint("nodes", NodeState, RunPhase)
"""Launcher of the first node <-> launchers of the other nodes."""
SCORER = Endpoint("scorer", types.FromScored, types.ToScored)
"""Scorer <-> the first rank of each data-parallel replica of the trainer, and generators."""
ENDPOINTS = (PROMPTS, VERIFY, BATCHES, WEIGHTS, NODES, SCORER)
ANY = Endpoint("any", types.AnyMessage, types.AnyMessage)
"""For tools and tests."""


@functools.cache
def names_of(kinds: Any) -> tuple[str, ...]:
    """Names of the message types of a union, or of a single type."""
    return tuple(kind.__name__ for kind in get_args(kinds) or (kinds,))
