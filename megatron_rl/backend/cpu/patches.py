"""What megatron-core 0.16.1 needs to run well without CUDA: one small function per patch.

Used by trainer ranks on CPU (`define_router_product` and `deny_engine_to_latents` wherever
TransformerEngine is missing), and in part by rehearsed ranks, whose tensors have no data. `install`
applies the table once; tests/backend leaves each patch out in turn and sees the operation that it
serves fail.
"""

import functools
import inspect
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import megatron.core.tensor_parallel.random as megatron_random
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import layers as linear_layers
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch import Tensor
from torch.utils._device import _device_constructors

from megatron_rl.backend.products import add_product, note_added

OF_THE_DEVICE = (
    "current_device", "device_literals", "move_to_device", "type_names", "synchronize",
    "generator", "set_generator",
)  # fmt: skip
"""Patches that name another device; the others replace what a CPU cannot do or does slowly."""
_device = torch.device("cpu")
_installed: set[str] = set()


def install(leave_out: Collection[str] = (), device: torch.device = _device) -> None:
    """Apply the patches that are not applied yet.

    device: what stands for CUDA's. Tests and rehearsed ranks leave some out.
    """
    global _device  # noqa: PLW0603 - one device a process, as torch.cuda has
    _device = device
    for name, patch in PATCHES.items():
        if name not in _installed and name not in leave_out:
            patch()
            _installed.add(name)


def _current_device() -> None:
    """Megatron allocates buffers on torch.cuda.current_device()."""
    torch.cuda.current_device = lambda: _device


def _device_literals() -> None:
    """Megatron's optimizers and schedules write device="cuda"."""
    # torch lists its factories at a process's first `with torch.device(...)`. Were it to find the
    # ones below, it would not know the real ones again, and that context would do nothing:
    # transformers would leave what it creates on "meta" unset, such as rotary frequencies.
    _device_constructors()
    for name in ("tensor", "zeros", "ones", "empty", "full", "zeros_like", "empty_like", "arange"):
        setattr(torch, name, _on_device(getattr(torch, name)))


def _on_device(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        # str() also covers "cuda:0" and torch.device; the comparisons before it are cheaper.
        if device is not None and device is not _device and str(device).startswith("cuda"):
            kwargs["device"] = _device
        return factory(*args, **kwargs)

    return make


def _move_to_device() -> None:
    """Megatron moves the last stage's copy of a tied embedding with Tensor.cuda()."""
    torch.Tensor.cuda = lambda self, *args, **kwargs: self.to(_device)


def _type_names() -> None:
    """megatron.core.optimizer sorts parameters by strings such as 'torch.cuda.FloatTensor'."""
    original = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        # With arguments Tensor.type converts a tensor, and returns one.
        if args or kwargs:
            return answer
        # Only for the optimizer: other code may rely on the true name.
        caller = inspect.currentframe().f_back.f_globals.get("__name__", "")
        if caller.startswith("megatron.core.optimizer"):
            return answer.replace(f"torch.{_device.type}.", "torch.").replace(
                "torch.", "torch.cuda.", 1
            )
        return answer

    torch.Tensor.type = type_name


def _synchronize() -> None:
    """The pipeline schedule waits for the device around its sends."""
    torch.cuda.synchronize = lambda device=None: None


def _generator() -> None:
    """Megatron keeps one CUDA random state per use; on this host they are states of the CPU's."""
    # torch.cuda holds a copy of each function of torch.cuda.random, and Megatron uses both.
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda device="cuda": torch.get_rng_state()
        module.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)
    torch.cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed) and None


def _set_generator() -> None:
    """Megatron's own setter goes through a queue that CUDA's start would empty: a silent no-op."""
    megatron_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: (
        torch.set_rng_state(state)
    )


