"""The section `[hosts]`: how long the hosts of a run wait for each other. Part of the tree."""

from pydantic import PositiveFloat

from megatron_rl.config.section import Section


class HostsConfig(Section):
    """A run on several hosts: when one of them is given up, and the run with it."""

    start_timeout_s: PositiveFloat = 600.0
    """Hosts may be started so long apart."""
    silence_timeout_s: PositiveFloat = 60.0
    """A host whose launcher was not heard for so long is gone."""
    end_timeout_s: PositiveFloat = 300.0
    """When the first host has ended its processes of a phase, the others have so long to end
    theirs."""
