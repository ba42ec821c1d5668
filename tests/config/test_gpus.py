"""Peaks by the name that the driver gives a GPU."""

import pytest

from megatron_rl.config.gpus import named_peak


@pytest.mark.parametrize(
    ("device", "bf16", "fp8"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12, 1979e12),
        ("NVIDIA H200", 989e12, 1979e12),
        ("NVIDIA A100-SXM4-40GB", 312e12, None),
        ("NVIDIA L40S", 362e12, 733e12),
        ("NVIDIA B200", 2250e12, 4500e12),
        ("NVIDIA H100 PCIe", None, None),
        ("NVIDIA H100 NVL", None, None),
        ("NVIDIA GH200 480GB", None, None),
        ("Tesla V100-SXM2-16GB", None, None),
    ],
)
def test_the_peak_is_that_of_the_data_sheet_or_none(
    device: str, bf16: float | None, fp8: float | None
) -> None:
    assert named_peak(device, is_fp8=False) == bf16
    assert named_peak(device, is_fp8=True) == fp8
