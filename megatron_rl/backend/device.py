"""Device, collectives, layers and optimizer kernels of the trainer ranks, decided once.

Used by trainer ranks (and by tools that build the model); everything else asks a `Backend`.
"""

import datetime
import logging
import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm
from megatron.core.models.gpt.gpt_layer_specs import (
    HAVE_TE,
    get_gpt_decoder_block_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import is_te_min_version
from torch.distributed import distributed_c10d

from megatron_rl.backend import fusions
from megatron_rl.backend.cpu import adam, patches
from megatron_rl.backend.cpu.layers import block_spec
from megatron_rl.backend.cpu.pointwise import RMSNorm
from megatron_rl.backend.cpu.sglang import torch_is_for_cpu
from megatron_rl.backend.environment import DETERMINISTIC, GPUS_VARIABLE, named_gpus
from megatron_rl.backend.norms import DEFAULT_NORMS, Norms, arrange
from megatron_rl.config.errors import InputError
from megatron_rl.config.gpus import named_peak
from megatron_rl.config.layer_choice import (
    PLAIN,
    Attention,
    Device,
    Layers,
    choose_layers,
    describe,
    installed_flash_attention,
)
from megatron_rl.config.tree import ModelConfig, OptimizerConfig, ParallelConfig

log = logging.getLogger(__name__)
ABORT_S = 20.0
"""How long a rank waits for NCCL to abort its groups, before it ends without."""
PACKED_SINKS_VERSION = "2.12"
"""First TransformerEngine with sinks of packed sequences (its pull request 2568)."""
PACKED_GATHER_VERSION = "2.18"
"""First TransformerEngine that gathers packed keys and values (its pull request 2829)."""


@dataclass(frozen=True)
class Backend:
    """What `select_backend` decided for this process."""

    device: torch.device
    collectives: Literal["gloo", "nccl"]
    layers: Layers

    def init_distributed(self, parallel: ParallelConfig, *, seed: int, timeout_s: float) -> None:
        """Join torchrun's process group, make Megatron's groups and seed this rank.

        timeout_s: of the collectives of every group. Raises InputError when the count of ranks is
        not the product of the parallel sizes.
        """
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if ranks != parallel.world_size:
            raise InputError(
                f"{ranks} trainer ranks were started, but parallel.tensor={parallel.tensor} x "
                f"context={parallel.context} x pipeline={parallel.pipeline} x "
                f"data={parallel.data} needs {parallel.world_size}"
            )
        dist.init_process_group(
            self.collectives,
            timeout=datetime.timedelta(seconds=timeout_s),
            device_id=self.device if self.device.type == "cuda" else None,
        )
        self.make_groups(parallel, seed=seed, timeout_s=timeout_s)

    def make_groups(self, parallel: ParallelConfig, *, seed: int, timeout_s: float) -> None:
        """Make Megatron's groups of the joined ranks, and seed this one. Collective."""
        # Megatron's extra gloo groups serve checkpoints of the old distributed-optimizer formats.
        parallel_state.initialize_model_parallel(
            parallel.tensor,
            parallel.pipeline,
            parallel.interleaved_chunks,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=parallel.expert_tensor,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=timeout_s / 60,
        )
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed)

    def check_offload(self, optimizer: OptimizerConfig) -> None:
        """Raise InputError when optimizer state shall leave a GPU that is not there."""
        if optimizer.offload and self.device.type == "cpu":
            raise InputError(
                "optimizer.offload = true needs a CUDA device, and this host has none: here "
                "optimizer state is in host memory anyway; nearest possible: false"
            )

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of host memory on the device; the caller does not wait for the copy."""
        if self.device.type == "cpu":
            return tensor
        return self.pin(tensor).to(self.device, non_blocking=True)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor of host memory, for copies that the host does not wait for."""
        # From pageable memory a copy would wait for all that the device has to do before it.
        return tensor if self.device.type == "cpu" else tensor.pin_memory()

    def host_copy(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A copy in host memory that the device reads and writes while the host continues.

        The device may still write it: `wait` before the host reads.
        """
        dtype = dtype or tensor.dtype
        if self.device.type == "cpu":
            return tensor.detach().to(dtype, copy=True)
        copy = torch.empty(tensor.shape, dtype=dtype, device="cpu", pin_memory=True)
        # Converted on the device: the host would wait for a copy that changes the dtype.
        return copy.copy_(tensor.detach().to(dtype), non_blocking=True)

    def peak_flops(self, model: ModelConfig) -> float | None:
        """Peak FLOP/s of one rank in the model's products; None where it is not known."""
        if self.device.type == "cpu":
            return None
        name = torch.cuda.get_device_name(self.device)
        return named_peak(name, is_fp8=model.fp8 != "none")

    def wait(self) -> None:
        """Wait for all work that this rank has given to the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def make_deterministic(self) -> None:
        """Have this process compute the same bits again, for `train.deterministic`.

        Before the first kernel. Raises InputError where a CUDA rank lacks the variables for it.
        """
        missing = missing_for_determinism(self.device.type, os.environ)
        if missing:
            told = " ".join(f"{name}={value}" for name, value in missing.items())
            raise InputError(
                f"train.deterministic=true needs {told} in the environment of trainer ranks: start "
                "them by `megatron-rl run`, which sets it, or set it yourself"
            )
        torch.use_deterministic_algorithms(True)
        # Filling new memory costs bandwidth, and nothing reads memory that it has not written.
        torch.utils.deterministic.fill_uninitialized_memory = False

    def host_group(self, timeout_s: float) -> dist.ProcessGroup:
        """A new group of all trainer ranks for tensors in host memory. Collective."""
        return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))

    def replica_group(self, parallel: ParallelConfig, timeout_s: float) -> dist.ProcessGroup:
        """This rank's group of all that work on the same sequences, for host memory. Collective."""
        if parallel.context == 1 and self.collectives == "gloo":
            return parallel_state.get_model_parallel_group()
        sizes = {"tp": parallel.tensor, "cp": parallel.context, "pp": parallel.pipeline}
        order = parallel_state.RankGenerator(
            **sizes, ep=1, dp=parallel.data, order="tp-cp-ep-dp-pp"
        )
        # Every rank must be in one of these groups. torch 2.14 lets ranks outside a new group split
        # the bound default group, for which NCCL needs all ranks; members of a gloo group never do.
        group, _ = dist.new_subgroups_by_enumeration(
            order.get_ranks("tp-cp-pp"),
            timeout=datetime.timedelta(seconds=timeout_s),
            backend="gloo",
        )
        return group

    def free_cache(self) -> None:
        """Give what torch keeps of freed memory back to the device, for other processes on it."""
        if self.device.type == "cuda":
            # Memory that an engine had opened stays in use until torch asks whether it let go.
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def random_states(self) -> dict[str, Any]:
        """All random states of this rank, as tensors by name."""
        return {
            "host": torch.get_rng_state(),
            "device": torch.cuda.get_rng_state(),
            "tracker": get_cuda_rng_tracker().get_states(),
        }

    def set_random_states(self, states: dict[str, Any]) -> None:
        """Continue from where `random_states` was taken."""
        get_cuda_rng_tracker().set_states(states["tracker"])
        torch.cuda.set_rng_state(states["device"])
        torch.set_rng_state(states["host"])

    def shutdown(self, *, failed: bool = False) -> None:
        """Leave the process groups; a no-op before init_distributed.

        failed: abort the groups, for at most ABORT_S. Destroying an NCCL group waits for its peers,
        which may be gone or wait in another collective.
        """
        if not dist.is_initialized():
            return
        parallel_state.destroy_model_parallel()
        if failed:
            abort = distributed_c10d._abort_process_group
            thread = threading.Thread(target=abort, name="abort", daemon=True)
            thread.start()
            thread.join(ABORT_S)
        else:
            dist.destroy_process_group()

    def layer_spec(
        self, config: TransformerConfig, chunk: int, norms: Norms = DEFAULT_NORMS
    ) -> ModuleSpec | TransformerBlockSubmodules:
        """Modules that the decoder of a chunk of the rank is built of."""
        if self.layers == "transformer_engine":
            parts = {"column": TEColumnParallelLinear, "norm": TENorm}
            return arrange(engine_spec(config, chunk), norms, config, **parts)
        parts = {"column": ColumnParallelLinear, "norm": RMSNorm}
        return arrange(block_spec(config, chunk), norms, config, **parts)

    def context_exchange(
        self, parallel: ParallelConfig, *, has_window: bool, has_sinks: bool = False
    ) -> str:
        """How context ranks exchange keys and values, in TransformerEngine's words.

        has_window: whether attention sees a sliding window. has_sinks: whether its softmax has
        trained sinks. Raises InputError for a way that the layers do not know.
        """
        wanted = parallel.context_exchange
        if self.layers == "local":
            if wanted == "p2p":
                raise InputError(
                    "expert.parallel.context_exchange = 'p2p' needs TransformerEngine's layers; "
                    "the local ones know 'all_gather'"
                )
            return "all_gather"
        if has_sinks and not is_te_min_version(PACKED_SINKS_VERSION):
            raise InputError(
                f"TransformerEngine before {PACKED_SINKS_VERSION} computes no attention sinks of "
                "packed sequences, which this model has: update it (cuDNN 9.18 or later too), or "
                "set expert.model.layers = 'local'"
            )
        if has_sinks and parallel.context > 1:
            raise InputError(
                f"parallel.context = {parallel.context}: TransformerEngine exchanges neither keys "
                "nor values of a softmax with sinks in a ring or by gathering; nearest possible: "
                "1, or expert.model.layers = 'local'"
            )
        if wanted == "all_gather" and not is_te_min_version(PACKED_GATHER_VERSION):
            raise InputError(
                "expert.parallel.context_exchange = 'all_gather' of packed sequences needs "
                f"TransformerEngine {PACKED_GATHER_VERSION}: use 'p2p', or expert.model.layers = "
                "'local'"
            )
        if wanted != "all_gather" and has_window and parallel.context > 1:
            raise InputError(
                f"parallel.context = {parallel.context}: TransformerEngine's ring knows no sliding "
                "window, which this model has; nearest possible: 1, or expert.model.layers = "
                "'local'"
            )
        return "p2p" if wanted == "auto" else wanted

    def transformer_overrides(self, *, deterministic: bool = False) -> dict[str, Any]:
        """TransformerConfig fields that depend on the device and the layers.

        deterministic: `train.deterministic`; on the CPU all operations are so anyway.
        """
        uses_engine = self.layers == "transformer_engine"
        return {
            "use_cpu_initialization": self.device.type == "cpu",
            "apply_rope_fusion": uses_engine,
            # Without TransformerEngine a rank computes its experts one after the other.
            "moe_grouped_gemm": uses_engine,
            "masked_softmax_fusion": False,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            # TransformerEngine's layers do by default: see `fusions.py`.
            "gradient_accumulation_fusion": self.device.type == "cpu",
            "persist_layer_norm": False,
            "deterministic_mode": deterministic and self.device.type != "cpu",
        }


def engine_spec(config: TransformerConfig, chunk: int) -> ModuleSpec | TransformerBlockSubmodules:
    """TransformerEngine's layers of one chunk."""
    if isinstance(config.moe_layer_freq, list):
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=chunk)
    return get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
    )


