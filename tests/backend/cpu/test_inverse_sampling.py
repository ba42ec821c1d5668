"""Sampling by the cumulative distribution, against the probabilities themselves."""

from types import ModuleType

import pytest
import torch

from tests.backend.cpu.site_modules import import_shim


@pytest.fixture(scope="module")
def sampling() -> ModuleType:
    return import_shim("inverse_sampling")


def test_frequencies_are_the_probabilities(sampling: ModuleType) -> None:
    torch.manual_seed(0)
    probs = torch.tensor([0.0, 0.5, 0.0, 0.25, 0.2, 0.05, 0.0])
    draws = 40_000
    counts = torch.bincount(sampling.sample(probs.repeat(draws, 1)), minlength=7)
    assert counts[probs == 0].sum() == 0
    expected = probs[probs > 0] * draws
    chi_squared = ((counts[probs > 0] - expected) ** 2 / expected).sum()
    assert chi_squared < 16.3  # 99.9th percentile at 3 degrees of freedom


def test_extreme_uniforms_draw_possible_tokens(
    sampling: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    probs = torch.tensor([[0.0, 0.3, 0.7, 0.0]])
    for uniform, expected in ((0.0, 2), (1.0 - 2**-24, 1)):
        monkeypatch.setattr(torch, "rand", lambda *a, u=uniform, **k: torch.full((1, 1), u))
        assert sampling.sample(probs).tolist() == [expected]


def test_a_seeded_draw_is_left_to_sglang(sampling: ModuleType) -> None:
    module = ModuleType("sampler")
    module.sampling_from_probs_torch = lambda probs, seed, positions: ("seeded", seed)
    sampling.install(module)
    probs = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert module.sampling_from_probs_torch(probs).tolist() == [1, 0]
    assert module.sampling_from_probs_torch(probs).dtype == torch.int32
    assert module.sampling_from_probs_torch(probs, 5, None) == ("seeded", 5)
