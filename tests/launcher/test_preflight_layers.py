"""A start, the doctor and dry runs agree on the layers that this node's GPU takes."""

import os
from pathlib import Path

import pytest

from megatron_rl.cli import doctor
from megatron_rl.config.layer_choice import Device
from megatron_rl.launcher.model_checks import find_device
from tests.launcher.test_preflight import check, message_of
from tests.launcher.test_preflight import overrides as overrides

pytestmark = pytest.mark.usefixtures("forked_tokenizer_children")
NOTE = "note: the trainer takes the local layers (expert.model.layers = 'auto'): "


def install(folder: Path, name: str, version: str) -> None:
    """A package's metadata alone."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def packages(tmp_path: Path, torch_for_gpus: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages of a node with one RTX 4090 and torch for CUDA."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\ncase "$1" in\n*=index) echo 0;;\n'
        "*=name,memory.total,compute_cap) echo 'NVIDIA GeForce RTX 4090, 24564, 8.9';;\nesac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    return tmp_path / "packages"


def layer_notes(tmp_path: Path, overrides: list[str]) -> list[str]:
    return [note for note in check(tmp_path, overrides).notes if "layers" in note]


def test_a_start_says_which_layers_the_gpu_takes(
    tmp_path: Path, overrides: list[str], packages: Path
) -> None:
    # Without TransformerEngine there is nothing to choose.
    assert find_device() == Device((8, 9), "", has_engine=False)
    assert layer_notes(tmp_path, overrides) == []
    install(packages, "transformer-engine-torch", "2.12.0")
    assert find_device() == Device((8, 9), "", has_engine=True)
    [note] = layer_notes(tmp_path, overrides)
    assert note.startswith(NOTE) and note.endswith("capability 8.9 without flash-attn")
    assert layer_notes(tmp_path, [*overrides, "expert.model.layers=local"]) == []
    message = message_of(tmp_path, [*overrides, "model.fp8=tensorwise"])
    assert message.startswith("model.fp8 = 'tensorwise': TransformerEngine has no attention")
    assert "pip install flash-attn==2.8.3 " in message and message.endswith("model.fp8 = 'none'")
    # An evaluation alone has no trainer.
    alone = ["train.steps=0", "sft.steps=0", "eval.samples=1"]
    assert layer_notes(tmp_path, [*overrides, *alone, "model.fp8=tensorwise"]) == []
    install(packages, "flash-attn", "2.8.3")
    assert layer_notes(tmp_path, overrides) == []
    assert layer_notes(tmp_path, [*overrides, "model.fp8=tensorwise"]) == []


def test_the_doctor_says_how_the_trainer_computes_attention(packages: Path) -> None:
    install(packages, "transformer-engine-torch", "2.12.0")
    [(is_good, what, text)] = doctor._check_attention(find_device())
    assert is_good is doctor.LIMITED and what == "attention of the trainer"
    assert "capability 8.9 without flash-attn: expert.model.layers = 'auto' takes" in text
    install(packages, "flash-attn", "2.8.3")
    assert doctor._check_attention(find_device()) == [
        (True, what, "TransformerEngine's, for packed sequences")
    ]
    assert doctor._check_attention(None) == []
