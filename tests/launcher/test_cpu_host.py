"""What is said of a model on a host without a GPU."""

from pathlib import Path

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config, ModelConfig
from megatron_rl.launcher.preflight import check_cpu_host, notes_of_host
from megatron_rl.plan import card
from tests.generation.tiny_model import make_model
from tests.tools.stub_project import write_program


def said(parameters: float, memory_gb: float, *, trains: bool = True) -> list[str]:
    return check_cpu_host(
        int(parameters), item_bytes=2, engines=1, trains=trains, memory_bytes=int(memory_gb * 1e9)
    )


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded() -> None:
    # 8.9e9 x (2 + 2 + 16) bytes.
    with pytest.raises(InputError, match=r"memory of 23\.0 GB .* 8\.9 billion .* take 178\.0 GB"):
        said(8.9e9, 23)
    # An evaluation holds the engine's weights alone: 17.8 GB.
    assert said(8.9e9, 23, trains=False) != []


def test_a_large_model_on_cpu_cores_is_said_loudly_and_a_tiny_one_is_not() -> None:
    assert said(135e6, 8) == []
    [line] = said(1.5e9, 64)
    assert line.startswith("warning: this host lists no GPU") and "1.5 billion" in line


@pytest.mark.usefixtures("torch_for_gpus")
def test_a_driver_that_fails_or_hangs_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path / "model", seed=0)
    config = Config(model=ModelConfig(path=tmp_path / "model"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    write_program(tmp_path / "nvidia-smi", "echo 'cannot communicate with the driver'; exit 9")
    [note] = notes_of_host(config)
    assert "uses this host's CPU cores" in note and "cannot communicate with the driver" in note
    with monkeypatch.context() as asked:
        asked.setenv("CUDA_VISIBLE_DEVICES", "")
        assert notes_of_host(config) == []
    write_program(tmp_path / "nvidia-smi", "exec sleep 60")
    monkeypatch.setattr(card, "_ANSWER_S", 0.2)
    with pytest.raises(InputError, match="nvidia-smi gave no answer within 0 s"):
        notes_of_host(config)
