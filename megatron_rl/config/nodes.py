"""The section `[nodes]`: how long the nodes of a run wait for each other. Part of the tree."""

from pydantic import PositiveFloat

from megatron_rl.config.section import Section


class NodesConfig(Section):
    """When a run on several nodes gives up a node, and ends."""

    start_timeout_s: PositiveFloat = 600.0
    """Seconds to wait for all nodes to start."""
    silence_timeout_s: PositiveFloat = 60.0
    """A node is lost when its launcher was silent for this many seconds."""
    end_timeout_s: PositiveFloat = 300.0
    """Seconds in which the other nodes must end their processes of a phase, after the first node
    has ended its own."""
