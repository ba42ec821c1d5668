"""Products that are added to float32 gradients."""

import pytest
import torch

from megatron_rl.backend import products
from megatron_rl.backend.products import add_product, way_of, write_product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_native", [False, True, None])
def test_a_product_is_added_to_what_was_there(
    dtype: torch.dtype, has_native: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # None: as this CPU has it. MKL computes the same without such instructions.
    if has_native and not hasattr(products._mkl(), "cblas_gemm_bf16bf16f32"):
        pytest.skip("this build of torch has no such product of MKL")
    if has_native is not None:
        monkeypatch.setattr(products, "_has_native_bfloat16", lambda: has_native)
    torch.manual_seed(0)
    left, right = torch.randn(33, 70).to(dtype), torch.randn(33, 24).to(dtype)
    start = torch.randn(70, 24)
    total = start.clone()
    add_product(total, left, right)
    exact = start.double() + left.double().t() @ right.double()
    # Products of two bfloat16 are exact in float32: sums alone are rounded, but for parts of sums
    # where the CPU has no product for them.
    is_rounded = dtype is torch.bfloat16 and not products._has_native_bfloat16()
    assert (total - exact).abs().max() <= (2**-8 if is_rounded else 1e-6) * exact.abs().max()
    result = torch.full((70, 24), torch.nan)
    write_product(result, left.t().contiguous(), right.t().contiguous())
    assert (result - (exact - start)).abs().max() <= 1e-6 * exact.abs().max()


def test_sums_of_bfloat16_products_are_never_rounded_to_it() -> None:
    wide, narrow = torch.float32, torch.bfloat16
    for has_native in (False, True):
        # On CUDA the matrix product of cuBLAS writes its float32 sums.
        assert way_of("cuda", wide, narrow, has_native=has_native) == "out_dtype"
        for device in ("cpu", "cuda"):
            for dtype in (wide, narrow):
                assert way_of(device, dtype, dtype, has_native=has_native) == "one_dtype"
    assert way_of("cpu", wide, narrow, has_native=True) == "mkl"
    assert way_of("cpu", wide, narrow, has_native=False) == "plain"


def test_device_memory_is_never_handed_to_the_cpus_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A host with GPUs may well have a CPU whose library could multiply bfloat16."""
    monkeypatch.setattr(products, "_has_native_bfloat16", lambda: True)

    def read(*factors: torch.Tensor, is_added: bool) -> None:
        raise AssertionError("it would read memory that is not the host's")

    monkeypatch.setattr(products, "_multiply_natively", read)
    # "meta" stands for any device but the CPU.
    left, right = (torch.empty(8, n, dtype=torch.bfloat16, device="meta") for n in (5, 3))
    add_product(torch.empty(5, 3, device="meta"), left, right)
    write_product(torch.empty(5, 3, device="meta"), left.t(), right.t())
    with pytest.raises(AssertionError):
        add_product(torch.zeros(5, 3), torch.ones(8, 5).bfloat16(), torch.ones(8, 3).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_reaches_its_row_alone(dtype: torch.dtype) -> None:
    left, right = torch.ones(8, 5).to(dtype), torch.ones(8, 3).to(dtype)
    left[2, 4] = torch.nan
    total = torch.zeros(5, 3)
    add_product(total, left, right)
    assert total[4].isnan().all() and torch.equal(total[:4], torch.full((4, 3), 8.0))
