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


def test_seeded_draw_depends_on_seed_and_position_alone(sampling: ModuleType) -> None:
    module = ModuleType("sampler")
    sampling.install(module)
    draw = module.sampling_from_probs_torch
    certain = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert draw(certain).tolist() == [1, 0] and draw(certain).dtype == torch.int32
    torch.manual_seed(0)
    probs = torch.rand(40, 50)
    seeds, positions = torch.arange(40) // 2 + 2**52, torch.arange(40)
    tokens = draw(probs, seeds, positions)
    for row in (0, 7, 39):
        one = slice(row, row + 1)
        assert draw(probs[one], seeds[one], positions[one]).tolist() == [tokens[row]]
        drawn = module.multinomial_with_seed(probs[one].log(), seeds[one], positions[one])
        assert drawn.tolist() == [[tokens[row]]]
    # Neither positions of one seed nor seeds at one position draw alike.
    uniforms = import_shim("seeded_draws").uniforms
    by_position = uniforms(torch.full((4000,), 7), torch.arange(4000))
    by_seed = uniforms(torch.arange(4000), torch.full((4000,), 7))
    for found in (by_position, by_seed):
        assert len(found.unique()) == 4000 and 0 < found.min() and found.max() <= 1
        counts = torch.histc(found, bins=20, min=0, max=1)
        assert ((counts - 200) ** 2 / 200).sum() < 43.8  # 99.9th percentile at 19 degrees
        assert abs(float(torch.corrcoef(torch.stack([found[1:], found[:-1]]))[0, 1])) < 0.05
