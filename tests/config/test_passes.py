"""Microbatches of one size, and overlap of tensor ranks: what goes with them, and what does not."""

import pytest

from megatron_rl.config.files import ConfigError, load_config

PADDED = (
    "expert.train.pad_microbatches=true train.microbatch_tokens=8192 generator.context_tokens=8192"
)
OVERLAP = f"{PADDED} expert.parallel.overlap_tensor=true parallel.sequence=true parallel.tensor=4"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (f"{PADDED} parallel.context=2", "context ranks pad every sequence.*parallel.context=1"),
        (f"{PADDED} train.microbatch_tokens=8191", "tokens=8191: .* generator.context_tokens=8192"),
        (f"{OVERLAP} parallel.tensor=1", "tensor=1 and .*sequence=true has nothing to overlap"),
        (f"{OVERLAP} parallel.sequence=false", "sequence=false has nothing to overlap: set"),
        (f"{OVERLAP} parallel.tensor=3", "know 2, 4 and 8 ranks; nearest possible: 2, or"),
        (f"{OVERLAP} parallel.tensor=16", "nearest possible: 8, or"),
        (
            f"{OVERLAP} expert.train.pad_microbatches=false",
            "set expert.train.pad_microbatches=true",
        ),
        (
            f"{OVERLAP} expert.model.layers=local",
            "needs expert.model.layers='transformer_engine' or 'auto'",
        ),
        (f"{OVERLAP} model.dtype=float32", "needs model.dtype='bfloat16'"),
        (f"{OVERLAP} model.fp8=blockwise", "nearest possible: model.fp8='tensorwise', or"),
    ],
)
def test_what_cannot_be_together_is_refused(overrides: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, overrides.split())


@pytest.mark.parametrize(
    "overrides",
    [
        PADDED,
        OVERLAP,
        f"{OVERLAP} model.fp8=tensorwise expert.model.fp8_bf16_edge_layers=1 parallel.pipeline=2",
        f"{OVERLAP} model.fp8=delayed parallel.expert=2",
        # Without reinforcement learning no sequence has generator.context_tokens.
        f"{PADDED} train.microbatch_tokens=512 train.steps=0",
        # The size of microbatches alone decides; packing is as without.
        f"{PADDED} train.packing=flops parallel.data=2",
    ],
)
def test_what_agrees_is_taken(overrides: str) -> None:
    config = load_config(None, overrides.split())
    assert config.train.pad_microbatches
    assert config.parallel.overlap_tensor == overrides.startswith(OVERLAP)
