"""What is found of a host's driver and toolkit, from programs that say what NVIDIA's say."""

import importlib.metadata
import re
from pathlib import Path

import pytest

from megatron_rl.backend import gpu_host
from megatron_rl.backend.environment import ranks_environment, role_environment
from megatron_rl.backend.gpu_host import (
    COMPILED_WITH,
    MIN_GLIBC,
    RUN_WITH,
    check_compiler,
    check_driver,
    check_glibc,
    check_host,
    find_cuda_home,
)
from megatron_rl.cli import doctor
from tests.tools.stub_project import write_program
from tools.versions import child_of


def write_toolkit(folder: Path) -> None:
    """Every file of CUDA's toolkit that something is compiled or linked with."""
    for name in (*COMPILED_WITH, *RUN_WITH):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    write_program(folder / "bin" / "nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'")


@pytest.mark.parametrize(
    ("says", "is_good", "words"),
    [
        ("580.65.06", True, "580.65.06"),
        ("590.10", True, "590.10"),
        # One line a GPU.
        ("580.65.06\n580.65.06", True, "580.65.06"),
        ("575.57.08", False, "575.57.08; CUDA 13 needs 580 or newer: install a newer driver"),
        ("Driver/library version mismatch", False, "said 'Driver/library version mismatch'"),
        ("", False, "said nothing"),
    ],
)
def test_driver_of_cuda_13_is_580_or_newer(
    tmp_path: Path, says: str, is_good: bool, words: str
) -> None:
    write_program(tmp_path / "nvidia-smi", f"printf '{says}'")
    found = check_driver({"PATH": str(tmp_path)})
    assert found.is_good == is_good and words in found.found


def test_a_host_without_a_driver_may_make_an_image(tmp_path: Path) -> None:
    found = check_driver({"PATH": str(tmp_path)})
    assert found.is_good and found.found.startswith("absent")


@pytest.mark.parametrize(
    ("release", "is_good"), [("13.0", True), ("13.2", True), ("12.9", False), ("14.0", False)]
)
def test_compiler_is_of_cuda_13(tmp_path: Path, release: str, is_good: bool) -> None:
    text = f"Cuda compilation tools, release {release}, V{release}.88"
    write_toolkit(tmp_path)
    write_program(tmp_path / "bin" / "nvcc", f"echo '{text}'")
    found = check_compiler({"CUDA_HOME": str(tmp_path)})
    assert found.is_good == is_good and f"release {release}" in found.found


@pytest.mark.parametrize("missing", (*COMPILED_WITH, *RUN_WITH))
@pytest.mark.parametrize("has_driver", [True, False])
def test_a_toolkit_that_cannot_link_is_noticed(
    tmp_path: Path, missing: str, has_driver: bool
) -> None:
    """One of the compiler alone installs, and engines then die at their first request."""
    write_toolkit(tmp_path)
    (tmp_path / missing).unlink()
    if has_driver:
        write_program(tmp_path / "bin" / "nvidia-smi", "echo 580.65.06")
    found = check_host({"CUDA_HOME": str(tmp_path), "PATH": str(tmp_path / "bin")})
    bad = [one for one in found if not one.is_good]
    if missing in RUN_WITH and not has_driver:
        assert not bad and any(f"lacks {missing}" in one.found for one in found)
        return
    assert len(bad) == 1 and f"lacks {missing}" in bad[0].found
    assert "cuda-toolkit-13-0" in bad[0].found


def test_a_host_without_compiler_is_told_where_it_was_sought(tmp_path: Path) -> None:
    found = check_compiler({"CUDA_HOME": str(tmp_path)})
    assert not found.is_good
    assert f"no {tmp_path}/bin/nvcc" in found.found and "cuda-toolkit-13-0" in found.found


