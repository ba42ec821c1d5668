"""tools/install.sh gpu on a small project: what it asks of the host, how it compiles."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.backend.gpu_host import COMPILED_WITH, RUN_WITH
from tests.tools.stub_project import GPU_PINS, ROOT, Project, write_program, write_wheel

NVCC = 'echo "Cuda compilation tools, release {release}, V{release}.88"'


class GpuHost:
    """A project on a host whose driver and toolkit are scripts."""

    def __init__(self, folder: Path, *, driver: str = "580.65.06", nvcc: str = "13.0") -> None:
        self.project = Project(folder)
        self.project.offer_gpu_packages()
        self.programs = folder / "bin"
        self.toolkit = folder / "toolkit"
        write_program(self.programs / "nvidia-smi", f"echo {driver}")
        write_program(self.toolkit / "bin" / "nvcc", NVCC.format(release=nvcc))
        for name in (*COMPILED_WITH, *RUN_WITH):
            (self.toolkit / name).parent.mkdir(parents=True, exist_ok=True)
            (self.toolkit / name).touch()

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(self.programs), os.environ["PATH"]])
        return {"PATH": path, "CUDA_HOME": str(self.toolkit)}

    def install(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return self.project.install(*arguments, **(self.environment() | more))

    def found(self, name: str) -> dict[str, Any]:
        return json.loads((self.project.root / ".venv" / name).read_text())


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> GpuHost:
    host = GpuHost(tmp_path_factory.mktemp("gpu"))
    done = host.install("gpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "components of mode gpu" in done.stdout
    return host


def test_the_engine_is_compiled_against_the_toolkit_and_the_headers_beside_torch(
    host: GpuHost,
) -> None:
    compiled, venv = host.found("compiled.json"), host.project.root / ".venv"
    assert compiled["CUDA_HOME"] == str(host.toolkit)
    folders = [Path(path) for path in compiled["CPLUS_INCLUDE_PATH"].split(":")]
    assert [path.relative_to(path.parents[1]) for path in folders] == [
        Path("cudnn/include"), Path("nccl/include"),
    ]  # fmt: skip
    assert all((path / f"{path.parent.name}.h").is_file() for path in folders)
    assert compiled["PATH"].split(":")[0] == str(venv / "bin")
    assert compiled["NVTE_FRAMEWORK"] == "pytorch"
    assert compiled["NVTE_PYTORCH_FORCE_BUILD"] == "TRUE"
    assert list(venv.rglob("transformer_engine_torch.py"))


def test_without_a_mode_an_installation_stays_what_it_is(host: GpuHost) -> None:
    done = host.install()
    assert done.returncode == 0, done.stderr
    assert "components of mode gpu" in done.stdout and "nothing changed" in done.stdout


def given_to_pytest(host: GpuHost, *arguments: str) -> dict[str, Any]:
    """What tools/test.sh with these arguments gives pytest."""
    kept = host.project.environment() | host.environment()
    for name in ("MEGATRON_RL_MODE", "OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE"):
        kept.pop(name, None)
    script = str(host.project.root / "tools" / "test.sh")
    done = subprocess.run(
        ["bash", script, *arguments], env=kept, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return host.found("tested.json")


def test_a_share_of_the_exhaustive_tests_runs_with_the_default_ones_on_all_cores(
    host: GpuHost,
) -> None:
    write_program(host.project.root / ".venv" / "bin" / "ruff", "exit 0")
    on_all_cores = ["-n", "logical", "--maxprocesses", "4", "--dist", "loadfile"]
    in_order = ["--no-loadscope-reorder", "--cache-clear"]
    for given, share in ([], "0"), (["--share", "0.25"], "0.25"):
        arguments = given_to_pytest(host, *given)["arguments"]
        assert arguments[-10:] == ["--share", share, *on_all_cores, *in_order]


def test_the_tests_of_a_gpu_host_run_on_its_own_builds_and_settings(host: GpuHost) -> None:
    found = given_to_pytest(host, "-m", "gpu")
    assert found["arguments"][-2:] == ["-m", "gpu"]
    assert found["HF_HUB_OFFLINE"] == "1"
    assert found["PATH"].split(":")[0] == str(host.project.root / ".venv" / "bin")
    assert found["OMP_NUM_THREADS"] is None and found["TORCHDYNAMO_DISABLE"] is None
    # The build of torch that was there still is.
    versions = {path.name for path in (host.project.root / ".venv").rglob("torch-*.dist-info")}
    assert versions == {"torch-2.14.1.dist-info"}


@pytest.mark.exhaustive
def test_another_mode_replaces_the_installation(tmp_path: Path) -> None:
    host = GpuHost(tmp_path)
    assert host.install("cpu").returncode == 0
    left = host.project.root / ".venv" / "of-the-cpu"
    left.touch()
    done = host.install("gpu")
    assert done.returncode == 0, done.stderr
    assert "which is of mode cpu" in done.stdout and not left.exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"driver": "570.124.06"}, "570.124.06; CUDA 13 needs 580 or newer"),
        ({"nvcc": "12.8"}, "nvcc says release 12.8; install the toolkit of CUDA 13.0"),
    ],
)
def test_a_host_that_cannot_build_is_refused_before_anything_is_installed(
    tmp_path: Path, given: dict[str, str], words: str
) -> None:
    host = GpuHost(tmp_path, **given)
    done = host.install("gpu")
    assert done.returncode == 1
    assert words in done.stderr and "this host cannot build what GPUs need" in done.stderr
    assert not (host.project.root / ".venv").exists()


def test_too_little_disk_is_refused_before_anything_is_installed(tmp_path: Path) -> None:
    host = GpuHost(tmp_path)
    # 13 GiB.
    write_program(host.programs / "df", "echo head; echo disk 1 1 $((13 * 1024 * 1024)) 1% /")
    done = host.install("gpu")
    assert done.returncode == 1
    assert "13312 MiB free; mode gpu needs 14336" in done.stderr
    assert "make room there, or move the clone to another disk" in done.stderr
    assert not (host.project.root / ".venv").exists()


@pytest.mark.parametrize(
    ("version", "mode", "needs"),
    [("3.10.12", "gpu", "3.11 or 3.12"), ("3.14.0", "gpu", "3.11 or 3.12"),
     ("3.10.12", "cpu", "3.11 to 3.13"), ("3.14.0", "cpu", "3.11 to 3.13")],
)  # fmt: skip
def test_a_python_without_wheels_is_refused_with_the_fix(
    tmp_path: Path, version: str, mode: str, needs: str
) -> None:
    """3.10 is Ubuntu 22.04's."""
    host, python = GpuHost(tmp_path), tmp_path / "bin" / "python-of-the-host"
    numbers = tuple(map(int, version.split(".")))
    pretend = f"import sys; sys.version_info = {numbers}; code = sys.argv[2]; del sys.argv[1:3]"
    write_program(
        python,
        f'[ "$1" != -V ] || {{ echo Python {version}; exit; }}\n'
        f'exec {sys.executable} -c "{pretend}; exec(code)" "$@"',
    )
    done = host.install(mode, MEGATRON_RL_PYTHON=str(python))
    assert done.returncode == 1
    assert f"is Python {version}; mode {mode} needs Python {needs}" in done.stderr
    assert "uv python install 3.12" in done.stderr
    assert f"bash tools/install.sh {mode}" in done.stderr
    assert not (host.project.root / ".venv").exists()


