"""Fixtures of the generator's tests."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.generation.precision import load_reference
from tests.generation.tiny_model import make_model


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with two tiny models, `old` and `new`."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "old", seed=0)
    make_model(folder / "new", seed=1)
    return folder


@pytest.fixture(scope="session")
def old_model(models_dir: Path) -> LlamaForCausalLM:
    return load_reference(models_dir / "old")


@pytest.fixture(scope="session")
def new_model(models_dir: Path) -> LlamaForCausalLM:
    return load_reference(models_dir / "new")
