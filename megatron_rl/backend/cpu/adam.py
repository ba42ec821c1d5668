"""AdamW with the interface of TransformerEngine's FusedAdam: one loop on the CPU, or in torch's
foreach kernels.

Used by trainer ranks where neither TransformerEngine nor NVIDIA apex is installed. megatron-core
0.16.1 then falls back on torch.optim.AdamW, and resuming the distributed optimizer with that is
wrong: distrib_optimizer.py:823 shares one `step` tensor among all parameters, so the step count
grows by the count of parameters each step.
"""

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core.optimizer import distrib_optimizer

from megatron_rl.backend.cpu.loops import library


class ForeachAdam(torch.optim.Optimizer):
    """Adam with `step` in the parameter group and only the two moments in the state."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        if not adam_w_mode:
            raise ValueError("only decoupled weight decay (AdamW) is implemented")
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "bias_correction": True,
            },
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One AdamW update of the parameters that have a gradient (arXiv 1711.05101, alg. 2)."""
        if closure is not None:
            raise ValueError("closures are not supported")
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                group["step"] = int(group.get("step", 0)) + 1
                self._update(params, group)

    def _update(self, params: list[torch.Tensor], group: dict[str, Any]) -> None:
        for param in params:
            if not self.state[param]:
                self.state[param]["exp_avg"] = torch.zeros_like(param)
                self.state[param]["exp_avg_sq"] = torch.zeros_like(param)
        first = [self.state[param]["exp_avg"] for param in params]
        second = [self.state[param]["exp_avg_sq"] for param in params]
        grads = [param.grad for param in params]
        beta1, beta2 = group["betas"]
        if _can_loop(params, grads, first, second):
            _loop(params, grads, first, second, group)
            return
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        denominators = torch._foreach_sqrt(second)
        torch._foreach_div_(denominators, (1 - beta2 ** group["step"]) ** 0.5)
        torch._foreach_add_(denominators, group["eps"])
        step_size = group["lr"] / (1 - beta1 ** group["step"])
        torch._foreach_addcdiv_(params, first, denominators, -step_size)


def _can_loop(*arrays: list[torch.Tensor]) -> bool:
    tensors = [tensor for array in arrays for tensor in array]
    return (
        all(tensor.dtype is torch.float32 and tensor.is_contiguous() for tensor in tensors)
        and all(tensor.device.type == "cpu" for tensor in tensors)
        and library("adamw") is not None
    )


def _loop(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    first: list[torch.Tensor],
    second: list[torch.Tensor],
    group: dict[str, Any],
) -> None:
    beta1, beta2 = group["betas"]
    count = len(params)
    addresses = ctypes.c_void_p * count
    scalars = (
        1 - group["lr"] * group["weight_decay"],
        group["lr"] / (1 - beta1 ** group["step"]),
        beta1,
        beta2,
        (1 - beta2 ** group["step"]) ** 0.5,
        group["eps"],
    )
    library("adamw").adamw(
        ctypes.c_long(count),
        *(addresses(*(t.data_ptr() for t in array)) for array in (params, grads, first, second)),
        (ctypes.c_long * count)(*(param.numel() for param in params)),
        *map(ctypes.c_float, scalars),
    )


def replace_torch_fallback() -> None:
    """Make megatron use ForeachAdam where it would use torch.optim.AdamW."""
    if not megatron_optimizer.USING_PYTORCH_OPTIMIZER:
        return
    megatron_optimizer.Adam = distrib_optimizer.Adam = ForeachAdam
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
    # The flags choose the state's layout ('step' in the group), which ForeachAdam shares.
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_APEX_OPTIMIZER = True
