"""Fixtures of the launcher's tests."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def packages_for_gpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that says torch was built for CUDA, and has the package that only CUDA needs."""
    folder = tmp_path_factory.mktemp("packages")
    for name, version in (("torch", "2.14.1"), ("torch_memory_saver", "0.0.10")):
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(metadata)
    return folder


@pytest.fixture
def torch_for_gpus(packages_for_gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process takes its installation for one with CUDA, whatever torch is installed."""
    monkeypatch.syspath_prepend(packages_for_gpus)
