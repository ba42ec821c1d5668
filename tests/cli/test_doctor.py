"""What the doctor says of a machine that lacks something: each line with what to do."""

import errno
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from megatron_rl.backend.fabric import Port
from megatron_rl.cli import doctor
from megatron_rl.config.errors import InputError
from verification.code import setup


@pytest.fixture
def no_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(setup.isolation, "bubblewrap_executables", list)
    setup.resolve.cache_clear()
    yield
    setup.resolve.cache_clear()


def told() -> tuple[int, str]:
    output = io.StringIO()
    return doctor.examine(Console(file=output, width=400)), output.getvalue()


def test_a_missing_bubblewrap_limits_a_machine_and_is_not_missing(
    no_bubblewrap: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By Landlock or not at all, as the kernel allows.
    [(is_good, what, found)] = doctor._check_sandbox()
    assert is_good is doctor.LIMITED and what == "sandbox for programs"
    for name in ("_check_packages", "_check_machine", "_check_loopback"):
        monkeypatch.setattr(doctor, name, list)
    monkeypatch.setattr(doctor, "found_gpus", tuple)
    count, text = told()
    (row,) = (line for line in text.splitlines() if "sandbox" in line and "│" in line)
    assert count == 0 and "limited" in row and "!!" not in text
    assert text.strip().endswith("for most runs; limited: sandbox for programs.")
    assert "bubblewrap" in found and "nstall" in found and "user namespaces" in found
    assert "Only the task code needs it" in found


def test_what_is_missing_is_counted_and_named_again_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "_check_sandbox", list)
    before, _ = told()
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor, "find_compiler", lambda: None)
    monkeypatch.setattr(doctor, "_LOW_DISK_BYTES", 1 << 60)
    count, text = told()
    assert count == before + 3
    assert "missing: apt-get install g++" in text and "apt-get install util-linux" in text
    assert "the examples need 1073741824: make room, or run on another disk" in text
    last = text.strip().splitlines()[-1]
    assert all(what in last for what in ("C++ compiler", "setpriv", "free disk here"))


def test_a_machine_that_lacks_nothing_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_check_packages", "_check_machine", "_check_sandbox", "_check_loopback"):
        monkeypatch.setattr(doctor, name, list)
    monkeypatch.setattr(doctor, "found_gpus", tuple)
    count, text = told()
    assert count == 0 and "none: runs use the CPU" in text
    assert text.strip().endswith("Nothing is missing.")


def test_a_file_system_without_locks_is_named_with_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Lustre mounted without flock: kernels that engines compile are locked."""
    assert doctor._check_locks(tmp_path / "cache")[0]

    def refuse(file: object, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(doctor.fcntl, "flock", refuse)
    is_good, _, text = doctor._check_locks(tmp_path / "cache")
    assert not is_good and "not implemented; set SGLANG_CACHE_DIR" in text


@pytest.mark.parametrize(
    ("gpus", "version"), [([], "2.14.1"), (["0"], "2.14.1"), (["0", "1"], "2.13+cpu")]
)
def test_nccl_is_not_checked_without_two_gpus(
    gpus: list[str], version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "found_gpus", lambda: gpus)
    monkeypatch.setattr(doctor, "_version", lambda name: version)
    with pytest.raises(
        InputError, match=f"lists {len(gpus)} GPUs and has torch {re.escape(version)}"
    ):
        doctor.check_collectives(Console(file=io.StringIO()))


def test_a_fault_of_the_fabric_limits_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    port = Port("mlx5_0", "InfiniBand", is_active=False)
    monkeypatch.setattr(doctor, "find_ports", lambda: [port])
    [(is_good, what, found)] = doctor._check_fabric()
    assert is_good is doctor.LIMITED and what == "fabric" and "mlx5_0" in found
