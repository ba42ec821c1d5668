"""The loops of an engine's forward pass against plain torch in float64."""

import pytest
import torch

from megatron_rl.backend.cpu.kernels import engine_loops
from megatron_rl.backend.cpu.kernels.engine_loops import Requests

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 5e-3}
"""Of a result near 1: a unit in the last place of bfloat16 is 2**-8."""
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def check_equal(found: torch.Tensor, exact: torch.Tensor) -> None:
    rounding = ROUNDING[found.dtype]
    torch.testing.assert_close(found.double(), exact.double(), atol=rounding, rtol=rounding)


@both_dtypes
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (7, 576), (64, 80)])
def test_the_norm_is_that_of_the_unrounded_sum(dtype: torch.dtype, rows: int, width: int) -> None:
    x, residual = torch.randn(2, rows, width, dtype=torch.float64).to(dtype)
    weight = torch.rand(width).to(dtype)
    total = x.double() + residual.double()
    scale = (total.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    check_equal(engine_loops.add_norm(x, residual, weight, 1e-5), total * scale * weight.double())
    check_equal(residual, total)
    alone = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    check_equal(engine_loops.add_norm(x, None, weight, 1e-5), alone * weight.double())


@both_dtypes
def test_silu_multiply(dtype: torch.dtype) -> None:
    x = torch.randn(5, 96).mul(4).to(dtype)
    x[0, :3] = torch.tensor([-200.0, 200.0, 0.0])
    gate, up = x.double().chunk(2, -1)
    check_equal(engine_loops.silu_multiply(x), gate * gate.sigmoid() * up)


@both_dtypes
@pytest.mark.parametrize("size", [16, 32, 64, 80])
def test_rotary_embedding_turns_rows_that_lie_apart(dtype: torch.dtype, size: int) -> None:
    fused = torch.randn(6, 5 * size + 16).to(dtype)
    before = fused.clone()
    positions = torch.tensor([0, 3, 99, 3, 7, 42])
    angles = torch.rand(100, size // 2, dtype=torch.float64) * 7
    table = torch.cat([angles.cos(), angles.sin()], -1).to(dtype)
    engine_loops.rotate(fused[:, size : 4 * size], size, table, positions)
    cosine, sine = table.double()[positions].unsqueeze(1).chunk(2, -1)
    first, second = before[:, size : 4 * size].double().view(6, 3, size).chunk(2, -1)
    expected = torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)
    check_equal(fused[:, size : 4 * size], expected.reshape(6, -1))
    assert torch.equal(fused[:, :size], before[:, :size])
    assert torch.equal(fused[:, 4 * size :], before[:, 4 * size :])


def one_by_one(
    query: torch.Tensor, pools: list[torch.Tensor], slots: list[torch.Tensor], lens: list[int]
) -> torch.Tensor:
    """Causal attention of each sequence's last tokens in float64."""
    outputs, start = [], 0
    for mine, length in zip(slots, lens, strict=True):
        share = query.shape[1] // pools[0].shape[1]
        keys, values = (
            pool[mine].double().repeat_interleave(share, 1).transpose(0, 1) for pool in pools
        )
        asked = query[start : start + length].double().transpose(0, 1)
        scores = asked @ keys.transpose(1, 2) / query.shape[2] ** 0.5
        hidden = torch.ones(length, len(mine), dtype=torch.bool).triu(len(mine) - length + 1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        outputs.append((weights @ values).transpose(0, 1))
        start += length
    return torch.cat(outputs)


@both_dtypes
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (8, 2), (5, 1)])
@pytest.mark.parametrize("size", [16, 48, 64, 128])
@pytest.mark.parametrize(
    ("query_lens", "key_lens"),
    [(None, [1, 2, 300, 17, 16, 15, 129]), ([5, 1, 30, 2], [5, 7, 30, 199]), (None, [1])],
)
def test_attention_over_scattered_slots(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    size: int,
    query_lens: list[int] | None,
    key_lens: list[int],
) -> None:
    pools = [torch.randn(3000, kv_heads, size).to(dtype) for _ in range(2)]
    table = torch.randperm(3000)[: 9 * 320].view(9, 320).to(torch.int32)
    rows = torch.randperm(9)[: len(key_lens)]
    lens = query_lens or [1] * len(key_lens)
    fused = torch.randn(sum(lens), heads + 2, size).mul(2).to(dtype)
    query = fused[:, :heads]
    output = torch.full((sum(lens), heads, size), 7.0, dtype=dtype)
    asked = None if query_lens is None else torch.tensor(query_lens)
    requests = Requests(table, rows, asked, torch.tensor(key_lens))
    engine_loops.attend(query, output, *pools, requests, None)
    slots = [table[row, :length].long() for row, length in zip(rows, key_lens, strict=True)]
    check_equal(output, one_by_one(query, pools, slots, lens))


