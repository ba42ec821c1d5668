"""A small project for tools/install.sh whose components are empty wheels; needs no network."""

import base64
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("install.sh", "install_steps.sh", "install_wheels.sh", "fetch_wheels.sh", "test.sh")
GPU_HOST = ROOT / "megatron_rl" / "backend" / "gpu_host.py"
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


STUB_PYTEST = """
import json, os, pathlib, sys
names = ("OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE", "HF_HUB_OFFLINE", "PATH")
found = {"arguments": sys.argv[1:]} | {name: os.environ.get(name) for name in names}
(pathlib.Path(sys.prefix) / "tested.json").write_text(json.dumps(found))
"""

# What is compiled on a GPU host: its build says what it was given.
STUB_ENGINE = """
import json, os, pathlib, sys; sys.path.insert(0, "{tests}")
from stub_project import write_wheel
def build_wheel(folder, config_settings=None, metadata_directory=None):
    names = ("PATH", "CUDA_HOME", "CPLUS_INCLUDE_PATH", "PIP_NO_INDEX", "UV_OFFLINE")
    found = {{name: os.environ.get(name) for name in names}}
    found |= {{name: text for name, text in os.environ.items() if name.startswith("NVTE_")}}
    import torch
    (pathlib.Path(sys.prefix) / "compiled.json").write_text(json.dumps(found))
    return write_wheel(pathlib.Path(folder), "transformer_engine_torch", "2.12.0").name
"""
GPU_PINS = "torch==2.14.1\nstub_nvidia==1.0\ntransformer-engine-torch==2.12.0\n"


def write_sdist(folder: Path, name: str, version: str, backend: str) -> None:
    """A source package whose build backend is this module."""
    build = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {"PKG-INFO": metadata, "pyproject.toml": build, "backend.py": backend}
    with tarfile.open(folder / f"{name}-{version}.tar.gz", "w:gz") as archive:
        for path, text in files.items():
            entry = tarfile.TarInfo(f"{name}-{version}/{path}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))


def write_program(path: Path, text: str) -> None:
    """An executable script of the shell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def write_wheel(
    folder: Path, name: str, version: str, contents: Mapping[str, str] = MappingProxyType({})
) -> Path:
    """A wheel with one module, empty unless `contents` says otherwise, and other files."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": "",
        **contents,
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
        for script in SCRIPTS:
            shutil.copy(ROOT / "tools" / script, self.root / "tools")
        self.write("tools/versions.py", STUB_VERSIONS)
        self.write("setup.py", "")
        (self.root / "megatron_rl" / "backend" / "cpu" / "kernels").mkdir(parents=True)
        self.write("megatron_rl/__init__.py", "")
        self.write("megatron_rl/backend/cpu/kernels/build.py", STUB_LOOPS)
        shutil.copy(GPU_HOST, self.root / "megatron_rl" / "backend")
        self.write("stub_backend.py", STUB_BACKEND.format(tests=Path(__file__).parent))
        backend = 'requires = []\nbuild-backend = "stub_backend"\nbackend-path = ["."]\n'
        self.write("pyproject.toml", f"[build-system]\n{backend}")
        for wheel in ("torch-2.13.0+cpu", "stub_other-1.0", "stub_vision-1.0", "stub_dev-1.0"):
            write_wheel(self.wheels, *wheel.split("-"))
        self.write("requirements/cpu.txt", "torch==2.13.0+cpu\n")
        self.write("requirements/cpu-nodeps.txt", "stub_other==1.0\n")
        self.write("requirements/cpu-sglang-only.txt", "stub_vision==1.0\n")
        self.write("requirements/dev.txt", "stub_dev==1.0\n")
        self.write("requirements/gpu.txt", GPU_PINS)
        self.write("requirements/hashes.txt", "# none\n")

    def offer_gpu_packages(self) -> None:
        """Put what mode gpu installs among the wheels, and a pytest that tells how it was run."""
        write_wheel(self.wheels, "torch", "2.14.1")
        headers = {f"nvidia/{part}/include/{part}.h": "" for part in ("cudnn", "nccl")}
        write_wheel(self.wheels, "stub_nvidia", "1.0", headers)
        engine = STUB_ENGINE.format(tests=Path(__file__).parent)
        write_sdist(self.wheels, "transformer_engine_torch", "2.12.0", engine)
        write_wheel(self.wheels, "pytest", "1.0", {"pytest.py": STUB_PYTEST})
        self.write("requirements/dev.txt", "stub_dev==1.0\npytest==1.0\n")

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
            timeout=200,
        )

    def modules(self, folder: str = "lib") -> set[str]:
        """Names of the stub modules below a folder of .venv."""
        names = ("torch", "stub_other", "stub_vision", "stub_dev", "stub_new")
        found = {path.stem for path in (self.root / ".venv" / folder).rglob("*.py")}
        return found & set(names)
