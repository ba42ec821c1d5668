"""Whether the engine of `[scorer]` can hold the reference, before anything starts.

Used by `preflight.py` and `nodes.py`.
"""

from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config.divisibility import check_engine_tensor
from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.launcher.placement import place
from megatron_rl.weights.layout.shape import ModelShape

MAX_FOREIGN_IDS = 1024
"""Token ids that a teacher may have beside the policy's: each costs a logprob of every token."""


def check_scorer(
    config: Config, shape: ModelShape, own: ModelShape, folder: Path, *, gpus: Sequence[str]
) -> None:
    """Raise InputError for a reference that the engine could not serve.

    shape: of the reference in `folder`; own: the policy's; gpus: those that this host lists.
    """
    ranks = config.scorer.tensor_parallel
    check_engine_tensor(ranks, shape.heads, key="scorer.tensor_parallel")
    longest = config.generator.context_tokens
    if shape.max_positions < longest:
        raise InputError(
            f"generator.context_tokens = {longest} is above the {shape.max_positions} positions of "
            f"algorithm.reference.policy = {folder}: lower generator.context_tokens, or choose "
            "another reference"
        )
    if shape.vocab - own.vocab > MAX_FOREIGN_IDS:
        raise InputError(
            f"algorithm.reference.policy: {folder} has {shape.vocab - own.vocab} token ids more "
            f"than the policy, and an engine leaves out {MAX_FOREIGN_IDS} at most: take "
            "algorithm.reference.source = 'trainer', or another reference"
        )
    if not any(folder.glob("*.safetensors")):
        raise InputError(f"algorithm.reference.policy: {folder} has no *.safetensors")
    if gpus:
        place(config, nodes=1, gpus_per_node=len(gpus))


def refuse_nodes(config: Config) -> None:
    """Raise InputError: only `megatron-rl run` starts a scorer."""
    if config.has_scorer:
        raise InputError(
            "algorithm.reference.source = 'engine' needs a run on one node, by `megatron-rl run`: "
            "`megatron-rl node` starts no scorer; set it to 'trainer'"
        )
