"""Start-up hook of SGLang's processes on hosts without CUDA; Python imports it by its name.

SGLang's scheduler and detokenizer are forked, not spawned: spawned they import everything again,
which takes ten seconds of a core each. Some modules are prepared when SGLang imports them:
- torchvision: its CUDA-built wheel registers fakes for two C++ operators that are absent without
  CUDA, so they are defined first.
- those in NEEDED: a module of this folder replaces what fails in them without CUDA.
- those in FASTER: a module of this folder replaces what is slow in them. Only in the version that
  the patches were written for, and not under MEGATRON_RL_SGLANG_PATCHES=needed.
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

WRITTEN_FOR = "0.5.23"
"""Version of SGLang whose code FASTER replaces."""
WANTED_VARIABLE = "MEGATRON_RL_SGLANG_PATCHES"
FASTER = {
    "sglang.srt.layers.attention.torch_native_backend": "batched_attention",
    "sglang.srt.models.llama": "lean_decoder:install_llama",
    "sglang.srt.models.qwen2": "lean_decoder:install_qwen2",
    "sglang.srt.layers.activation": "fused_layers:install_activation",
    "sglang.srt.layers.layernorm": "fused_layers:install_norm",
    "sglang.srt.layers.rotary_embedding.base": "fused_layers:install_rotary",
    "sglang.srt.layers.quantization.unquant": "packed_linear",
    "sglang.srt.layers.logits_processor": "output_layer",
    "sglang.srt.model_executor.model_runner_components.weight_updater": (
        "packed_linear:install_updates"
    ),
    "sglang.srt.layers.sampler": "inverse_sampling",
    "sglang.srt.mem_cache.allocator.token": "sorted_slots",
    "torch": "uncompiled",
}
"""SGLang's module -> ours and the function called with it; `install` if none is named."""
NEEDED = {
    # The generator's own way to the scheduler: `generation/sglang_direct.py`.
    "sglang.srt.managers.scheduler": "direct_requests",
    "sglang.srt.state_capturer.base": "unpinned_memory",
}


def patches() -> dict[str, str]:
    """The patches that this process applies."""
    if os.environ.get(WANTED_VARIABLE) == "needed":
        return NEEDED
    found = version("sglang")
    if found.partition(".post")[0] != WRITTEN_FOR:
        sys.stderr.write(
            f"SGLang {found}: what makes {WRITTEN_FOR} faster without CUDA is off; install "
            f"{WRITTEN_FOR} to have it\n"
        )
        return NEEDED
    return NEEDED | FASTER


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