@pytest.mark.parametrize(
    ("said", "is_good"),
    [
        ("glibc 2.39", True),
        ("glibc 2.34", True),
        # Ubuntu 20.04's, RHEL 8's, and another library.
        ("glibc 2.31", False),
        ("glibc 2.28", False),
        ("", False),
    ],
)
def test_a_c_library_without_wheels_is_named_with_the_fix(said: str, is_good: bool) -> None:
    found = check_glibc(said)
    assert found.is_good == is_good and (said or "not glibc") in found.found
    assert is_good or "needs glibc 2.34 or newer, as Ubuntu 22.04" in found.found
    assert [f.what for f in check_host({"PATH": ""})] == [
        "NVIDIA driver",
        "nvcc 13",
        "toolkit for engines",
        "C library",
    ]


def test_the_c_library_is_what_the_pinned_engine_was_built_for() -> None:
    """Of the wheel that the CPU installation has, which is the same release."""
    wheel = importlib.metadata.distribution("sglang").read_text("WHEEL")
    tags = re.findall(r"manylinux_(\d+)_(\d+)_", wheel)
    assert tags and min(tuple(map(int, tag)) for tag in tags) == MIN_GLIBC


def test_toolkit_is_sought_where_torch_and_flashinfer_seek_it(tmp_path: Path) -> None:
    write_toolkit(tmp_path / "cuda")
    path = {"PATH": str(tmp_path / "cuda" / "bin")}
    assert find_cuda_home(path) == tmp_path / "cuda"
    assert find_cuda_home(path | {"CUDA_PATH": "/other"}) == Path("/other")
    assert find_cuda_home(path | {"CUDA_PATH": "/other", "CUDA_HOME": "/one"}) == Path("/one")
    assert find_cuda_home({"PATH": ""}) == Path("/usr/local/cuda")


def test_a_script_that_starts_another_compiler_is_not_the_toolkit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_toolkit(tmp_path / "cuda")
    monkeypatch.setattr(gpu_host, "DEFAULT_CUDA_HOME", tmp_path / "cuda")
    write_program(tmp_path / "local" / "bin" / "nvcc", f'exec {tmp_path}/cuda/bin/nvcc "$@"')
    path = {"PATH": str(tmp_path / "local" / "bin")}
    assert find_cuda_home(path) == tmp_path / "cuda"
    assert check_compiler(path).is_good
    # Roles get the folder, as the engine would not find it.
    monkeypatch.setenv("PATH", path["PATH"])
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert role_environment("cuda")["CUDA_HOME"] == str(tmp_path / "cuda")
    assert "CUDA_HOME" not in role_environment("cpu")


def test_doctor_checks_the_compiler_where_engines_run_on_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"torch": "2.14.1", "flashinfer-python": "0.7.2", "ninja": "1.13.0"}
    monkeypatch.setattr(doctor, "_version", versions.get)
    monkeypatch.setattr(doctor, "RANK_MODULE", "no_such_rank")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    texts = {what: text for _, what, text in doctor._check_gpu_host()}
    assert texts["transformer-engine-torch"].startswith("missing: bash tools/install.sh gpu")
    assert f"no {tmp_path}/bin/nvcc; install the toolkit of CUDA 13.0" in texts["nvcc 13"]
    assert "No module named 'no_such_rank'" in texts["import of a trainer rank"]
    found = {what: is_good for is_good, what, _ in doctor._check_gpu_host()}
    # This test's toolkit has no compiler, and nothing was compiled with it.
    assert found["nvcc 13"] is False and found["transformer-engine-torch"] is False
    assert found["GPUs"] is found["flashinfer-python"] is True
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [good for good, _, _ in doctor._check_gpu_host()] == [True]
    # A GPU that the CPU's build of torch cannot use takes nothing from a run.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setitem(versions, "torch", "2.13.0+cpu")
    [(is_good, _, text)] = doctor._check_gpu_host()
    assert is_good and "bash tools/install.sh gpu" in text


def test_a_rank_is_imported_under_the_variables_that_it_gets(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text("import os; os.environ['OF_THE_RANK']")
    variables = {"PYTHONPATH": str(tmp_path)}
    assert "KeyError: 'OF_THE_RANK'" in doctor.find_import_fault("rank", variables)
    assert doctor.find_import_fault("rank", variables | {"OF_THE_RANK": "1"}) == ""
    assert child_of("gpu") == ("megatron-rl", doctor.RANK_MODULE, ranks_environment("cuda", 1))
