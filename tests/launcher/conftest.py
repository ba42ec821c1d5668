"""Fixtures of the launcher's tests."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def packages_for_gpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages that says torch was built for CUDA."""
    folder = tmp_path_factory.mktemp("packages")
    info = folder / "torch-2.14.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.14.1\n")
    return folder


@pytest.fixture
def torch_for_gpus(packages_for_gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process takes its installation for one with CUDA, whatever torch is installed."""
    monkeypatch.syspath_prepend(packages_for_gpus)
