"""An installation for the CPU on a host with NVIDIA's driver, such as a laptop with a card.

Each program runs with a stub of the driver, which says that there are two devices.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.backend.cpu.sglang import torch_is_for_cpu
from tests.generation.precision import PATIENCE
from tests.generation.tiny_model import make_model
from tests.tools.stub_project import write_program

pytestmark = pytest.mark.skipif(not torch_is_for_cpu(), reason="an installation for GPUs")
ROOT = Path(__file__).resolve().parents[2]
DRIVER = """
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
"""
SAYS = """
import json, sys
from generation.engine import engine_setup
from generation.sglang_command import server_command, server_environment
from megatron_rl.backend.cpu import sglang
from megatron_rl.backend.environment import device_of_host
from megatron_rl.config.tree import Config
from megatron_rl.launcher.placement import Machines, found_gpus, listed_gpus

config = Config(model={"path": sys.argv[1] + "/old"})
setup = engine_setup(config, 0, ())
print(json.dumps({
    "engine": sglang.is_needed(), "found": found_gpus(), "listed": listed_gpus(),
    "device": device_of_host(listed_gpus()), "placed": len(Machines().place(config)),
    "command": server_command(setup, "loader"), "environment": server_environment(setup),
}))
"""
SERVES = """
import json, sys
from pathlib import Path
from generation.sglang_engine import SGLangEngine
from megatron_rl.protocol.types import Sampling
from tests.generation.engine_driver import driven, make_setup

folder = Path(sys.argv[1])
with driven(SGLangEngine(make_setup(folder, folder / "engine.log"))) as driver:
    found = driver.run(driver.collect([3, 4, 5, 6], Sampling(7, 0.0), [0, 1]))
print(json.dumps([len(one.token_ids) for one in found]))
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the driver's library and program."""
    folder = tmp_path_factory.mktemp("driver")
    library = folder / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=DRIVER, text=True, check=True, timeout=60)
    write_program(folder / "nvidia-smi", "printf '0\\n1\\n'")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one model, `old`."""
    folder = tmp_path_factory.mktemp("model")
    make_model(folder / "old", seed=0)
    return folder


def ask(program: str, driver: Path, model: Path, packages: Path | None = None) -> Any:
    """What a process beside the driver prints; packages: come before those installed."""
    variables = os.environ | {
        "LD_LIBRARY_PATH": str(driver),
        "PATH": f"{driver}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, filter(None, [packages, ROOT]))),
    }
    variables.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run(
        [sys.executable, "-c", program, str(model)], env=variables, capture_output=True, text=True,
        timeout=200 * PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_all_processes_compute_on_the_cpu_and_no_gpu_is_given_to_any(
    driver: Path, model: Path
) -> None:
    said = ask(SAYS, driver, model)
    assert (said["found"], said["listed"], said["device"]) == (["0", "1"], [], "cpu")
    assert said["engine"] is True and said["placed"] == 0
    command, environment = said["command"], said["environment"]
    assert command[command.index("--device") + 1] == "cpu"
    assert environment["CUDA_VISIBLE_DEVICES"] == "" and environment["SGLANG_USE_CPU_ENGINE"] == "1"
    assert environment["PYTHONPATH"].startswith(f"{ROOT}/megatron_rl/backend/cpu/sglang/site:")


def test_the_same_host_uses_its_gpus_with_torch_for_them(
    driver: Path, model: Path, packages_for_gpus: Path
) -> None:
    said = ask(SAYS, driver, model, packages_for_gpus)
    assert (said["listed"], said["device"]) == (["0", "1"], "cuda")
    # The first node takes both: the trainer one, the engine the other.
    assert said["engine"] is False and said["placed"] == 1
    assert "--device" not in said["command"]
    assert "CUDA_VISIBLE_DEVICES" not in said["environment"]


@pytest.mark.exhaustive
@pytest.mark.slow(20)
@pytest.mark.timeout(220 * PATIENCE)
def test_a_real_engine_serves_there(driver: Path, model: Path) -> None:
    lengths = ask(SERVES, driver, model)
    # Greedy: both completions are the same one.
    assert lengths[0] == lengths[1] and 1 <= lengths[0] <= 7
