"""A small project for tools/install.sh whose components are empty wheels; needs no network."""

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STUB_BACKEND = """
import sys; sys.path.insert(0, "{tests}")
from stub_project import write_wheel
def build_editable(folder, config_settings=None, metadata_directory=None):
    return write_wheel(__import__("pathlib").Path(folder), "megatron_rl", "0.1.0").name
"""
STUB_VERSIONS = """
import pathlib, sys
pathlib.Path(sys.argv[3]).write_text(f"  components of mode {sys.argv[1]}\\n")
"""


STUB_LOOPS = """
import pathlib, sys
(pathlib.Path(sys.prefix) / "loops-compiled").touch()
"""


def write_wheel(folder: Path, name: str, version: str) -> Path:
    """A wheel with one empty module."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record += f"{path},sha256={digest.decode()},{len(text)}\n"
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


class Project:
    """A copy of the installer in a project whose components are empty wheels."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "project"
        self.wheels = folder / "wheels"
        self.wheels.mkdir(parents=True)
        (self.root / "tools").mkdir(parents=True)
        (self.root / "requirements").mkdir()
        shutil.copy(ROOT / "tools" / "install.sh", self.root / "tools")
        self.write("tools/versions.py", STUB_VERSIONS)
        self.write("setup.py", "")
        (self.root / "megatron_rl" / "kernels").mkdir(parents=True)
        self.write("megatron_rl/__init__.py", "")
        self.write("megatron_rl/kernels/build.py", STUB_LOOPS)
        self.write("stub_backend.py", STUB_BACKEND.format(tests=Path(__file__).parent))
        backend = 'requires = []\nbuild-backend = "stub_backend"\nbackend-path = ["."]\n'
        self.write("pyproject.toml", f"[build-system]\n{backend}")
        for wheel in ("torch-2.13.0+cpu", "stub_other-1.0", "stub_vision-1.0", "stub_dev-1.0"):
            write_wheel(self.wheels, *wheel.split("-"))
        self.write("requirements/cpu.txt", "torch==2.13.0+cpu\n")
        self.write("requirements/cpu-nodeps.txt", "stub_other==1.0\n")
        self.write("requirements/cpu-sglang-only.txt", "stub_vision==1.0\n")
        self.write("requirements/dev.txt", "stub_dev==1.0\n")

    def write(self, path: str, text: str) -> None:
        (self.root / path).write_text(text)

    def command(self) -> list[str]:
        return [shutil.which("bash"), str(self.root / "tools" / "install.sh")]

    def environment(self) -> dict[str, str]:
        # PYTHONPATH would bring this repository's tools before the project's own.
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHONPATH"))}
        pip = {
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            "PIP_CONFIG_FILE": os.devnull,
        }
        return kept | pip | {"MEGATRON_RL_PYTHON": sys.executable, "MEGATRON_RL_APT": "0"}

    def install(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.command(), *arguments],
            env=self.environment() | environment,
            capture_output=True,
            text=True,
            timeout=100,
        )

    def modules(self, folder: str = "lib") -> set[str]:
        """Names of the stub modules below a folder of .venv."""
        names = ("torch", "stub_other", "stub_vision", "stub_dev", "stub_new")
        found = {path.stem for path in (self.root / ".venv" / folder).rglob("*.py")}
        return found & set(names)
