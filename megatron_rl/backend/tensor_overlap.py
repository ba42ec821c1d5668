"""Overlap of what tensor ranks exchange with their matrix products
(`expert.parallel.overlap_tensor`).

Runs in trainer ranks; the launcher asks for `check_shape` alone. TransformerEngine does it through
buffers that the tensor ranks of a host open for each other. They have one count of positions, so it
takes `expert.train.pad_microbatches`. Megatron-Core tells the layers of it, but opens no buffers:
its training script does (megatron/training/initialize.py). What is said of TransformerEngine is
that of 2.12.0.
"""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_rl.config.errors import InputError
from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.config.trainer import ModelConfig
from megatron_rl.config.tree import Config

HIDDEN_MULTIPLE = 64
"""Outputs are reduced in 4 parts (base.py: num_splits), of whole 16 bytes (userbuffers.h), and a
product in FP8 needs multiples of 16."""
MAX_ELEMENTS = 2**31
"""Of a buffer, which its code counts with an int (comm_gemm_overlap.cpp: comm_elements)."""
BOOTSTRAP = "gloo"
"""By which the ranks find each other: NCCL would keep further communicators on the device."""


def check_shape(hidden: int, positions: int, *, has_latent_attention: bool) -> None:
    """Raise InputError for a model and microbatches that the buffers do not take."""
    if has_latent_attention:
        # megatron-core 0.16.1, extensions/transformer_engine.py:536: the first down projection
        # turns the overlap off in the config that all layers behind it share.
        raise InputError(
            "expert.parallel.overlap_tensor=true with latent attention (DeepSeek): Megatron-Core "
            "would turn it off for nearly all layers; nearest possible: false"
        )
    if hidden % HIDDEN_MULTIPLE:
        raise InputError(
            f"expert.parallel.overlap_tensor=true needs a hidden size that {HIDDEN_MULTIPLE} "
            f"divides, and the model has {hidden}; nearest possible: false"
        )
    if positions * hidden >= MAX_ELEMENTS:
        raise InputError(
            f"expert.parallel.overlap_tensor=true: {positions} positions of {hidden} elements are "
            f"more than its buffers can count; lower train.microbatch_tokens below "
            f"{MAX_ELEMENTS // hidden}"
        )


def check_host(*, has_engine: bool) -> None:
    """Raise InputError where trainer ranks cannot open buffers.

    has_engine: whether TransformerEngine computes the layers. Its own refusal of a host without
    multicast is an AssertionError.
    """
    if not has_engine:
        raise InputError(
            "expert.parallel.overlap_tensor=true needs TransformerEngine's layers (a CUDA device, "
            "the package transformer-engine, expert.model.layers not 'local'); nearest possible: "
            "false"
        )
    engine = importlib.import_module("transformer_engine_torch")
    if not engine.device_supports_multicast() and not int(os.environ.get("UB_SKIPMC", "0")):
        raise InputError(
            "expert.parallel.overlap_tensor=true needs CUDA multicast (NVSwitch with its fabric "
            "manager), which the GPUs of this node lack: set UB_SKIPMC=1 in the environment to use "
            "CUDA IPC, or expert.parallel.overlap_tensor=false"
        )


def transformer_fields(parallel: ParallelConfig) -> dict[str, Any]:
    """Fields of TransformerConfig that `expert.parallel.overlap_tensor` sets.

    Megatron's defaults of its other fields overlap all that can be.
    """
    return {"tp_comm_overlap": parallel.overlap_tensor}


def check(cfg: Config, hidden: int, *, has_latent_attention: bool, has_engine: bool) -> None:
    """Raise InputError where the configuration asks for an overlap that cannot be.

    hidden: size. has_engine: as for `check_host`.
    """
    if cfg.parallel.overlap_tensor:
        check_host(has_engine=has_engine)
        positions = cfg.train.microbatch_tokens
        check_shape(hidden, positions, has_latent_attention=has_latent_attention)


@contextmanager
def buffers(cfg: Config, hidden: int, positions: int) -> Iterator[None]:
    """Buffers for microbatches of that size are open inside. Collective over all ranks.

    A no-op without `expert.parallel.overlap_tensor`.
    """
    if not cfg.parallel.overlap_tensor:
        yield
        return
    base = importlib.import_module("transformer_engine.pytorch.module.base")
    modes = base.UserBufferQuantizationMode
    base.initialize_ub(
        [positions, hidden],
        cfg.parallel.tensor,
        quantization_modes=[modes(name) for name in quantization_modes(cfg.model)],
        bootstrap_backend=BOOTSTRAP,
    )
    yield
    # Not after an error: other ranks may wait in a kernel, and giving memory back waits for it.
    base.destroy_ub()


def quantization_modes(model: ModelConfig) -> list[str]:
    """Kinds of buffers that the layers ask for, as TransformerEngine names them."""
    if model.fp8 == "none":
        return ["none"]
    return ["fp8", "none"] if model.fp8_bf16_edge_layers else ["fp8"]
