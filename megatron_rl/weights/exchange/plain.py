"""A sender's parameters as plain numbers. Used by trainer ranks; needs torch alone.

A parameter that a library keeps quantised (TransformerEngine's Float8Tensor, with
`expert.model.fp8_parameters`) says that it has the compute dtype, but `view(torch.uint8)` gives its
codes without their scales, and any other view of a part of it dequantises all of it.
"""

import threading
from collections.abc import Mapping

from torch import Tensor


class PlainParameters(dict[str, Tensor]):
    """Parameters by name: plain ones themselves, quantised ones dequantised when first asked for.

    For one weight sync: what was dequantised is kept, so that it happens once for all slices and
    all generators. It takes as much memory as the quantised parameters in their nominal dtype.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._parameters = parameters
        # Threads that prepare for engines of different kinds ask for the same ones.
        self._finding = threading.Lock()

    def __missing__(self, name: str) -> Tensor:
        with self._finding:
            if name not in self:
                parameter = self._parameters[name]
                self[name] = parameter.dequantize() if is_quantised(parameter) else parameter
        return self[name]


def is_quantised(parameter: Tensor) -> bool:
    """Whether its class keeps codes and knows how to dequantise them; torch's own do not."""
    return type(parameter).dequantize is not Tensor.dequantize
