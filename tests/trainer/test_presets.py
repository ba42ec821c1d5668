"""The gradient of every preset is the same for every packing, budget and parallel split (fp32)."""

from pathlib import Path

import pytest
import torch

from megatron_rl.algorithms.objective import find_objective
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.files import load_config
from megatron_rl.config.presets import PRESETS
from megatron_rl.config.tree import Config
from megatron_rl.trainer.model.policy import open_policy
from megatron_rl.trainer.step import Trainer
from megatron_rl.weights.folders.export import export_tensors
from megatron_rl.weights.layout.local_names import named_parameters
from tests.distributed import run_ranks
from tests.tiny_batches import VOCAB, my_share
from tests.tiny_models import PLAIN, write_model

TOLERANCE = 1e-5
HIDDEN = 64
OBJECTIVES = {
    **{name: {"preset": name, "reference": {"policy": "start"}} for name in PRESETS},
    "kl to go": {
        "kl": {"placement": "reward", "coefficient": 0.5},
        "reference": {"policy": "start"},
    },
    "kl of sequences": {
        "kl": {"placement": "loss", "coefficient": 0.5},
        "reference": {"policy": "start"},
    },
    "kl exact": {
        "kl": {"placement": "loss", "estimator": "exact", "coefficient": 0.5},
        "reference": {"policy": "start"},
    },
    "kl exact beside entropy and regression": {
        "preset": "agro",
        "kl": {"placement": "loss", "estimator": "exact", "coefficient": 0.5},
        "entropy": {"coefficient": 0.1},
    },
    "entropy": {"entropy": {"coefficient": 0.1}},
    "sequences masked": {
        "correction": {"name": "masked", "level": "sequence", "low": 0.1, "high": 10.0}
    },
    "jepo_mixed with ratios of sequences": {
        "preset": "jepo_mixed",
        "policy_loss": {"level": "sequence", "eps_high": 1.0, "old_logprobs": "recompute"},
        "correction": {"name": "truncated", "level": "sequence"},
        "kl": {"placement": "reward", "coefficient": 0.5},
        "reference": {"policy": "start"},
    },
    "cross entropy": {
        "preset": "spo",
        "shaping": {"name": "cross_entropy", "temperature": 2.0},
    },
}
"""What differs from the defaults. Regressions with a temperature that lets them be seen."""


def algorithm(given: dict) -> AlgorithmConfig:
    cfg = AlgorithmConfig.model_validate(given)
    shaping = cfg.shaping.model_copy(update={"temperature": max(cfg.shaping.temperature, 0.1)})
    return cfg.model_copy(update={"shaping": shaping})


TEMPERATURE = 0.9


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_model(folder, is_tied=True, vocab_size=VOCAB)
    return folder


def gradients(cfg: Config, budget_tokens: int) -> dict[str, dict[str, torch.Tensor]]:
    """Of each objective the gradient in Hugging Face layout (rank 0), and the loss."""
    found = {}
    with open_policy(cfg) as policy:
        parameters = named_parameters(policy.chunks)
        start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        for name, given in OBJECTIVES.items():
            with torch.no_grad():
                for key, parameter in parameters.items():
                    parameter.copy_(start[key])
            trainer = Trainer(policy, find_objective(algorithm(given)), cfg.optimizer, 1)
            # Away from the reference, and from the logprobs before the batch.
            has_gold = name.startswith("jepo")
            share = my_share(budget_tokens, has_gold=has_gold, temperature=TEMPERATURE)
            prepared = trainer.prepare([share])[0]
            if (head := trainer.value_head) is not None:
                head.restore({"weights": torch.linspace(-1, 1, HIDDEN + 1), "moments": {}})
            with torch.no_grad():
                for parameter in parameters.values():
                    parameter.mul_(1.2)
            sums = trainer.accumulate(share, version=0, prepared=prepared).sums
            with torch.no_grad():
                for parameter in parameters.values():
                    parameter.copy_(parameter.main_grad)
            tensors = export_tensors(policy.chunks, policy.shape)
            found[name] = {key: tensor.clone() for key, tensor in tensors}
            found[name]["loss"] = torch.tensor(sums["loss"])
            if head is not None:
                found[name]["value"] = head.gradient().float()
    return found


def load(folder: Path, *overrides: str) -> Config:
    return load_config(None, [*PLAIN, f"model.path={folder}", "model.dtype=float32", *overrides])


@pytest.fixture(scope="module")
def expected(model_folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """One sequence a microbatch, on one rank."""
    return run_ranks(gradients, 1, load(model_folder), 1, timeout_s=120)[0]


@pytest.mark.sampled(3)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("split", "budget_tokens"),
    [
        ((), 1000),
        (("data=2",), 40),
        (("tensor=2", "sequence=true"), 25),
        (("pipeline=2",), 1),
        (("context=2",), 40),
    ],
    ids=str,
)
def test_the_gradient_is_that_of_one_sequence_at_a_time(
    model_folder: Path, expected: dict, split: tuple[str, ...], budget_tokens: int
) -> None:
    cfg = load(model_folder, *(f"parallel.{part}" for part in split))
    found = run_ranks(gradients, cfg.parallel.world_size, cfg, budget_tokens, timeout_s=180)[0]
    for name, tensors in expected.items():
        total = torch.stack([tensor.norm() for tensor in tensors.values()]).norm()
        assert total > 1e-3, name
        for key, tensor in tensors.items():
            error = (found[name][key] - tensor).norm()
            assert error <= TOLERANCE * max(float(tensor.norm()), 0.01 * float(total)), (name, key)
