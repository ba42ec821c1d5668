"""Train-inference mismatch against numbers worked by hand, and additive over ranks."""

import math
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_rl.algorithms.objective import find_objective
from megatron_rl.config.algorithm import PolicyLossConfig
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.protocol.types import MinibatchShare
from megatron_rl.trainer.mismatch import SIZE, mean_mismatch, mismatch_metrics, mismatch_sums
from megatron_rl.trainer.model.policy import open_policy
from megatron_rl.trainer.step import Trainer
from tests.distributed import run_ranks
from tests.tiny_batches import VOCAB, my_share
from tests.tiny_models import write_model

CFG = PolicyLossConfig(eps_low=0.2, eps_high=0.3)


def values_of(sums: torch.Tensor) -> dict[str, float]:
    return {
        metric.name: metric.value / metric.count if metric.reduce == "mean" else metric.value
        for metric in mismatch_metrics(sums)
    }


def test_mismatch_matches_hand_worked_numbers() -> None:
    # Ratios trainer / generator 2, 1/2, 1, 1.25: log 2, -log 2, 0, log 1.25.
    log2, log5_4 = math.log(2), math.log(1.25)
    trainer = torch.tensor([-1 + log2, -1 - log2, -1, -1 + log5_4])
    values = values_of(mismatch_sums(trainer, -torch.ones(4), CFG))
    mean = (2 * log2 + log5_4) / 4
    assert values["train/logprob_gap"] == pytest.approx(mean)
    assert values["train/logprob_gap_tokens"] == 4
    assert values["train/mismatch_k1"] == pytest.approx(-log5_4 / 4)
    assert values["train/mismatch_k2"] == pytest.approx((2 * log2**2 + log5_4**2) / 8)
    assert values["train/mismatch_k3"] == pytest.approx((1 + -0.5 + 0 + 0.25 - log5_4) / 4)
    # 2 and 1/2 lie outside of [0.8, 1.3].
    assert values["train/mismatch_outside_clip"] == 0.5


def test_estimates_agree_with_the_divergence_of_two_distributions() -> None:
    generator = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    trainer = torch.tensor([0.45, 0.33, 0.22], dtype=torch.float64)
    # Tokens in exactly the generator's proportions: k1 and k3 are then the divergence itself.
    tokens = torch.tensor([0] * 5 + [1] * 3 + [2] * 2)
    values = values_of(mismatch_sums(trainer.log()[tokens], generator.log()[tokens], CFG))
    exact = float((generator * (generator / trainer).log()).sum())
    assert values["train/mismatch_k1"] == pytest.approx(exact)
    assert values["train/mismatch_k3"] == pytest.approx(exact)
    assert values["train/mismatch_k2"] == pytest.approx(exact, rel=0.1)


def test_p99_is_that_of_all_ranks_tokens_within_a_bin() -> None:
    rng = torch.Generator().manual_seed(0)
    trainer = torch.randn(20_000, generator=rng, dtype=torch.float64) * 0.01
    generator = torch.zeros(20_000, dtype=torch.float64)
    parts = zip(
        trainer.split([100, 4000, 15_900]), generator.split([100, 4000, 15_900]), strict=True
    )
    total = sum((mismatch_sums(*part, CFG) for part in parts), torch.zeros(SIZE))
    exact = float(trainer.abs().quantile(0.99))
    assert values_of(total)["train/mismatch_p99"] == pytest.approx(exact, rel=0.03)


def test_equal_logprobs_have_no_mismatch() -> None:
    values = values_of(mismatch_sums(-torch.ones(5), -torch.ones(5), CFG))
    assert values.pop("train/logprob_gap_tokens") == 5
    assert values.pop("train/mismatch_p99") < 2e-8
    assert set(values.values()) == {0.0}


def test_without_tokens_there_is_a_count_and_nothing_else() -> None:
    sums = mismatch_sums(torch.zeros(0), torch.zeros(0), CFG)
    assert values_of(sums) == {"train/logprob_gap_tokens": 0}
    assert math.isnan(mean_mismatch(sums))


def test_a_logprob_that_is_not_a_number_counts_as_the_largest_difference() -> None:
    sums = mismatch_sums(torch.tensor([math.nan, -1.0]), -torch.ones(2), CFG)
    assert values_of(sums)["train/mismatch_p99"] > 90


def as_sampled(share: MinibatchShare, folder: Path) -> MinibatchShare:
    """With the logprobs that transformers gives the tokens at the share's temperature."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    microbatches = []
    for microbatch in share.microbatches:
        sampled = []
        for s in microbatch:
            ids = torch.tensor(s.token_ids, dtype=torch.int64)
            with torch.no_grad():
                logits = model(ids[None]).logits[0, s.targets - 1] / share.temperature
            logprobs = logits.log_softmax(-1).gather(1, ids[s.targets, None])[:, 0].numpy()
            sampled.append(msgspec.structs.replace(s, generator_logprobs=logprobs))
        microbatches.append(sampled)
    return msgspec.structs.replace(share, microbatches=microbatches)


def metrics_of_stages(cfg: Config, temperatures: list[float]) -> list[dict[str, float]]:
    """Of one batch a stage; with a learning rate of 0 the policy stays that of version 0."""
    with open_policy(cfg) as policy:
        trainer = Trainer(policy, find_objective(cfg.algorithm), cfg.optimizer, 2)
        found = []
        for temperature in temperatures:
            share = as_sampled(my_share(40, temperature=temperature), cfg.model.path)
            prepared = trainer.prepare([share])[0]
            metrics = trainer.update(share, version=0, prepared=prepared)
            found.append({m.name: m.value / (m.count or 1) for m in metrics})
        return found


@pytest.mark.parametrize(
    "objective",
    [["kl.placement=loss", "kl.estimator=exact"], ["policy_loss.old_logprobs=recompute"]],
    ids=["exact KL", "recomputed"],
)
def test_the_gap_is_the_same_on_both_sides_of_a_change_of_temperature(
    tmp_path: Path, objective: list[str]
) -> None:
    write_model(tmp_path, vocab_size=VOCAB)
    given = ["reference.policy=start", *objective]
    overrides = [f"model.path={tmp_path}", "model.dtype=float32", "optimizer.lr=0"]
    cfg = load_config(None, [*overrides, *(f"algorithm.{each}" for each in given)])
    for values in run_ranks(metrics_of_stages, 1, cfg, [1.0, 0.6, 1.4])[0]:
        assert values["train/logprob_gap"] < 1e-5
        assert values["train/mismatch_outside_clip"] == 0 == values["train/clip_fraction"]
        # The reference is the policy itself, so it is divided by the same temperature.
        assert abs(values["train/reference_k1"]) < 1e-6
        assert abs(values.get("train/reference_kl", 0.0)) < 1e-6
