"""vLLM as the engine: what is refused before anything starts."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from generation.vllm_command import PYTHON_VARIABLE
from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.launcher.model_checks import check_vllm


def test_a_missing_installation_is_refused_with_its_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, str(tmp_path / "python"))
    values = {"run": {"dir": tmp_path}, "model": {"path": tmp_path}}
    check_vllm(Config.model_validate(values))
    config = Config.model_validate(values | {"generator": {"engine": "vllm"}})
    with pytest.raises(InputError, match=r"install\.sh cpu --with vllm"):
        check_vllm(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"generator": {"engine": "vllm", "tensor_parallel": 2}},
        {"generator": {"engine": "vllm", "quantization": "fp8"}},
        {"generator": {"engine": "vllm"}, "train": {"router_replay": True}},
    ],
)
def test_what_vllm_cannot_do_is_no_configuration(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="'vllm'"):
        Config.model_validate(changes)
