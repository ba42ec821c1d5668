"""torch without its compiler, which SGLang would load for functions that it may not compile.

Imported by SGLang's processes on the CPU when they import torch. TORCHDYNAMO_DISABLE=1, which the
launcher sets, lets functions that torch.compile decorates run as they are; but to decorate them
loads the compiler first, which takes three seconds of a core.
"""

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any


def install(torch: ModuleType) -> None:
    """Let torch.compile return the function itself, if that is all that may come of it."""
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        torch.compile = _uncompiled


def _uncompiled(model: Callable | None = None, **options: Any) -> Callable:
    return (lambda decorated: decorated) if model is None else model
