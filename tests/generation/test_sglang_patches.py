"""Which of SGLang's modules are replaced in its processes without CUDA."""

import os
import subprocess
import sys

import pytest

from generation.sglang_cpu import SITE_DIR

PROGRAM = """
import sitecustomize
sitecustomize.version = lambda package: {found!r}
chosen = sitecustomize.patches()
print(chosen == sitecustomize.NEEDED, chosen == sitecustomize.NEEDED | sitecustomize.FASTER)
"""


@pytest.mark.parametrize(
    ("found", "wanted", "is_all"),
    [("0.5.23", "", True), ("0.5.23.post1", "", True), ("0.5.24", "", False),
     ("0.5.23", "needed", False)],
)  # fmt: skip
def test_patches_for_speed_are_off_in_another_version(
    found: str, wanted: str, is_all: bool
) -> None:
    environment = os.environ | {
        "PYTHONPATH": str(SITE_DIR), "MEGATRON_RL_SGLANG_PATCHES": wanted,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(found=found)],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == [str(not is_all), str(is_all)], done.stderr
    assert ("is off; install 0.5.23" in done.stderr) == (found == "0.5.24")
