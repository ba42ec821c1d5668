"""Which of SGLang's modules are replaced in its processes without CUDA."""

import os
import subprocess
import sys

import pytest

from megatron_rl.backend.cpu.sglang import SITE_DIR

PROGRAM = """
import sitecustomize
sitecustomize.version = lambda package: {found!r}
table = sitecustomize.PATCHES
table["sglang.srt.models.llama"] = table["sglang.srt.models.llama"]._replace(written_for="0.5.24")
print(*sitecustomize.patches())
"""
NEEDED = {
    "sglang.srt.state_capturer.base",
    "sglang.srt.layers.quantization.fp8",
    "sglang.srt.models.deepseek_common.attention_backend_handler",
    "sglang.srt.layers.rotary_embedding.factory",
    "sglang.srt.arg_groups.model_hook",
    "sglang.srt.models.gpt_oss",
}
LLAMA = "sglang.srt.models.llama"


@pytest.mark.parametrize(
    ("found", "wanted", "words"),
    [("0.5.23", "", "1 of 20 patches"), ("0.5.23.post1", "", "written for 0.5.24"),
     ("0.5.24", "", "13 of 20 patches"), ("0.5.23", "needed", "")],
)  # fmt: skip
def test_each_patch_for_speed_is_off_in_a_version_that_it_was_not_written_for(
    found: str, wanted: str, words: str
) -> None:
    """Of the patches one is said to be written for 0.5.24, the others are for 0.5.23."""
    environment = os.environ | {
        "PYTHONPATH": str(SITE_DIR), "MEGATRON_RL_SGLANG_PATCHES": wanted,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(found=found)],
        env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    applied = set(done.stdout.split())
    assert NEEDED <= applied, done.stderr
    assert (LLAMA in applied) == (found == "0.5.24")
    assert len(applied) == (6 if wanted else 7 if found == "0.5.24" else 19)
    assert words in done.stderr
