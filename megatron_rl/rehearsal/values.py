"""Values of small tensors that hold no data: computed on the host along with their shapes.

A schedule depends on a few of them: sizes that pipeline stages send each other, tokens of each
expert, bounds of sequences. They are kept for each storage, so that views and changes in place are
seen. A value that follows from an unknown one is unknown.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

MAX_INTEGERS = 1 << 19
MAX_FLOATS = 64
"""Elements of a tensor whose values are kept."""
_SHAPE_ALONE = {"full_like", "zeros_like", "ones_like"}
"""Their values do not depend on those of their input."""
_UNSET = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}


class KnownValues:
    """Values of tensors of one device, by storage."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[int, torch.UntypedStorage] = {}

    def of(self, tensor: Tensor) -> Tensor | None:
        """The values in host memory, which share memory with those of its views; None: unknown."""
        storage = self._known.get(tensor.untyped_storage()._cdata)
        if storage is None:
            return None
        found = torch.empty(0, dtype=tensor.dtype)
        return found.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def set(self, tensor: Tensor, values: Tensor) -> None:
        """Keep the values of a tensor that fills its storage."""
        if not _is_small(tensor):
            return
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        copy.copy_(values)
        storage = tensor.untyped_storage()
        if tensor.storage_offset() or copy.untyped_storage().nbytes() != storage.nbytes():
            return
        if storage._cdata not in self._known:
            weakref.finalize(storage, self._known.pop, storage._cdata, None)
        self._known[storage._cdata] = copy.untyped_storage()

    def forget(self, tensor: Tensor) -> None:
        """Its values are unknown from now on."""
        self._known.pop(tensor.untyped_storage()._cdata, None)

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Keep or forget values after an operation."""
        name = func._schema.name.partition("::")[2]
        inputs = self._ours((args, kwargs))
        outputs = self._ours(result)
        if not inputs and not outputs:
            return
        written = self._ours(_written(func, args, kwargs))
        is_known = name in _SHAPE_ALONE or all(self.of(each) is not None for each in inputs)
        if name in _UNSET or not is_known or not all(_is_small(each) for each in outputs):
            for each in written:
                self.forget(each)
            return
        found = func(*tree_map(self._on_host, args), **tree_map(self._on_host, kwargs))
        if written:
            return
        for each, value in zip(outputs, tensors_in(found), strict=True):
            if self.of(each) is None:
                self.set(each, value)

    def _ours(self, value: Any) -> list[Tensor]:
        return [each for each in tensors_in(value) if each.device == self._device]

    def _on_host(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.device == self._device:
            found = self.of(value)
            # Where only its shape counts.
            return torch.zeros(value.shape, dtype=value.dtype) if found is None else found
        return torch.device("cpu") if value == self._device else value


def _is_small(tensor: Tensor) -> bool:
    is_whole = not (tensor.is_floating_point() or tensor.is_complex())
    return tensor.numel() <= (MAX_INTEGERS if is_whole else MAX_FLOATS)


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested lists, tuples and dictionaries."""
    leaves = torch.utils._pytree.tree_leaves(value)
    return [each for each in leaves if isinstance(each, Tensor)]


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that the operation changes."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            found += tensors_in(given)
    return found