def missing_for_determinism(device: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that a rank on a device of that type lacks for `train.deterministic`."""
    wanted = DETERMINISTIC if device == "cuda" else {}
    return {name: value for name, value in wanted.items() if environment.get(name) != value}


def select_backend(model: ModelConfig, attention: Attention = PLAIN) -> Backend:
    """Choose for this host and prepare the process: device, patches, fused Adam.

    attention: of the model. Raises InputError when the config asks for what this host cannot give.
    """
    has_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    cuda_device = None
    if not has_cuda:
        _refuse_idle_gpus()
    else:
        capability = torch.cuda.get_device_capability(device)
        cuda_device = Device(capability, installed_flash_attention(), has_engine=HAVE_TE)
    choice = choose_layers(model, attention, cuda_device)
    if choice.reason and os.environ.get("RANK", "0") == "0":
        log.warning(describe(choice))
    layers = choice.layers
    adam.replace_torch_fallback()
    if not has_cuda:
        patches.install()
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        return Backend(torch.device("cpu"), "gloo", layers)
    prepare_cuda(layers)
    torch.cuda.set_device(device)
    return Backend(device, "nccl", layers)


def _refuse_idle_gpus() -> None:
    """Raise InputError when this process is given GPUs, for which torch does not start CUDA."""
    given = os.environ.get(GPUS_VARIABLE, "")
    if torch_is_for_cpu() or not named_gpus(given):
        return
    try:
        torch.cuda.init()
        cause = "torch finds no device"
    # A build without CUDA asserts, if its version does not tell.
    except (RuntimeError, AssertionError) as error:
        cause = str(error)
    raise InputError(
        f"{GPUS_VARIABLE}={given} names GPUs, but CUDA does not start on {socket.gethostname()}: "
        f"{cause}. Look at the driver (`nvidia-smi`, `megatron-rl doctor`), and on hosts with "
        f"NVSwitch at the service nvidia-fabricmanager; or use the CPU: {GPUS_VARIABLE}= (empty)"
    )


def prepare_cuda(layers: Layers) -> None:
    """What Megatron-Core needs in a process that trains on CUDA."""
    if not HAVE_TE:
        patches.define_router_product()
        patches.deny_engine_to_latents()
    if layers == "transformer_engine":
        fusions.accumulate_without_apex()
