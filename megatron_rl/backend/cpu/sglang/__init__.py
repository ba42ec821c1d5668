"""What SGLang needs to run without CUDA: environment, flags, and shims for its processes.

Used by `generation/sglang_engine.py`. The modules under `site/` are imported by the server's own
processes through PYTHONPATH, never by ours.
"""

import ctypes
import importlib.metadata
import json
import os
import sys
from pathlib import Path

SITE_DIR = Path(__file__).parent / "site"
TORCHVISION_DIR = "sglang-only"
FFN_MULTIPLE = 32
"""SGLang 0.5.23 pads the MLP units of each tensor rank to a multiple of it, only on the CPU."""


def torch_is_for_cpu(torch_version: str | None = None) -> bool:
    """Whether torch is a build without CUDA, as `tools/install.sh cpu` installs it.

    torch_version: None: the installed package's, which is read without loading torch.
    """
    try:
        given = importlib.metadata.version("torch") if torch_version is None else torch_version
    except importlib.metadata.PackageNotFoundError:
        return False
    return given.endswith("+cpu")


def is_needed() -> bool:
    """Whether engines compute on the CPU: torch is built for it, or the driver has no device."""
    # A laptop has the driver of its card, whatever is installed here.
    if torch_is_for_cpu():
        return True
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    count = ctypes.c_int(0)
    failed = driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0
    return failed or count.value == 0


def server_environment(tensor_parallel: int) -> dict[str, str]:
    """Variables to add to the server's environment.

    torchvision's wheel breaks `import transformers` in every process without CUDA that does not
    define its operators first, so it lies in a separate folder next to the venv's site-packages.
    """
    inherited = os.environ.get("PYTHONPATH", "")
    path = [str(SITE_DIR), str(Path(sys.prefix) / TORCHVISION_DIR), *filter(None, [inherited])]
    environment = {
        "PYTHONPATH": os.pathsep.join(path),
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        # More threads made SGLang 0.5.23 ten times slower on two cores.
        "OMP_NUM_THREADS": "1",
        # Weights and cache in pages of 2 MB: attention reads all over the cache.
        "THP_MEM_ALLOC_ENABLE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if tensor_parallel > 1:
        # Pins each rank to a core; without it SGLang wants a NUMA node for each.
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(tensor_parallel)))
    return environment


def server_flags() -> list[str]:
    """Flags of `sglang.launch_server` on the CPU, in addition to those for every device.

    Without --sleep-on-idle an idle scheduler takes most of a core.
    """
    return ["--device", "cpu", "--attention-backend", "torch_native", "--sleep-on-idle"]


def family_environment(module: str) -> dict[str, str]:
    """Variables that keep SGLang from importing all model families but `module`."""
    return {"SGLANG_EXTERNAL_MODEL_PACKAGE": "run_models", "MEGATRON_RL_MODEL_FAMILY": module}


def architecture_of(model: Path) -> str:
    """The architecture that a model folder's config.json names; "" if it names none."""
    named = json.loads((model / "config.json").read_text()).get("architectures")
    return named[0] if named else ""