def define_router_product() -> None:
    """The router asks by a name whether TransformerEngine is there; without it, it is undefined."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def deny_engine_to_latents() -> None:
    """Latent attention takes TransformerEngine to be there, since its own imports do not fail."""
    multi_latent_attention.HAVE_TE = False


def _token_dispatch() -> None:
    """The dispatcher of tokens to experts brings its counts to the host on a CUDA stream."""
    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    # Its constructor makes a CUDA stream unless the class has one already.
    dispatcher.cuda_dtoh_stream = "no stream"
    dispatcher._maybe_dtoh_and_synchronize = _split_sizes


def _split_sizes(
    self: token_dispatcher.MoEAlltoAllTokenDispatcher,
    point: str,
    tokens_per_expert: torch.Tensor | None = None,
) -> torch.Tensor | None:
    # Megatron calls this at several points of a pass and copies at one of them. Here the counts are
    # on the host already; what is left to do is the lists that all-to-all wants.
    if point == self.cuda_dtoh_point:
        for name in ("input_splits", "output_splits"):
            splits = getattr(self, name)
            if isinstance(splits, torch.Tensor):
                setattr(self, name, splits.tolist())
    return tokens_per_expert


def _uneven_parts() -> None:
    """Ranks that share experts exchange tokens in parts of unequal length, which gloo cannot."""
    mappings._gather_along_first_dim = _gather_parts(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _scatter_parts(
        mappings._reduce_scatter_along_first_dim
    )


def _gather_parts(of_equal: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(of_equal)
    def gather(
        input_: torch.Tensor,
        group: dist.ProcessGroup,
        output_split_sizes: list[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return of_equal(input_, group, output_split_sizes, use_global_buffer)
        # gloo's all-gather needs equal parts; one broadcast from each rank does not.
        gathered = input_.new_empty(sum(output_split_sizes), *input_.shape[1:])
        for rank, part in enumerate(gathered.split(output_split_sizes)):
            if rank == group.rank():
                part.copy_(input_)
            # All ranks know the sizes, so all skip the same empty parts.
            if len(part):
                dist.broadcast(part, group=group, group_src=rank)
        return gathered

    return gather


def _scatter_parts(of_equal: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(of_equal)
    def scatter(
        input_: torch.Tensor,
        group: dist.ProcessGroup,
        input_split_sizes: list[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return of_equal(input_, group, input_split_sizes, use_global_buffer)
        # Each rank's part of the sum, by way of the whole sum: more to send, but gloo can.
        total = input_.clone()
        dist.all_reduce(total, group=group)
        return total.split(input_split_sizes)[group.rank()]

    return scatter


def _gradient_products() -> None:
    """Gradients of weights are added to Megatron's buffers by an extension of NVIDIA apex."""
    linear_layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
        wgrad_gemm_accum_fp32=lambda inputs, grad, total: add_product(total, grad, inputs)
    )
    linear_layers._grad_accum_fusion_available = True


def _embedding_gradient() -> None:
    """Each microbatch makes a tensor of the whole vocabulary, most of it zeros, and adds it."""
    linear_layers.F = SimpleNamespace(embedding=embed)


def embed(ids: Tensor, weight: Tensor) -> Tensor:
    """F.embedding(ids, weight); the backward pass adds to weight.main_grad if there is one.

    torch's own makes a gradient of the weight's size, which for a vocabulary of 49,152 and 576
    hidden sizes took a tenth of a microbatch's time.
    """
    if not hasattr(weight, "main_grad"):
        return F.embedding(ids, weight)
    return _Embed.apply(ids, weight)


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.ids, ctx.weight = ids, weight
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        weight = ctx.weight
        weight.main_grad.index_add_(0, ctx.ids.flatten(), grad.flatten(0, -2).float())
        return None, note_added(weight)


PATCHES: dict[str, Callable[[], None]] = {
    "current_device": _current_device,
    "device_literals": _device_literals,
    "move_to_device": _move_to_device,
    "type_names": _type_names,
    "synchronize": _synchronize,
    "generator": _generator,
    "set_generator": _set_generator,
    "router_product": define_router_product,
    "latents": deny_engine_to_latents,
    "token_dispatch": _token_dispatch,
    "uneven_parts": _uneven_parts,
    "gradient_products": _gradient_products,
    "embedding_gradient": _embedding_gradient,
}
