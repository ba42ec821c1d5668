"""The shims of SGLang's processes, imported as those import them: from a folder of their own."""

import importlib
import sys
from types import ModuleType

from megatron_rl.backend.cpu import sglang as sglang_cpu


def import_shim(name: str) -> ModuleType:
    """Module of megatron_rl/backend/cpu/sglang/site, which is no package of ours."""
    folder = str(sglang_cpu.SITE_DIR)
    sys.path.append(folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)
