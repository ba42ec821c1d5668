"""TransformerEngine's state for FP8 without its kernels: recipes, contexts, maxima, recomputation.

Used by rehearsed ranks, as `engine_layers.py`. Written after transformer-engine 2.12.0
(quantization.py, distributed.py). Megatron-Core's own FP8 branches enter and leave the contexts.
"""

import contextlib
import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Format(enum.Enum):
    """Which FP8 dtypes a recipe uses; both kinds take one byte."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"


class Recipe:
    """How scales are found."""


class DelayedScaling(Recipe):
    """From the maxima of passes before, which all ranks of a group reduce."""

    def __init__(
        self,
        margin: int = 0,
        fp8_format: Format = Format.HYBRID,
        amax_history_len: int = 1024,
        amax_compute_algo: str = "max",
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        **unknown: Any,
    ) -> None:
        """unknown: as the package's dataclass of pydantic, which leaves out what it does not have.

        Megatron-Core 0.16.1 gives such arguments.
        """
        self.amax_history_len = amax_history_len


class Float8CurrentScaling(Recipe):
    """From the maximum of the tensor itself."""

    def __init__(self, fp8_format: Format = Format.HYBRID, fp8_dpa: bool = False) -> None: ...


class Float8BlockScaling(Recipe):
    """From the maximum of each block."""

    def __init__(self, fp8_format: Format = Format.E4M3) -> None: ...


class Maxima:
    """Scales and maxima of a layer under delayed scaling: three tensors forward, two backward."""

    def __init__(self, recipe: DelayedScaling, products: int, device: torch.device) -> None:
        def zeros(*sizes: int) -> Tensor:
            return torch.zeros(*sizes, dtype=torch.float32, device=device)

        counts = {True: 3 * products, False: 2 * products}
        self.scales = {way: zeros(count) for way, count in counts.items()}
        self.histories = {
            way: zeros(recipe.amax_history_len, count) for way, count in counts.items()
        }
        """By whether it is the forward pass."""


@dataclass
class _State:
    """What a context sets; it ends with the context."""

    is_enabled: bool = False
    recipe: Recipe | None = None
    group: dist.ProcessGroup | None = None
    is_first: bool = False
    """No layer was called yet in the outermost context."""


class FP8GlobalStateManager:
    """The state of this process, by TransformerEngine's name."""

    state = _State()
    depth = 0
    """Of contexts within each other."""
    maxima: dict[dist.ProcessGroup | None, list[Maxima]] = {}
    """Of all layers that were called under delayed scaling, by the group that reduces."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Whether products are in FP8 now."""
        return cls.state.is_enabled

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """Of the context."""
        return cls.state.recipe or DelayedScaling()

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """Whether the caller is the first layer of the outermost context; True once."""
        found, cls.state.is_first = cls.state.is_first, False
        return found

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        """Reduce the newest maxima of all layers, as one tensor for each group."""
        for group, layers in cls.maxima.items():
            newest = torch.cat([layer.histories[forward][0] for layer in layers])
            if dist.get_world_size(group) > 1:
                dist.all_reduce(newest, op=dist.ReduceOp.MAX, group=group)


@contextlib.contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: dist.ProcessGroup | None = None,
) -> Iterator[None]:
    """Products within are in FP8. The outermost context of a pass with gradients reduces maxima."""
    manager = FP8GlobalStateManager
    before = manager.state
    recipe = fp8_recipe or DelayedScaling()
    manager.state = _State(enabled, recipe, fp8_group, before.is_first or not manager.depth)
    manager.depth += 1
    try:
        yield
    finally:
        manager.state = before
        manager.depth -= 1
        if enabled and not manager.depth and torch.is_grad_enabled():
            manager.reduce_and_update_fp8_tensors(forward=True)


@contextlib.contextmanager
def fp8_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
) -> Iterator[None]:
    """Parameters that are kept in FP8 are not rehearsed."""
    assert not enabled, "parameters in FP8 are not rehearsed"
    yield


# --- recomputation ------------------------------------------------------------------------------


class activation_recompute_forward(contextlib.AbstractContextManager[None]):
    """Marks the two forward passes of what is recomputed."""

    keeps_columns = False
    """In the first of them: weights are quantised for the backward pass too."""
    is_second = False
    _firsts: list[bool] = []
    """Whether first passes began a context, which their second passes repeat in this order."""

    def __init__(self, activation_recompute: bool = False, recompute_phase: bool = False) -> None:
        self._is_recomputed, self._is_second = activation_recompute, recompute_phase

    def __enter__(self) -> None:
        kind, state = type(self), FP8GlobalStateManager.state
        kind.keeps_columns = self._is_recomputed and state.is_enabled and not self._is_second
        kind.is_second = self._is_second
        if self._is_recomputed and not self._is_second:
            kind._firsts.append(state.is_first)
        elif self._is_recomputed:
            state.is_first = kind._firsts.pop(0)

    def __exit__(self, *error: object) -> None:
        type(self).keeps_columns = type(self).is_second = False


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], options: Any, *args: Any) -> Any:
        with torch.no_grad(), activation_recompute_forward(activation_recompute=True):
            outputs = function(*args, **options)
        ctx.function, ctx.options = function, options
        ctx.others = [None if isinstance(each, Tensor) else each for each in args]
        ctx.save_for_backward(*(each if isinstance(each, Tensor) else None for each in args))
        state = FP8GlobalStateManager.state
        ctx.fp8 = {"enabled": state.is_enabled, "fp8_recipe": state.recipe}
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        inputs = [
            other if saved is None else saved.detach().requires_grad_(saved.requires_grad)
            for saved, other in zip(ctx.saved_tensors, ctx.others, strict=True)
        ]
        again = activation_recompute_forward(activation_recompute=True, recompute_phase=True)
        # In this order: the package begins the context last, which makes each layer the first.
        with torch.enable_grad(), again, fp8_autocast(**ctx.fp8):
            outputs = ctx.function(*inputs, **ctx.options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if isinstance(output, Tensor) and output.requires_grad
        ]
        torch.autograd.backward(*zip(*pairs, strict=True))
        found = [each.grad if isinstance(each, Tensor) else None for each in inputs]
        return None, None, *found


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: dist.ProcessGroup | None = None,
    **kwargs: Any,
) -> Any:
    """The function's result, whose activations are computed again in the backward pass."""
    assert not distribute_saved_activations, "inputs of layers are not divided"
    return _Recomputed.apply(function, kwargs, *args)
