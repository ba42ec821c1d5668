"""A wheel of this tree in a fresh environment, away from the clone; shared by tests of it."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD_S = 100.0


def tracked_files() -> list[str]:
    """Files of this tree that Git has, or would take."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    ).stdout.splitlines()  # fmt: skip
    return sorted(name for name in listed if (ROOT / name).is_file() and name != ".venv")


def copy_tree(target: Path) -> None:
    """What a clone has, and nothing that was built in this one."""
    for name in tracked_files():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target / name)


def build_wheel(source: Path, out: Path) -> Path:
    """The wheel of a folder; without network, by the setuptools that is installed."""
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", out, source)
    (wheel,) = out.glob("*.whl")
    return wheel


def pip(*arguments: object) -> None:
    """`pip ...` that may not go to an index."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("PIP_")}
    done = subprocess.run(
        [sys.executable, "-m", "pip", *map(str, arguments)],
        env=kept | {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull},
        capture_output=True, text=True, timeout=BUILD_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


class Installed:
    """The environment: the wheel is its own, components come from that of the tests."""

    def __init__(self, wheel: Path, folder: Path) -> None:
        self.folder = folder
        self.elsewhere = folder / "elsewhere"
        self.elsewhere.mkdir(parents=True)
        self.prefix = folder / "venv"
        venv.create(self.prefix, with_pip=False)
        self.packages = self.prefix / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
        # The .pth files in a folder that a .pth names are ignored: no editable install.
        (self.packages / "components.pth").write_text(sysconfig.get_path("purelib") + "\n")
        # What tools/install.sh puts beside the packages.
        (self.prefix / "sglang-only").symlink_to(Path(sys.prefix) / "sglang-only")
        pip("--python", self.python, "install", "--no-deps", wheel)

    @property
    def python(self) -> Path:
        """The interpreter."""
        return self.prefix / "bin" / "python"

    def call(self, *words: object, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """A program of the environment's bin, in a folder that has nothing."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        return subprocess.run(
            [str(self.prefix / "bin" / str(words[0])), *map(str, words[1:])],
            cwd=self.elsewhere,
            env=inherited | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"},
            capture_output=True, text=True, timeout=timeout_s,
        )  # fmt: skip
