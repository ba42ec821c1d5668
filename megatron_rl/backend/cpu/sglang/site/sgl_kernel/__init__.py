"""Stub of sgl_kernel, which has no CPU wheel: SGLang imports names from it and calls none."""

from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0.4.7"
# A package: SGLang also imports submodules' names from it.
__path__: list[str] = []


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """A function that raises when it is called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs CUDA; this is a stub for the CPU")

    return missing
