"""policy_loss.old_logprobs = "recompute": ratios to the trainer's own logprobs before the batch."""

from pathlib import Path

import pytest
import torch

from megatron_rl.algorithms.objective import find_objective
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.protocol.packing import deal
from megatron_rl.protocol.types import TrainSequence
from megatron_rl.trainer.model.policy import open_policy
from megatron_rl.trainer.step import Trainer
from tests.distributed import run_ranks
from tests.obvious_losses import clipped_loss
from tests.tiny_batches import VOCAB, make_sequences, my_share
from tests.tiny_models import PLAIN, write_model


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_model(folder, vocab_size=VOCAB)
    return folder


def two_updates(cfg: Config) -> dict:
    """Both updates of a batch whose two minibatches are the same."""
    with open_policy(cfg) as policy:
        objective = find_objective(cfg.algorithm)
        trainer = Trainer(policy, objective, cfg.optimizer, 2, train=cfg.train)
        share = my_share(40)
        prepared = trainer.prepare([share, share])
        old, same = ([k.proximal_logprobs for k in minibatch] for minibatch in prepared)
        found = {"old": old, "is_same": all(map(torch.equal, old, same))}
        for number, minibatch_prepared in enumerate(prepared):
            own = trainer.prepare([share])[0]
            found[f"own_{number}"] = [k.proximal_logprobs for k in own]
            metrics = trainer.update(share, version=0, prepared=minibatch_prepared)
            found[f"metrics_{number}"] = {metric.name: metric.value for metric in metrics}
        return found


def load(folder: Path, *overrides: str) -> Config:
    steep = ["optimizer.warmup_steps=0", "optimizer.lr=0.01", "model.dtype=float32"]
    return load_config(
        None, [*PLAIN, "algorithm.correction.name=none", f"model.path={folder}", *steep, *overrides]
    )


def microbatches() -> list[list[TrainSequence]]:
    """my_share(40) of a single rank."""
    sequences = make_sequences()
    lengths = [len(sequence.token_ids) for sequence in sequences]
    (mine,) = deal(lengths, budget_tokens=40, dp_size=1)
    return [[sequences[i] for i in microbatch] for microbatch in mine]


def loss_of(own: list[torch.Tensor], old: list[torch.Tensor]) -> float:
    """Clipped loss of the microbatches from logprobs of each."""
    total = 0.0
    for new, before, sequences in zip(own, old, microbatches(), strict=True):
        counts = torch.tensor([len(s.generator_logprobs) for s in sequences])
        advantages = torch.tensor([s.advantage for s in sequences]).repeat_interleave(counts)
        weights = torch.tensor([s.weight for s in sequences]).repeat_interleave(counts)
        total += clipped_loss(new, before, advantages, weights).item()
    return total


def test_the_batch_is_compared_to_the_policy_before_its_first_update(model_folder: Path) -> None:
    cfg = load(model_folder, "algorithm.policy_loss.old_logprobs=recompute")
    found = run_ranks(two_updates, 1, cfg)[0]
    assert found["is_same"]
    for number in (0, 1):
        expected = loss_of(found[f"own_{number}"], found["old"])
        assert found[f"metrics_{number}"]["train/loss"] == pytest.approx(expected, abs=1e-6)
    # Before the first update all ratios are 1; after it they are not.
    assert found["metrics_0"]["train/clip_fraction"] == 0
    assert found["metrics_1"]["train/clip_fraction"] > 0


def test_mismatch_is_that_of_the_policy_before_its_first_update(model_folder: Path) -> None:
    recompute = load(model_folder, "algorithm.policy_loss.old_logprobs=recompute")
    found = run_ranks(two_updates, 1, recompute)[0]
    generator = [
        torch.cat([torch.from_numpy(s.generator_logprobs) for s in part]) for part in microbatches()
    ]
    gap = float((torch.cat(found["old"]) - torch.cat(generator)).abs().double().sum())
    # In the generator's mode the second update sees a policy that has moved.
    moved = run_ranks(two_updates, 1, load(model_folder))[0]
    assert moved["old"] == []
    for number in (0, 1):
        assert found[f"metrics_{number}"]["train/logprob_gap"] == pytest.approx(gap, rel=1e-6)
    assert moved["metrics_0"]["train/logprob_gap"] == pytest.approx(gap, rel=1e-5)
    assert moved["metrics_1"]["train/logprob_gap"] != pytest.approx(gap, rel=1e-2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "split",
    [
        ["pipeline=2", "virtual_stages=2"],
        ["tensor=2", "sequence=true"],
        ["pipeline=2"],
        ["data=2"],
        ["context=2"],
    ],
    ids=",".join,
)
def test_updates_are_the_same_for_every_split(model_folder: Path, split: list[str]) -> None:
    alone = load(model_folder, "algorithm.policy_loss.old_logprobs=recompute")
    extra = [f"parallel.{part}" for part in split]
    shared = load(model_folder, "algorithm.policy_loss.old_logprobs=recompute", *extra)
    expected, found = run_ranks(two_updates, 1, alone)[0], run_ranks(two_updates, 2, shared)
    for number in (0, 1):
        for name in ("train/loss", "train/logprob_gap", "train/mismatch_k3", "train/grad_norm"):
            for rank in found:
                value = rank[f"metrics_{number}"][name]
                assert value == pytest.approx(
                    expected[f"metrics_{number}"][name], rel=1e-4, abs=1e-6
                )
