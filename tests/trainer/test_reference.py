"""The reference policy's logprobs are those of its weights, and the policy keeps its own."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_rl.algorithms.objective import find_objective
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.trainer.model.policy import open_policy
from megatron_rl.trainer.reference import Reference, open_reference
from megatron_rl.trainer.step import Trainer
from tests.distributed import run_ranks
from tests.tiny_batches import VOCAB, make_sequences, my_share
from tests.tiny_models import write_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The policy's, and a teacher's of the same sizes."""
    found = []
    for spread in (0.02, 0.05):
        folder = tmp_path_factory.mktemp("llama")
        write_model(folder, vocab_size=VOCAB, initializer_range=spread)
        found.append(folder)
    return found[0], found[1]


def load(folder: Path, reference: str, *overrides: str) -> Config:
    given = ["algorithm.preset=agro", f"algorithm.reference.policy={reference}"]
    steep = ["optimizer.warmup_steps=0", "optimizer.lr=0.01", "model.dtype=float32"]
    return load_config(None, [f"model.path={folder}", *given, *steep, *overrides])


def reference_after_two_updates(cfg: Config) -> dict[str, object]:
    """Logprobs of the reference and of the policy around two updates, one microbatch each."""
    with open_policy(cfg) as policy:
        trainer = Trainer(policy, find_objective(cfg.algorithm), cfg.optimizer, 2)
        share = my_share(1000)
        found: dict[str, object] = {"start": trainer._logprobs(share), "after": []}
        weights = []
        for _ in range(2):
            known = trainer.prepare([share])[0]
            found["reference"] = [k.reference_logprobs for k in known]
            trainer.update(share, version=0, known=known)
            trainer.gather()
            weights.append([p.detach().clone() for p in policy.chunks[0].parameters()])
        known = trainer.prepare([share])[0]
        found["last"] = [k.reference_logprobs for k in known]
        kept = list(policy.chunks[0].parameters())
        found["is_kept"] = all(map(torch.equal, kept, weights[-1]))
        found["moved"] = trainer._logprobs(share)
        assert trainer.reference is not None
        found["weights"] = (weights, trainer.reference._weights)
        return found


def transformers_logprobs(folder: Path) -> list[torch.Tensor]:
    """Of each sequence."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for s in make_sequences():
        ids = torch.tensor(s.token_ids, dtype=torch.int64)
        rows = torch.log_softmax(model(ids[None]).logits[0].detach(), -1)
        places = range(s.prompt_length, len(ids))
        found.append(torch.stack([rows[i - 1, ids[i]] for i in places]))
    return found


def sorted_by_length(logprobs: torch.Tensor) -> list[float]:
    """All values, in an order that no packing changes."""
    return sorted(logprobs.tolist())


@pytest.mark.parametrize("split", ["data=1", "tensor=2", "pipeline=2"])
def test_the_start_and_a_folder_have_the_logprobs_of_transformers(
    folders: tuple[Path, Path], split: str
) -> None:
    policy, teacher = folders
    for reference, folder in (("start", policy), (str(teacher), teacher)):
        cfg = load(policy, reference, f"parallel.{split}")
        found = run_ranks(reference_after_two_updates, cfg.parallel.world_size, cfg)[-1]
        expected = sorted_by_length(torch.cat(transformers_logprobs(folder)))
        for logprobs in (found["reference"], found["last"]):
            assert sorted_by_length(torch.cat(logprobs)) == pytest.approx(expected, abs=2e-5)
        assert found["is_kept"]
        distance = (torch.cat(found["moved"]) - torch.cat(found["start"])).abs().max()
        assert distance > 1e-3


def test_a_moving_average_follows_the_weights(folders: tuple[Path, Path]) -> None:
    cfg = load(folders[0], "ema", "algorithm.reference.decay=0.75")
    found = run_ranks(reference_after_two_updates, 1, cfg)[0]
    (first, second), average = found["weights"]
    with_start = run_ranks(first_weights, 1, cfg)[0]
    for zero, one, two, mean in zip(with_start, first, second, average, strict=True):
        expected = 0.75 * (0.75 * zero + 0.25 * one) + 0.25 * two
        torch.testing.assert_close(mean, expected, rtol=1e-6, atol=1e-7)


def first_weights(cfg: Config) -> list[torch.Tensor]:
    with open_policy(cfg) as policy:
        return Reference(policy)._weights


def open_of_another_size(cfg: Config) -> str:
    with open_policy(cfg) as policy:
        try:
            open_reference(policy, cfg.algorithm)
        except InputError as error:
            return str(error)
    return ""


def test_a_folder_of_another_size_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    write_model(tmp_path, vocab_size=VOCAB, num_hidden_layers=1)
    message = run_ranks(open_of_another_size, 1, load(folders[0], str(tmp_path)))[0]
    assert str(tmp_path) in message and "give one as large" in message
