"""Optimizer, learning-rate schedule and a step that skips bad gradients; on every trainer rank.

`build_optimizer` must follow `load_weights`: Megatron copies float32 masters from the parameters.
"""

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megatron_rl.backend.profiling import span
from megatron_rl.config.tree import OptimizerConfig


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step; equal on all ranks."""

    grad_norm: float  # over all parameters, before clipping; nan when not finite
    reason: str = ""  # why the step was skipped; "" for one that was applied

    @property
    def was_skipped(self) -> bool:
        """Whether weights and optimizer state are as they were."""
        return bool(self.reason)

    @property
    def has_exploded(self) -> bool:
        """Whether it was skipped although its gradient is finite."""
        return self.was_skipped and math.isfinite(self.grad_norm)


def build_optimizer(
    cfg: OptimizerConfig, model: Sequence[DistributedDataParallel]
) -> MegatronOptimizer:
    """Megatron's AdamW over the model's chunks; distributed if the model's data parallelism is."""
    config = model[0].config
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=cfg.lr,
            weight_decay=cfg.weight_decay,
            adam_beta1=cfg.beta1,
            adam_beta2=cfg.beta2,
            adam_eps=cfg.eps,
            clip_grad=cfg.clip_grad_norm,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=model[0].ddp_config.use_distributed_optimizer,
            fp8_recipe=config.fp8_recipe if config.fp8 else None,
            optimizer_cpu_offload=cfg.offload,
            optimizer_offload_fraction=1.0,
            overlap_cpu_optimizer_d2h_h2d=cfg.offload,
            # Otherwise the masters would stay on the device besides their copies in host memory.
            use_precision_aware_optimizer=cfg.offload,
        ),
        list(model),
        use_gloo_process_groups=False,
    )
    if cfg.offload:
        # megatron-core 0.16.1 first copies all parameters of the rank to host memory, then its part
        # of them (distrib_optimizer.py:603); hooks in cycles keep the first copies.
        gc.collect()
    for group in optimizer.param_groups:
        # Megatron's own scheduler, unused here, would leave out norms and biases.
        group["weight_decay"] = cfg.weight_decay * group.get("wd_mult", 1.0)
    return optimizer


def lr_at(step: int, cfg: OptimizerConfig, total_steps: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0.

    Linear warm-up that reaches cfg.lr at step warmup_steps - 1; then constant, or down to
    min_lr_ratio * lr at step total_steps - 1, linearly or by half a period of a cosine.
    """
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    if cfg.lr_schedule == "constant":
        return cfg.lr
    first = max(cfg.warmup_steps - 1, 0)
    done = min((step - first) / max(total_steps - 1 - first, 1), 1.0)
    if cfg.lr_schedule == "cosine":
        done = (1 - math.cos(math.pi * done)) / 2
    return cfg.lr * (1 - done * (1 - cfg.min_lr_ratio))


def zero_gradients(model: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    """Clear the gradient buffers; call before the microbatches of each step."""
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


@span("optimizer")
@torch.no_grad()
def step_if_finite(
    optimizer: MegatronOptimizer, *, lr: float, skip_norm: float = 0.0
) -> StepResult:
    """Clip and apply the gradients, or skip the step when they are not finite.

    A norm above skip_norm (0: no limit) counts as an explosion, and its step is skipped too. Every
    rank of the world must call this; all take the same decision.

    megatron-core 0.16.1 checks for infinities only with a loss scaler, which bf16 and fp32 do not
    use: its own step() would write infinities into the masters and the moments.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    match _worst_verdict(optimizer, norm, skip_norm):
        case _Verdict.NOT_FINITE:
            optimizer.zero_grad()
            return StepResult(math.nan, "the gradient is not finite")
        case _Verdict.EXPLODED:
            optimizer.zero_grad()
            limit = f"expert.optimizer.skip_grad_norm={skip_norm:g}"
            return StepResult(norm, f"the gradient norm is {norm:.4g}, above {limit}")
    for part in optimizer.chained_optimizers:
        if parameters := part.get_parameters():
            clip_grad_by_total_norm_fp32(
                parameters,
                part.config.clip_grad,
                norm,
                use_decoupled_grad=_gradient_name(part) == "decoupled_grad",
            )
    optimizer.step_with_ready_grads()
    return StepResult(norm)


def _gradient_name(part: MegatronOptimizer) -> str:
    """Attribute with the gradients; with offloaded masters, bf16 parameters hold fp32 gradients."""
    is_apart = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    return "decoupled_grad" if is_apart else "grad"


class _Verdict(IntEnum):
    """On a gradient; a lower value is worse."""

    NOT_FINITE = 0
    EXPLODED = 1
    SOUND = 2


def _worst_verdict(optimizer: MegatronOptimizer, norm: float, skip_norm: float) -> _Verdict:
    """The worst verdict of all ranks on their gradients, on every rank.

    The global norm is not enough: it counts a parameter that tensor ranks share on the first tensor
    rank only.
    """
    grads = [
        gradient
        for part in optimizer.chained_optimizers
        for parameter in part.get_parameters()
        if (gradient := getattr(parameter, _gradient_name(part), None)) is not None
    ]
    own = torch.stack(torch._foreach_norm(grads)).sum().item() if grads else 0.0
    verdict = _Verdict.SOUND
    if not (math.isfinite(norm) and math.isfinite(own)):
        verdict = _Verdict.NOT_FINITE
    elif skip_norm and norm > skip_norm:
        verdict = _Verdict.EXPLODED
    # The loss scale is a tensor on the right device.
    flag = torch.full_like(optimizer.get_loss_scale(), float(verdict))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return _Verdict(int(flag.item()))
