"""What `expert.generator.deterministic` needs of the other keys. Used by `check.py`."""

from typing import Any

Config = Any
"""The tree, which imports this module."""


def find_inexact(config: Config) -> list[str]:
    """A text for each key with which a resumed run could differ from an uninterrupted one."""
    if not config.generator.deterministic:
        return []
    found = []
    if config.generator.engine == "vllm":
        found.append(
            "expert.generator.deterministic=true with generator.engine='vllm', whose logits depend "
            "on the other requests: use 'sglang' or 'hf'"
        )
    if config.train.steps == 0:
        return found
    if config.queue.max_staleness:
        found.append(
            "expert.generator.deterministic=true with queue.max_staleness="
            f"{config.queue.max_staleness}: the time of a weight sync would decide which version "
            "samples a token; set queue.max_staleness=0, or leave deterministic at false"
        )
    if not config.train.deterministic:
        found.append(
            "expert.generator.deterministic=true needs train.deterministic=true: the generator "
            "would repeat its tokens, the trainer not its steps; set it"
        )
    if config.has_scorer:
        found.append(
            "expert.generator.deterministic=true with algorithm.reference.source='engine': the "
            "scorer's logprobs depend on the sequences that it scores together; set "
            "algorithm.reference.source='trainer'"
        )
    return found
