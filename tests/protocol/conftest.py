"""Fixtures of the tests of the protocol."""

from pathlib import Path

import pytest

from tests.protocol.template_families import FAMILIES, write_family


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        write_family(folder / name, name)
    return folder
