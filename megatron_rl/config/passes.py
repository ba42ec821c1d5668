"""What of `[model]`, `[parallel]` and `[train]` cannot be together in a pass of a trainer rank.

Used when a configuration is loaded.
"""

from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.config.trainer import ModelConfig, TrainConfig


def check_passes(
    model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, *, context_tokens: int
) -> None:
    """Raise ValueError for an impossible combination. context_tokens: of the longest sequence."""
    if train.router_replay and "moe_router" in model.fusions:
        # megatron-core 0.16.1, moe_utils.py:652: the fused one never asks for a recorded one.
        raise ValueError(
            "expert.model.fusions with 'moe_router' and train.router_replay=true exclude each "
            "other: the fused router takes no recorded choices; leave 'moe_router' out"
        )
    if train.pad_microbatches:
        _check_padding(parallel, train, context_tokens)
    if parallel.overlap_tensor:
        _check_overlap(model, train)


def _check_padding(parallel: ParallelConfig, train: TrainConfig, context_tokens: int) -> None:
    """Every microbatch must fit into the same count of positions."""
    if parallel.context > 1:
        raise ValueError(
            f"expert.train.pad_microbatches=true with parallel.context={parallel.context}: context "
            "ranks pad every sequence, so that a microbatch may exceed train.microbatch_tokens; "
            "set parallel.context=1, or it to false"
        )
    if train.steps and train.microbatch_tokens < context_tokens:
        raise ValueError(
            "expert.train.pad_microbatches=true with "
            f"train.microbatch_tokens={train.microbatch_tokens}: a sequence may have "
            f"generator.context_tokens={context_tokens}; raise the former to it"
        )


def _check_overlap(model: ModelConfig, train: TrainConfig) -> None:
    """What TransformerEngine 2.12's userbuffers can do, as far as it is not the ranks alone."""
    given = "expert.parallel.overlap_tensor=true"
    if not train.pad_microbatches:
        raise ValueError(
            f"{given} needs microbatches of one size, as its buffers have one: set "
            "expert.train.pad_microbatches=true, or it to false"
        )
    if model.layers == "local":
        raise ValueError(f"{given} needs expert.model.layers='transformer_engine' or 'auto'")
    if model.dtype != "bfloat16":
        # Its kernels add what they exchange as bfloat16 (userbuffers.cu).
        raise ValueError(f"{given} needs model.dtype='bfloat16'")
    if model.fp8 == "blockwise":
        # module/base.py:603: "Unsupported quantizer for Userbuffers".
        raise ValueError(
            f"{given} with model.fp8='blockwise': TransformerEngine's buffers take no blocks; "
            "nearest possible: model.fp8='tensorwise', or expert.parallel.overlap_tensor=false"
        )
