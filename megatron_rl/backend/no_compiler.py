"""Importing this, before Megatron, keeps torch's compiler out of a process that may not compile.

Used by trainer ranks. Megatron-Core and others decorate functions with torch.compile when they are
imported, which loads torch's compiler: four seconds of a core, for nothing where
TORCHDYNAMO_DISABLE=1 lets every decorated function run as it is.
"""

import os
from collections.abc import Callable
from typing import Any

import torch


def _uncompiled(model: Callable | None = None, **options: Any) -> Callable:
    """What torch.compile returns comes to under TORCHDYNAMO_DISABLE=1: the function itself."""
    return (lambda decorated: decorated) if model is None else model


if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
    torch.compile = _uncompiled
