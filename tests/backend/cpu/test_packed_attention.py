"""The attention loops against plain torch in float64, and what they do with NaN."""

import pytest
import torch
from torch import Tensor

from megatron_rl.backend.cpu import layers
from megatron_rl.backend.cpu.packed_attention import Attention, angles, attend, can_attend
from megatron_rl.trainer.model.build import packed
from tests.backend.cpu.test_layers import DIM, HEADS, KV_HEADS, attention, random_inputs

LENGTHS = [1, 37, 16, 70, 2]


def frequencies(dim: int) -> Tensor:
    """As Megatron gives them: [longest, 1, 1, dim]."""
    each = torch.outer(torch.arange(max(LENGTHS)).float(), 100.0 ** -torch.arange(dim // 2).float())
    return torch.cat([each, each], dim=-1)[:, None, None]


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """x [length, heads, dim]."""
    low, high = x.chunk(2, dim=-1)
    turn = turn[: len(x), 0].to(x.dtype)
    return x * turn.cos() + torch.cat([-high, low], dim=-1) * turn.sin()


def attend_plainly(
    mixed: Tensor, sizes: Attention, turn: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """One sequence after the other, all scores at once."""
    ratio = sizes.heads // sizes.groups
    parts = mixed.unflatten(1, (sizes.groups, ratio + 2, sizes.dim))
    results = []
    for piece in parts.split(LENGTHS):
        query = rotated(piece[:, :, :ratio].flatten(1, 2), turn)
        key = rotated(piece[:, :, ratio], turn).repeat_interleave(ratio, dim=1)
        value = piece[:, :, ratio + 1].repeat_interleave(ratio, dim=1)
        scores = torch.einsum("ihd,jhd->hij", query, key) * sizes.scale
        distance = torch.arange(len(piece))[:, None] - torch.arange(len(piece))
        is_hidden = distance < 0
        if sizes.window is not None:
            is_hidden |= distance > sizes.window
        scores = scores.masked_fill(is_hidden, -torch.inf)
        if sinks is not None:
            last = sinks[:, None, None].expand(-1, len(piece), 1)
            scores = torch.cat([scores, last], dim=2)
        weights = scores.softmax(-1)[..., : len(piece)]
        results.append(torch.einsum("hij,jhd->ihd", weights, value).flatten(1))
    return torch.cat(results)


def sizes_of(heads: int, groups: int, dim: int, window: int | None = None) -> Attention:
    bounds = packed(LENGTHS).cu_seqlens_q
    return Attention(heads, groups, dim, 0.3, bounds, window, angles(frequencies(dim)))


@pytest.mark.parametrize(
    ("heads", "groups", "dim", "window"),
    [(2, 1, 4, None), (6, 2, 48, None), (3, 3, 64, 20), (4, 2, 32, 0), (9, 3, 64, None)],
)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-5), (torch.bfloat16, 6e-2)])
def test_result_and_gradient_are_those_of_plain_torch(
    heads: int, groups: int, dim: int, window: int | None, dtype: torch.dtype, limit: float
) -> None:
    torch.manual_seed(0)
    sizes = sizes_of(heads, groups, dim, window)
    mixed = torch.randn(sum(LENGTHS), (heads + 2 * groups) * dim).to(dtype).requires_grad_()
    slopes = torch.randn(sum(LENGTHS), heads * dim).to(dtype)
    assert can_attend(mixed)
    found = attend(sizes, mixed)
    (gradient,) = torch.autograd.grad(found, mixed, slopes)
    exact = mixed.detach().double().requires_grad_()
    expected = attend_plainly(exact, sizes, frequencies(dim))
    (wanted,) = torch.autograd.grad(expected, exact, slopes.double())
    for mine, theirs in ((found, expected), (gradient, wanted)):
        assert mine.dtype is dtype
        assert (mine.double() - theirs).abs().max() <= limit * max(1, theirs.abs().max())


@pytest.mark.parametrize(("heads", "groups", "dim", "window"), [(6, 2, 64, None), (4, 2, 32, 20)])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-5), (torch.bfloat16, 6e-2)])
def test_sinks_and_their_gradient_are_those_of_plain_torch(
    heads: int, groups: int, dim: int, window: int | None, dtype: torch.dtype, limit: float
) -> None:
    torch.manual_seed(0)
    sizes = sizes_of(heads, groups, dim, window)
    mixed = torch.randn(sum(LENGTHS), (heads + 2 * groups) * dim).to(dtype).requires_grad_()
    # From one that takes almost nothing to one that takes most.
    sinks = torch.linspace(-4, 6, heads).to(dtype).requires_grad_()
    slopes = torch.randn(sum(LENGTHS), heads * dim).to(dtype)
    found = attend(sizes, mixed, sinks=sinks)
    gradients = torch.autograd.grad(found, (mixed, sinks), slopes)
    exact = [one.detach().double().requires_grad_() for one in (mixed, sinks)]
    expected = attend_plainly(exact[0], sizes, frequencies(dim), exact[1])
    wanted = torch.autograd.grad(expected, exact, slopes.double())
    for mine, theirs in zip((found, *gradients), (expected, *wanted), strict=True):
        assert mine.dtype is dtype
        assert (mine.double() - theirs).abs().max() <= limit * max(1, theirs.abs().max())
    assert wanted[1].abs().max() > 0.1


@pytest.mark.parametrize("window", [None, 4])
def test_plain_torch_computes_the_same_sinks(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    *inputs, slopes = random_inputs([5, 1, 30])
    inputs = [tensor.requires_grad_() for tensor in inputs]
    core = attention(window, softmax_type="learnable")
    core.softmax_offset.data = torch.linspace(-2, 3, HEADS)
    looped = core(*inputs, None, packed_seq_params=packed([5, 1, 30]))
    monkeypatch.setattr(layers, "can_attend", lambda tensor: False)
    plain = core(*inputs, None, packed_seq_params=packed([5, 1, 30]))
    torch.testing.assert_close(looped, plain)
    found, expected = (
        torch.autograd.grad(one, (*inputs, core.softmax_offset), slopes) for one in (looped, plain)
    )
    torch.testing.assert_close(found, expected)


def test_nan_stays_in_its_sequence_and_is_never_lost() -> None:
    sizes = sizes_of(2, 1, 4)
    mixed = torch.randn(sum(LENGTHS), 16)
    mixed[5, 9] = torch.nan  # of a key in the second sequence
    found = attend(sizes, mixed)
    is_lost = found.isnan().any(-1)
    assert is_lost[5 : 1 + 37].all()
    assert not is_lost[:5].any() and not is_lost[1 + 37 :].any()


@pytest.mark.parametrize("window", [None, 4])
def test_plain_torch_computes_the_same_where_there_is_no_compiler(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [5, 1, 30]
    *inputs, _ = random_inputs(lengths)
    assert inputs[0].shape[1:] == (HEADS, DIM) and inputs[1].shape[1] == KV_HEADS
    core = attention(window)
    looped = core(*inputs, None, packed_seq_params=packed(lengths))
    monkeypatch.setattr(layers, "can_attend", lambda tensor: False)
    plain = core(*inputs, None, packed_seq_params=packed(lengths))
    torch.testing.assert_close(looped, plain)
