"""Makes the virtual environment of the peer, TRL, from exact pins; instant when it is there."""

import hashlib
import shutil
import sys
from pathlib import Path

from tools.bench.children import ChildFailed, run_child

PINS = Path(__file__).with_name("requirements-trl.txt")
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_INSTALL_TIMEOUT_S = 1200.0


def make_trl_venv(folder: Path) -> Path:
    """The interpreter of an environment that holds exactly the pins. Raises ChildFailed."""
    python = folder / "bin" / "python"
    stamp = folder / ".installed"
    wanted = fingerprint(folder)
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    log = folder.with_name(f"{folder.name}-log")
    run_child(
        [sys.executable, "-m", "venv", folder], log=log / "venv.log", timeout_s=_INSTALL_TIMEOUT_S
    )
    _install(python, log)
    stamp.write_text(wanted)
    return python


def fingerprint(folder: Path) -> str:
    """Changes with the pins, the interpreter and the place: a virtual environment cannot move."""
    text = f"{PINS.read_text()}\n{sys.version}\n{sys.base_prefix}\n{folder.resolve()}"
    return hashlib.sha256(text.encode()).hexdigest()


def torch_pin() -> str:
    """The line of the pins that names torch's CPU build."""
    return next(line for line in PINS.read_text().splitlines() if line.startswith("torch=="))


def _install(python: Path, log: Path) -> None:
    # --no-deps: the pins are the whole closure, so nothing is resolved.
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    pip += ["--no-compile", "--progress-bar", "off", "--retries", "2", "--no-deps"]
    try:
        run_child([*pip, torch_pin()], log=log / "torch.log", timeout_s=_INSTALL_TIMEOUT_S)
    except ChildFailed:
        # The CPU build has an index of its own; a mirror may carry it, so that comes first.
        run_child(
            [*pip, "--index-url", TORCH_CPU_INDEX, torch_pin()],
            log=log / "torch-index.log",
            timeout_s=_INSTALL_TIMEOUT_S,
        )
    run_child([*pip, "-r", PINS], log=log / "pins.log", timeout_s=_INSTALL_TIMEOUT_S)
