"""Whether tests that need vLLM can run here."""

import pytest

from generation.vllm_command import PYTHON_VARIABLE, vllm_python

NEEDS_VLLM = pytest.mark.skipif(
    not vllm_python().exists(),
    reason=f"no vLLM: run `bash tools/install.sh cpu --with vllm`, or set {PYTHON_VARIABLE}",
)