@pytest.mark.parametrize(
    ("system", "machine"), [("darwin23", "arm64"), ("darwin23", "x86_64"), ("linux-gnu", "aarch64")]
)
def test_another_system_is_refused_in_one_line(tmp_path: Path, system: str, machine: str) -> None:
    """By variables of bash, which keeps those that it is given."""
    done = subprocess.run(
        ["bash", str(ROOT / "tools" / "install.sh")],
        env={"PATH": os.environ["PATH"], "OSTYPE": system, "HOSTTYPE": machine},
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert f"{system} on {machine}" in done.stderr and "needs Linux on x86-64" in done.stderr


def test_a_host_without_network_installs_from_a_folder_alone(tmp_path: Path) -> None:
    host = GpuHost(tmp_path)
    project = host.project
    (tmp_path / "elsewhere").mkdir()
    # Where pip is told to look by itself there is nothing.
    elsewhere = {"PIP_FIND_LINKS": str(tmp_path / "elsewhere")}
    folder = {"MEGATRON_RL_WHEELS": str(project.wheels)}
    done = host.install("gpu", **elsewhere, **folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"packages come from {project.wheels} alone" in done.stdout
    assert host.found("compiled.json")["UV_OFFLINE"] == "1"
    assert host.found("compiled.json")["PIP_NO_INDEX"] == "1"


def test_a_folder_that_lacks_packages_is_refused_before_anything_is_installed(
    tmp_path: Path,
) -> None:
    host = GpuHost(tmp_path)
    project = host.project
    for file in [*project.wheels.glob("stub_nvidia*"), *project.wheels.glob("*torch-2.14.1*")]:
        file.unlink()
    done = host.install("gpu", MEGATRON_RL_WHEELS=str(project.wheels))
    assert done.returncode == 1 and not (project.root / ".venv").exists()
    assert "lacks 2 of the packages of mode gpu" in done.stderr
    assert "torch==2.14.1 stub_nvidia==1.0" in done.stderr
    assert "bash tools/fetch_wheels.sh FOLDER gpu" in done.stderr
    done = host.install("gpu", MEGATRON_RL_WHEELS=str(tmp_path / "nowhere"))
    assert done.returncode == 1 and "nowhere is not a folder" in done.stderr


def test_a_folder_is_filled_with_what_the_installation_asks_for(tmp_path: Path) -> None:
    host = GpuHost(tmp_path)
    project, folder = host.project, tmp_path / "folder"
    # What the source package is read with, and the installer's own.
    names = ("setuptools", "wheel", "pybind11", "packaging")
    project.write("requirements/gpu.txt", GPU_PINS + "".join(f"{name}==1.0\n" for name in names))
    for name in (*names, "uv"):
        write_wheel(project.wheels, name, "1.0")
    script = (project.root / "tools" / "install.sh").read_text()
    project.write("tools/install.sh", re.sub("UV_PIN=uv==[^ ]+", "UV_PIN=uv==1.0", script))
    done = subprocess.run(
        ["bash", str(project.root / "tools" / "fetch_wheels.sh"), str(folder), "gpu"],
        env=project.environment() | host.environment(), capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    held = {path.name.partition("-")[0] for path in folder.iterdir()}
    assert {"torch", "stub_nvidia", "transformer_engine_torch", "pytest", "stub_dev", "uv"} <= held
    assert not (folder / ".read").exists() and not (folder / ".pins.txt").exists()
