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


def attend_plainly(mixed: Tensor, sizes: Attention, turn: Tensor) -> Tensor:
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
        weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
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
