"""A completion that a simulated engine is asked for. Pure; used by the simulation."""

import itertools
import math
from dataclasses import dataclass, field

from megatron_rl.protocol.types import VersionSpan


@dataclass
class Request:
    """A completion that an engine is asked for."""

    lease_id: int
    index: int
    group: int
    """Completions with the same number have the same prompt."""
    prompt_tokens: int
    tokens: int
    """How long it will be."""
    generated: int = 0
    """Until it joined last."""
    joined_at: int = 0
    """Iteration after which it decodes."""
    leased_at: float = 0.0
    first_token_at: float = math.inf
    """End of its first prefill."""
    starts: list[tuple[int, int]] = field(default_factory=list)
    """(policy version, completion token from which on it sampled)."""

    def spans(self) -> list[VersionSpan]:
        """Which version sampled which tokens, once it is finished."""
        last: dict[int, int] = {}
        for version, start in self.starts:
            last[start] = version
        edges = [start for start in sorted(last) if start < self.tokens]
        found: list[VersionSpan] = []
        for start, end in itertools.pairwise([*edges, self.tokens]):
            if found and found[-1].version == last[start]:
                found[-1] = VersionSpan(last[start], found[-1].start, end)
            else:
                found.append(VersionSpan(last[start], start, end))
        return found
