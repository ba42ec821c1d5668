"""Whether a rank's parameters are finite, and which Hugging Face tensors are not.

Runs in trainer ranks: after weights are loaded, and before each weight sync. It reads each
parameter once, and waits for the device once, however many parameters there are.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.config.errors import InputError
from megatron_rl.weights.layout.slices import Slice, local_part, shown


@torch.no_grad()
def faulty_tensors(parameters: Mapping[str, Tensor], slices: Callable[[], Iterable[Slice]]) -> str:
    """The HF tensors of which this rank holds a NaN or Inf, with the rank; "": none.

    slices: gives the rank's, if one is found. Parameters that are kept in FP8 are left out.
    """
    plain = {name: p for name, p in parameters.items() if p.numel() and _is_plain(p)}
    if not plain or bool(torch.stack([_is_finite(p) for p in plain.values()]).all()):
        return ""
    faulty = {name for name, parameter in plain.items() if not bool(_is_finite(parameter))}
    names = {
        part.hf
        for part in slices()
        if part.local in faulty and not bool(_is_finite(local_part(dict(plain), part)))
    }
    return f"{shown(names or faulty)} on trainer rank {dist.get_rank()}"


def check_loaded(
    parameters: Mapping[str, Tensor], slices: Callable[[], Iterable[Slice]], source: object
) -> None:
    """Raise InputError for a NaN or Inf among loaded weights; source: where they are from."""
    if found := faulty_tensors(parameters, slices):
        raise InputError(
            f"{source} has NaN or Inf, or values beyond the range of model.dtype, in {found}: "
            "fetch the model again, take an earlier checkpoint, or another model.dtype"
        )


def _is_plain(parameter: Tensor) -> bool:
    return type(parameter) in (Tensor, torch.nn.Parameter)


def _is_finite(tensor: Tensor) -> Tensor:
    """[] bool, on the tensor's device."""
    # A NaN is both the least and the largest value.
    least, largest = torch.aminmax(tensor)
    return least.isfinite() & largest.isfinite()
