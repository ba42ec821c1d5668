"""AdamW with the interface of TransformerEngine's FusedAdam, by torch's fused kernel.

Used by trainer ranks where neither TransformerEngine nor NVIDIA apex is installed. megatron-core
0.16.1 then falls back on torch.optim.AdamW, with which a resumed distributed optimizer is wrong:
distrib_optimizer.py:823 shares one `step` tensor among all parameters, so the step count grows by
the number of parameters each step.
"""

from collections.abc import Callable, Iterable
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core.optimizer import distrib_optimizer


class FusedAdam(torch.optim.Optimizer):
    """AdamW with `step` in the parameter group and only the two moments in the state."""

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
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"bias_correction": True})

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
        beta1, beta2 = group["betas"]
        step = torch.tensor(float(group["step"]), device=params[0].device)
        torch._fused_adamw_(
            params,
            [param.grad for param in params],
            [self.state[param]["exp_avg"] for param in params],
            [self.state[param]["exp_avg_sq"] for param in params],
            [],
            [step] * len(params),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


def replace_torch_fallback() -> None:
    """Make megatron use FusedAdam where it would use torch.optim.AdamW."""
    if not megatron_optimizer.USING_PYTORCH_OPTIMIZER:
        return
    megatron_optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
    # The flags choose the state's layout ('step' in the group), which FusedAdam shares.
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_APEX_OPTIMIZER = True
