"""Start-up hook of SGLang's processes on hosts without CUDA; Python imports it by its name.

SGLang's scheduler and detokenizer are forked, not spawned: spawned they import everything again,
which takes ten seconds of a core each. Some modules are prepared when SGLang imports them:
- torchvision: its CUDA-built wheel registers fakes for two C++ operators that are absent without
  CUDA, so they are defined first.
- those in PATCHES: a module of this folder replaces what fails or is slow in them without CUDA. A
  patch for speed applies only in the version of SGLang that it was written for, and not under
  MEGATRON_RL_SGLANG_PATCHES=needed. Without `direct_requests` the generator uses HTTP.
"""

import importlib
import importlib.abc
import importlib.machinery
import multiprocessing
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from types import ModuleType
from typing import NamedTuple

WANTED_VARIABLE = "MEGATRON_RL_SGLANG_PATCHES"
"""Variable: "needed" leaves out all patches that only make SGLang faster."""


class Patch(NamedTuple):
    """A change of one module of SGLang, or of torch."""

    target: str
    """Our module, and its function if that is not called `install`, as module:function."""
    written_for: str = ""
    """The version of SGLang whose code the patch replaces: off in any other. "": needed in all."""


PATCHES = {
    "sglang.srt.state_capturer.base": Patch("needed_on_cpu:install_choices"),
    "sglang.srt.layers.quantization.fp8": Patch("needed_on_cpu:install_fp8"),
    "sglang.srt.models.deepseek_common.attention_backend_handler": Patch(
        "needed_on_cpu:install_latents"
    ),
    "sglang.srt.layers.rotary_embedding.factory": Patch("needed_on_cpu:install_latent_rotary"),
    "sglang.srt.arg_groups.model_hook": Patch("needed_on_cpu:install_sink_choice"),
    "sglang.srt.models.gpt_oss": Patch("needed_on_cpu:install_sinks"),
    # The generator's own way to the scheduler: `generation/sglang_direct.py`.
    "sglang.srt.managers.scheduler": Patch("direct_requests", "0.5.23"),
    "sglang.srt.layers.attention.torch_native_backend": Patch("batched_attention", "0.5.23"),
    "sglang.srt.models.llama": Patch("lean_decoder:install_llama", "0.5.23"),
    "sglang.srt.models.qwen2": Patch("lean_decoder:install_qwen2", "0.5.23"),
    "sglang.srt.layers.activation": Patch("fused_layers:install_activation", "0.5.23"),
    "sglang.srt.layers.layernorm": Patch("fused_layers:install_norm", "0.5.23"),
    "sglang.srt.layers.rotary_embedding.base": Patch("fused_layers:install_rotary", "0.5.23"),
    "sglang.srt.layers.quantization.unquant": Patch("packed_linear", "0.5.23"),
    "sglang.srt.layers.logits_processor": Patch("output_layer", "0.5.23"),
    "sglang.srt.model_executor.model_runner_components.weight_updater": Patch(
        "packed_linear:install_updates", "0.5.23"
    ),
    "sglang.srt.layers.sampler": Patch("inverse_sampling", "0.5.23"),
    "sglang.srt.sampling.sampling_batch_info": Patch("seeded_draws", "0.5.23"),
    "sglang.srt.mem_cache.allocator.token": Patch("batched_attention:install_sorted", "0.5.23"),
    "torch": Patch("megatron_rl.backend.no_compiler", "0.5.23"),
}
"""By the module that is changed."""


def patches() -> dict[str, str]:
    """Module -> target of each patch that this process applies."""
    found = version("sglang").partition(".post")[0]
    is_needed_only = os.environ.get(WANTED_VARIABLE) == "needed"
    off = {
        name
        for name, patch in PATCHES.items()
        if patch.written_for and (is_needed_only or patch.written_for != found)
    }
    if off and not is_needed_only:
        versions = sorted({PATCHES[name].written_for for name in off})
        sys.stderr.write(
            f"SGLang {found}: {len(off)} of {len(PATCHES)} patches that make it faster without "
            f"CUDA are off; they were written for {', '.join(versions)}\n"
        )
    return {name: patch.target for name, patch in PATCHES.items() if name not in off}


def define_torchvision_operators() -> None:
    """Define the operators whose fakes torchvision 0.28 registers at import."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    # The definitions vanish with the library object.
    torch._megatron_rl_torchvision = library


class _PatchingLoader(importlib.abc.Loader):
    """Loads a module as `inner` does, then lets `patch` change it."""

    def __init__(self, inner: importlib.abc.Loader, patch: str) -> None:
        self._inner = inner
        self._patch = patch

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        ours, _, function = self._patch.partition(":")
        getattr(importlib.import_module(ours), function or "install")(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Sees imports go by; leaves the search itself to Python's own finder."""

    def __init__(self) -> None:
        self._patches = patches()
        self._awaited = {"torchvision", *self._patches}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._awaited:
            return None
        # Before the search below: importing what a module needs comes back here.
        self._awaited.discard(name)
        if name == "torchvision":
            define_torchvision_operators()
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader, self._patches[name])
        return spec


def fork_children() -> None:
    """Let SGLang's choice of start method, "spawn", mean "fork".

    Spawning is for CUDA, which does not survive a fork; without CUDA nothing has started threads
    by the time SGLang 0.5.23 starts its processes.
    """
    multiprocessing.set_start_method("fork")
    # SGLang sets "spawn" by force when its server starts: that call must do nothing.
    multiprocessing.set_start_method = lambda method, force=False: None


fork_children()
# In front of Python's own finders, which would find the modules without patching them.
sys.meta_path.insert(0, _Finder())
