"""A process that has neither GPU nor peers, made to look to Megatron like a CUDA rank.

Used by rehearsed ranks. Choices are CUDA's: those of `Backend` for a device that is not the CPU.
"""

import contextlib
import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import megatron_rl.backend.no_compiler  # noqa: F401 - before Megatron

# isort: split
import torch
import torch.distributed as dist
from megatron.core.fusions import fused_bias_geglu, fused_bias_swiglu
from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

from megatron_rl.backend.cpu import adam, patches
from megatron_rl.backend.device import Backend, prepare_cuda
from megatron_rl.config.layer_choice import Layers
from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.config.trainer import ModelConfig
from megatron_rl.rehearsal import observed
from megatron_rl.rehearsal.engine_attention import attend

DEVICE = torch.device("meta")


class Nccl(dist.ProcessGroup):
    """In the place of torch's class for groups over NCCL; the tracer alone sees its collectives."""

    class Options:
        """As torch's; torch's own code sets the rest."""

        def __init__(self) -> None:
            self.config = SimpleNamespace()

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        super().__init__(rank, size)
        self._options = options

    def _set_sequence_number_for_group(self) -> None: ...

    @property
    def group_name(self) -> str:
        """As torch's own groups have it, which keep it in their backends."""
        return self._options.group_name


def install_collectives() -> None:
    """torch's groups over NCCL, without peers; and streams that have nothing to do."""
    distributed_c10d.ProcessGroupNCCL = Nccl
    distributed_c10d.is_nccl_available = lambda: True
    _install_streams()


@dataclass(frozen=True)
class RehearsedBackend(Backend):
    """CUDA's choices for tensors without data."""

    rank: int = 0

    def init_distributed(self, parallel: ParallelConfig, *, seed: int, timeout_s: float) -> None:
        """Megatron's groups of this rank; nobody else takes part."""
        dist.init_process_group(
            "fake",
            rank=self.rank,
            world_size=parallel.world_size,
            store=FakeStore(),
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        self.make_groups(parallel, seed=seed, timeout_s=timeout_s)

    def host_group(self, timeout_s: float) -> dist.ProcessGroup:
        """As on CUDA, without peers."""
        return dist.new_group(backend="fake", group_desc="HOST_MEMORY")

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """As on CUDA. Shapes depend on some of the values."""
        sent = super().send(tensor)
        observed.know(sent, tensor)
        return sent

    def peak_flops(self, model: ModelConfig) -> float | None:
        """Unknown, as there is no device."""
        return None


def select_rehearsed(model: ModelConfig, rank: int) -> RehearsedBackend:
    """As `select_backend` on a host with CUDA. Changes torch for the whole process."""
    # `rehearsable` has chosen by the GPU.
    layers: Layers = "transformer_engine" if HAVE_TE and model.layers != "local" else "local"
    adam.replace_torch_fallback()
    leave_out = set(patches.PATCHES) - set(patches.OF_THE_DEVICE)
    patches.install(leave_out, DEVICE)
    install_collectives()
    _install_reading_factory()
    torch.Tensor.is_cuda = property(lambda tensor: tensor.device.type == DEVICE.type)
    _install_fused_units()
    torch.nn.Module.to = _move
    dist.all_gather_object = _gather_own
    torch.nn.functional.scaled_dot_product_attention = attend
    prepare_cuda(layers)
    return RehearsedBackend(DEVICE, "nccl", layers, rank)


def _move(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Module.to, which would make new parameters without Megatron's marks on this device."""
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None and parameter.device != device:
                moved = torch.nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
                moved.__dict__.update(parameter.__dict__)
                each._parameters[name] = moved
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = buffer.to(device)
    return module


def _install_fused_units() -> None:
    """Gated units as torch.compile makes them on CUDA: one kernel, nothing in between."""
    fused_bias_swiglu.swiglu = lambda y: y.new_empty(*y.shape[:-1], y.shape[-1] // 2)
    fused_bias_swiglu.swiglu_back = lambda g, y: torch.empty_like(y)

    def weighted(y: torch.Tensor, weights: torch.Tensor, offset: float = 0.0) -> torch.Tensor:
        return y.new_empty(*y.shape[:-1], y.shape[-1] // 2)

    def weighted_back(
        g: torch.Tensor, y: torch.Tensor, weights: torch.Tensor, offset: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(y), torch.empty_like(weights)

    for module, name in (
        (fused_bias_swiglu, "weighted_swiglu"),
        (fused_bias_geglu, "weighted_quick_geglu"),
    ):
        setattr(module, name, weighted)
        setattr(module, f"{name}_back", weighted_back)


def _install_reading_factory() -> None:
    """torch.tensor reads scalars in a list where no trace sees it, so they are read before."""
    factory = torch.tensor

    def make(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(data, list | tuple):
            data = tree_map_only(torch.Tensor, torch.Tensor.tolist, data)
        return factory(data, *args, **kwargs)

    torch.tensor = make


def _gather_own(found: list[Any], own: Any, group: Any = None) -> None:
    """Give every rank this rank's object. Megatron gathers kinds of parameters, which are equal."""
    found[:] = [own] * len(found)


class _Stream:
    """A CUDA stream or event that never has anything to do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self


def _install_streams() -> None:
    """Megatron makes streams and waits for them; here no operation is ever pending."""
    only = _Stream()
    torch.cuda.Stream = torch.cuda.Event = torch.Stream = _Stream
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_stream = lambda device=None: only
    torch.accelerator.set_stream = torch.accelerator.set_device_index = lambda value: None
    torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: only
    torch.cuda.stream = _in_stream
    torch.Tensor.record_stream = lambda self, stream: None


@contextlib.contextmanager
def _in_stream(stream: Any) -> Iterator[None]:
    yield