@both_dtypes
def test_keys_and_values_are_stored_in_their_slots(dtype: torch.dtype) -> None:
    pools = torch.zeros(2, 50, 3, 16, dtype=dtype)
    fused = torch.randn(4, 7, 16).to(dtype)
    slots = torch.tensor([49, 0, 7, 8])
    engine_loops.store(fused[:, 1:4], fused[:, 4:], *pools, slots)
    expected = torch.zeros_like(pools)
    expected[0, slots], expected[1, slots] = fused[:, 1:4], fused[:, 4:]
    assert torch.equal(pools, expected)


@both_dtypes
@pytest.mark.parametrize("vocabulary", [5, 1024, 3001])
def test_a_draw_inverts_the_distribution_and_tells_its_logprob(
    dtype: torch.dtype, vocabulary: int
) -> None:
    rows = 200
    logits = torch.randn(rows, vocabulary + 3).mul(3).to(dtype)[:, :vocabulary]
    logits[:, 1] = float("-inf")
    temperatures = torch.rand(rows) + 0.5
    uniforms = 1 - torch.rand(rows, dtype=torch.float64)
    uniforms[0], uniforms[1] = 1.0, 2.0**-53
    tokens, logprobs = engine_loops.sample(logits, temperatures, uniforms)
    exact = torch.log_softmax(logits.double() / temperatures.double()[:, None], -1)
    mine = exact.gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), mine, atol=2e-6, rtol=1e-6)
    # The uniform lies in the token's part of the cumulative distribution.
    upper = exact.exp().cumsum(-1).gather(1, tokens[:, None])[:, 0]
    slack = 1e-6
    assert (uniforms <= upper + slack).all()
    assert (uniforms >= upper - mine.exp() - slack).all()
    assert (tokens != 1).all()


def test_frequencies_are_the_probabilities() -> None:
    probs = torch.tensor([0.0, 0.5, 0.0, 0.25, 0.2, 0.05, 0.0])
    draws = 40_000
    uniforms = 1 - torch.rand(draws, dtype=torch.float64)
    tokens, _ = engine_loops.sample(probs.log().repeat(draws, 1), torch.ones(draws), uniforms)
    counts = torch.bincount(tokens, minlength=7)
    assert counts[probs == 0].sum() == 0
    expected = probs[probs > 0] * draws
    assert ((counts[probs > 0] - expected) ** 2 / expected).sum() < 16.3  # 99.9 %, 3 degrees


def test_one_bad_logit_spoils_its_row_alone() -> None:
    logits = torch.randn(2, 40)
    logits[0, 7] = float("nan")
    tokens, logprobs = engine_loops.sample(logits, torch.ones(2), torch.full((2,), 0.5).double())
    assert logprobs.isnan().tolist() == [True, False] and (tokens < 40).all()


def test_tensors_that_the_loops_cannot_take_are_known() -> None:
    rows = torch.zeros(4, 64)
    assert engine_loops.can_run(rows, rows[:, 16:48])
    assert not engine_loops.can_run(rows, rows.bfloat16())
    assert not engine_loops.can_run(rows.half())
    assert not engine_loops.can_run(rows[:, :20])
    assert not engine_loops.can_run(rows[:, ::2])
