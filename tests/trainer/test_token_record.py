"""What the trainer records of single tokens, beside a transformers model and for every split."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from transformers import AutoModelForCausalLM

from megatron_rl.algorithms.objective import find_objective
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.protocol.trained_tokens import TrainedTokens, read_trained, trained_files
from megatron_rl.protocol.types import TrainSequence
from megatron_rl.trainer.model.policy import open_policy
from megatron_rl.trainer.step import Trainer
from megatron_rl.trainer.step_records import TokenRecord
from tests.distributed import run_ranks
from tests.tiny_batches import VOCAB, make_sequences, my_share
from tests.tiny_models import PLAIN, write_model

TEMPERATURE = 0.9
STEP = 4


def identified(sequence: TrainSequence) -> TrainSequence:
    """With the identity of a rollout; the fifth is of a run before, the sixth learns an answer."""
    number = 3 * sequence.group + sequence.member
    return msgspec.structs.replace(
        sequence,
        rollout=(-1, 0) if number == 4 else (100 + sequence.group, sequence.member),
        gold_tokens=2 if number == 5 else 0,
    )


def record(cfg: Config, budget_tokens: int, run_dir: Path) -> None:
    """Train on the minibatch once, and then once more with a learning rate, of other rollouts."""
    with open_policy(cfg) as policy:
        own = TokenRecord(run_dir, parallel_state.get_data_parallel_rank())
        objective = find_objective(AlgorithmConfig())
        trainer = Trainer(policy, objective, cfg.optimizer, 2, record=own)
        share = my_share(budget_tokens, temperature=TEMPERATURE)
        named = [[identified(s) for s in microbatch] for microbatch in share.microbatches]
        share = msgspec.structs.replace(share, microbatches=named)
        trainer.update(share, version=0)
        trainer.write_record(STEP)
        # A step of which nothing is left.
        trainer.write_record(STEP + 1)


def load(folder: Path, *overrides: str) -> Config:
    return load_config(None, [*PLAIN, f"model.path={folder}", "model.dtype=float32", *overrides])


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_model(folder, is_tied=True, vocab_size=VOCAB)
    return folder


@pytest.fixture(scope="module")
def expected(model_folder: Path) -> dict[tuple[int, int], TrainedTokens]:
    """By transformers, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    found = {}
    for sequence in map(identified, make_sequences()):
        if sequence.rollout[0] < 0 or sequence.gold_tokens:
            continue
        ids = torch.tensor(sequence.token_ids, dtype=torch.int64)[None]
        with torch.no_grad():
            logits = model(ids).logits[0, sequence.targets - 1] / TEMPERATURE
        logs = logits.log_softmax(-1)
        targets = ids[0, sequence.targets]
        found[sequence.rollout] = TrainedTokens(
            logs.gather(1, targets[:, None])[:, 0].numpy(),
            -(logs.exp() * logs).sum(-1).numpy(),
            np.full(len(targets), sequence.advantage, np.float32),
        )
    assert len(found) == 7
    return found


@pytest.mark.parametrize(
    ("split", "budget_tokens"),
    [
        ((), 1000),
        (("data=2",), 40),
        pytest.param(("tensor=2", "sequence=true"), 25, marks=pytest.mark.exhaustive),
        (("pipeline=2",), 1),
        (("context=2",), 40),
    ],
    ids=str,
)
def test_logprobs_entropies_and_advantages_are_those_of_each_token(
    model_folder: Path,
    expected: dict[tuple[int, int], TrainedTokens],
    split: tuple[str, ...],
    budget_tokens: int,
    tmp_path: Path,
) -> None:
    cfg = load(model_folder, *(f"parallel.{part}" for part in split))
    run_ranks(record, cfg.parallel.world_size, cfg, budget_tokens, tmp_path, timeout_s=100)
    files = trained_files(tmp_path)
    assert [step for step, _ in files] == [STEP] * cfg.parallel.data
    for (group, index), wanted in expected.items():
        found = read_trained(tmp_path, STEP, group, index)
        assert found is not None
        for mine, theirs in zip(found, wanted, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    recorded = 0
    for _, path in files:
        with np.load(path, allow_pickle=False) as arrays:
            recorded += len(arrays["rollouts"])
    # Neither what another run sampled nor what has a reference answer in it.
    assert recorded == len(expected)
    assert read_trained(tmp_path, STEP, 101, 1) is None
    assert read_trained(tmp_path, STEP + 1, 100, 0) is None
