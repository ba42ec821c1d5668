"""The pins of the GPU installation agree with each other, by the metadata recorded beside them."""

from pathlib import Path

import msgspec
import pytest

from tools.lock_gpu import (
    BELOW,
    LOCK,
    PYTHONS,
    RECORD,
    Recorded,
    find_conflicts,
    parse_pin,
    read_pins,
)

FOLDER = LOCK.parent
# What torch 2.11.0 said of itself, where it differs from what later releases say.
TORCH_2_11 = Recorded("2.11.0", ">=3.10", ["setuptools<82", "filelock"])


def recorded() -> dict[str, Recorded]:
    return msgspec.json.decode(RECORD.read_bytes(), type=dict[str, Recorded])


def locked() -> dict[str, str]:
    return read_pins(LOCK) | read_pins(FOLDER / "dev.txt")


def wanted() -> set[str]:
    above, _, below = LOCK.read_text().partition(BELOW)
    assert below.strip()
    pins = (line for line in above.splitlines() if line and not line.startswith("#"))
    return {parse_pin(pin)[0] for pin in pins} | set(read_pins(FOLDER / "dev.txt"))


@pytest.mark.parametrize("python", PYTHONS)
def test_everything_a_gpu_host_installs_is_pinned_and_agrees(python: str) -> None:
    assert find_conflicts(wanted(), locked(), recorded(), python) == []


def test_setuptools_that_torch_refuses_is_a_conflict() -> None:
    pins = locked() | {"torch": "2.11.0", "setuptools": "84.2.1"}
    found = find_conflicts(wanted(), pins, recorded() | {"torch": TORCH_2_11}, "3.12")
    assert "torch==2.11.0 needs setuptools<82, but setuptools==84.2.1 is pinned" in found
    pins["setuptools"] = "81.0.0"
    others = recorded() | {"torch": TORCH_2_11, "setuptools": Recorded("81.0.0", ">=3.9", [])}
    assert not any("setuptools" in line for line in find_conflicts(wanted(), pins, others, "3.12"))


@pytest.mark.parametrize(
    ("name", "other", "who"),
    [
        ("tokenizers", "0.22.2", "sglang==0.5.23"),
        ("nvidia-nccl-cu13", "2.28.9", "torch==2.14.1"),
        ("transformer-engine-cu13", "2.13.0", "transformer-engine-torch==2.12.0"),
    ],
)
def test_another_release_of_a_pin_is_refused_by_who_needs_it(
    name: str, other: str, who: str
) -> None:
    found = find_conflicts(wanted(), locked() | {name: other}, recorded(), "3.12")
    assert any(line.startswith(f"{who} needs {name}==") for line in found), found


def test_missing_and_needless_pins_are_named() -> None:
    pins = locked() | {"left-over": "1.0"}
    del pins["triton"]
    found = find_conflicts(wanted(), pins, recorded(), "3.12")
    assert "nobody needs left-over==1.0" in found
    assert any("triton" in line and "not pinned" in line for line in found)


def test_markers_and_extras_decide_what_is_needed() -> None:
    record = {
        "a": Recorded("1.0", ">=3.11", ["b[fast]>=2", "w; sys_platform == 'win32'"]),
        "b": Recorded("2.5", "", ["c<2; extra == 'fast'", "d; extra == 'slow'"]),
        "c": Recorded("1.9", ">=3.12", ["e; python_version < '3.12'"]),
    }
    pins = {"a": "1.0", "b": "2.5", "c": "1.9"}
    assert find_conflicts(["a"], pins, record, "3.12") == []
    assert find_conflicts(["a"], pins, record, "3.11") == [
        "c==1.9 needs Python >=3.12",
        "c==1.9 needs e, which is not pinned",
    ]
    assert find_conflicts(["b"], pins, record, "3.12") == [
        "nobody needs a==1.0",
        "nobody needs c==1.9",
    ]


def test_compilers_and_runtime_of_cuda_are_of_one_release() -> None:
    pins = locked()
    parts = ("cuda-toolkit", "nvidia-cuda-runtime", "nvidia-cuda-nvrtc", "nvidia-cuda-nvcc",
             "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-cccl", "nvidia-nvjitlink")  # fmt: skip
    assert {name: pins[name].split(".")[:2] for name in parts} == dict.fromkeys(parts, ["13", "0"])


@pytest.mark.parametrize("name", ["sglang", "transformers", "tokenizers", "megatron-core"])
def test_tests_on_the_cpu_speak_of_the_gpu_hosts_releases(name: str) -> None:
    cpu = read_pins(FOLDER / "cpu.txt") | read_pins(FOLDER / "cpu-nodeps.txt")
    assert locked()[name] == cpu[name]


def test_a_line_of_a_file_is_one_pin(tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text("# why\n\ntomli_w==1.2.0\n")
    assert read_pins(tmp_path / "some.txt") == {"tomli-w": "1.2.0"}
