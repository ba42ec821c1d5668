"""Importing this, before Megatron, keeps torch's compiler out of a process that may not compile.

Used by trainer ranks, and by SGLang's processes on the CPU when they import torch. Libraries
decorate functions with torch.compile when they are imported, which loads torch's compiler: three to
four seconds of a core, for nothing where TORCHDYNAMO_DISABLE=1 lets every function run as it is.
In a rank it also hides wandb and tensorboard, which Megatron loads where they are installed: 0.7 s
of a core for nothing, because another process exports metrics.
"""

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch


def install(torch: ModuleType) -> None:
    """Let torch.compile return the function itself under TORCHDYNAMO_DISABLE=1."""
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        torch.compile = _uncompiled


def _uncompiled(model: Callable | None = None, **options: Any) -> Callable:
    return (lambda decorated: decorated) if model is None else model


install(torch)
if "TORCHELASTIC_RUN_ID" in os.environ:  # a rank under torchrun
    # Imports of them raise ImportError.
    sys.modules |= dict.fromkeys(("wandb", "tensorboard"))  # type: ignore[arg-type]
