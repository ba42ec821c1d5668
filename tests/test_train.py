"""What the trainer's entry decides from the configuration alone."""

import pytest

from megatron_rl.protocol.config import Config
from megatron_rl.train import chosen_method


@pytest.mark.parametrize(
    ("method", "quantization", "expected"),
    [
        ("reshard", "", "reshard"),
        ("ipc", "", "ipc"),
        ("ipc", "fp8", "disk"),
        ("reshard", "fp8", "broadcast"),
        ("broadcast", "fp8", "broadcast"),
        ("disk", "fp8", "disk"),
        ("disk", "", "disk"),
    ],
)
def test_a_quantised_engine_gets_full_tensors(
    method: str, quantization: str, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert chosen_method(method, quantization) == expected
    assert ("generator.quantization=fp8" in caplog.text) == (method != expected)


def test_an_engine_that_does_not_quantise_refuses_to() -> None:
    with pytest.raises(ValueError, match="generator.quantization='fp8' needs an engine"):
        Config.model_validate({"generator": {"engine": "hf", "quantization": "fp8"}})
