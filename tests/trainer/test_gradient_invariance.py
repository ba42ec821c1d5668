"""The gradient of a random minibatch is the same for every packing, budget, split and branch.

Tolerance: parameter by parameter, two splits differ by less than 2e-5 of the gradient's norm. It is
in float32, whose rounding is 6e-8, and sums of hundreds of terms are taken in another order.
"""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from megatron.core import parallel_state

from megatron_rl.algorithms.aggregation import group_tokens
from megatron_rl.algorithms.normalization import minibatch as normalize
from megatron_rl.algorithms.objective import find_objective
from megatron_rl.config.algorithm import AggregationConfig, NormalizationConfig
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.protocol.packing import Microbatch, deal
from megatron_rl.protocol.types import MinibatchShare, TrainSequence
from megatron_rl.trainer.model.policy import open_policy
from megatron_rl.trainer.step import Trainer
from tests.distributed import run_ranks
from tests.tiny_models import PLAIN, write_model

VOCAB = 200
TOLERANCE = 2e-5
FAINT = 1e-2
"""Share of the whole gradient below which a parameter's own norm is no measure."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_model(folder, is_tied=True, vocab_size=VOCAB, num_hidden_layers=2)
    return folder


@st.composite
def minibatches(draw: st.DrawFn) -> list[TrainSequence]:
    """Groups of one prompt each: random lengths, rewards, versions and mismatches."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    groups = draw(
        st.lists(
            st.tuples(st.integers(1, 12), st.lists(st.integers(1, 30), min_size=2, max_size=4)),
            min_size=1,
            max_size=3,
        )
    )
    count = sum(len(completions) for _, completions in groups)
    rewards = draw(st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=count, max_size=count))
    # Rewards that are all equal would leave no gradient to compare.
    rewards[0] = rewards[-1] + 0.5
    advantages = iter(normalize([np.array(rewards)], NormalizationConfig())[0])
    lengths = [np.array(completions) for _, completions in groups]
    weights = group_tokens(lengths, AggregationConfig())
    mismatch = draw(st.sampled_from([0.0, 0.05, 1.0]))
    sequences = []
    for (prompt, completions), (weight, *_) in zip(groups, weights, strict=True):
        prompt_ids = rng.integers(0, VOCAB, prompt)
        for completion in completions:
            start = int(rng.integers(1, completion + 1))
            end = int(rng.integers(start, completion + 1))
            # A third of the sequences has a tool result: tokens that nobody sampled.
            given = [(start, end)] if start < end < completion and rng.random() < 0.5 else []
            n = completion - sum(end - start for start, end in given)
            sequences.append(
                TrainSequence(
                    token_ids=np.concatenate(
                        [prompt_ids, rng.integers(0, VOCAB, completion)], dtype=np.int32
                    ),
                    prompt_length=prompt,
                    given=given,
                    generator_logprobs=(-5.3 + mismatch * rng.normal(size=n)).astype(np.float32),
                    version_runs=[(int(v), 1) for v in rng.integers(0, 2, n)],
                    advantage=float(next(advantages)),
                    weight=weight,
                )
            )
    return sequences


def in_branches(sequence: TrainSequence) -> TrainSequence:
    """The same tokens to learn, cut before the given ones: a second row repeats all before."""
    if not sequence.given:
        return sequence
    ((start, end),) = sequence.given
    cut = sequence.prompt_length + start
    return msgspec.structs.replace(
        sequence,
        token_ids=np.concatenate([sequence.token_ids[:cut], sequence.token_ids]),
        given=[(start, start + sequence.prompt_length + end)],
        row_starts=[cut],
    )


def random_split(count: int, dp_size: int, seed: int) -> list[list[Microbatch]]:
    """Microbatches of each rank, sequences dealt at random; some may stay empty."""
    rng = np.random.default_rng(seed)
    places = rng.integers(1, 5) * dp_size
    microbatches: list[Microbatch] = [[] for _ in range(places)]
    for index in rng.permutation(count):
        microbatches[rng.integers(places)].append(int(index))
    return [microbatches[rank::dp_size] for rank in range(dp_size)]


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """This rank's gradients as they stand in the buffers."""
    return {n: p.main_grad.clone() for n, p in trainer.policy.chunks[0].named_parameters()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    total = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for name, gradient in expected.items():
        error = (found[name] - gradient).norm()
        assert error <= TOLERANCE * max(gradient.norm(), FAINT * total), name


def check_splits(cfg: Config, examples: int) -> list[tuple[float, float]]:
    """In any layout: random splits against one sequence a microbatch, on every rank.

    Ranks and layouts draw the same examples. Returns (loss, gradient norm) of each.
    """
    results: list[tuple[float, float]] = []
    with open_policy(cfg) as policy:
        trainer = Trainer(policy, find_objective(cfg.algorithm), cfg.optimizer, 1)
        dp_size = parallel_state.get_data_parallel_world_size()
        dp_rank = parallel_state.get_data_parallel_rank()

        @settings(max_examples=examples, derandomize=True, database=None, deadline=None)
        @drawn(minibatches(), st.booleans(), st.integers(1, 200), st.integers(0, 2**32 - 1))
        def compare(
            sequences: list[TrainSequence], is_dealt: bool, budget_tokens: int, seed: int
        ) -> None:
            lengths = [len(sequence.token_ids) for sequence in sequences]

            def share(ranks: list[list[Microbatch]]) -> MinibatchShare:
                return MinibatchShare([[sequences[i] for i in m] for m in ranks[dp_rank]])

            # The learning rate is 0: an update leaves the gradient and moves nothing.
            alone = share(deal(lengths, budget_tokens=1, dp_size=dp_size))
            metrics = {m.name: m.value for m in trainer.update(alone, version=1)}
            expected = gradients(trainer)
            split = (
                deal(lengths, budget_tokens=budget_tokens, dp_size=dp_size)
                if is_dealt
                else random_split(len(sequences), dp_size, seed)
            )
            loss = trainer.accumulate(share(split), version=1).sums["loss"]
            assert_equal(gradients(trainer), expected)
            sequences = [in_branches(sequence) for sequence in sequences]
            branched = trainer.accumulate(share(split), version=1).sums["loss"]
            assert_equal(gradients(trainer), expected)
            assert branched == pytest.approx(loss, rel=TOLERANCE, abs=TOLERANCE)
            assert loss == pytest.approx(metrics["train/loss"], rel=TOLERANCE, abs=TOLERANCE)
            results.append((loss, metrics["train/grad_norm"]))

        compare()
    return results


def load(folder: Path, *overrides: str) -> Config:
    fixed = ["optimizer.lr=0", "optimizer.clip_grad_norm=1e9", "model.dtype=float32"]
    return load_config(None, [*PLAIN, f"model.path={folder}", *fixed, *overrides])


def assert_layouts_agree(folder: Path, layouts: list[list[str]], examples: int) -> None:
    (expected,) = run_ranks(check_splits, 1, load(folder), examples, timeout_s=300)
    assert len(expected) >= examples
    for sizes in layouts:
        cfg = load(folder, *(f"parallel.{size}" for size in sizes))
        ranks = run_ranks(check_splits, cfg.parallel.world_size, cfg, examples, timeout_s=300)
        for found in ranks:
            for values, reference in zip(found, expected, strict=True):
                assert values == pytest.approx(reference, rel=TOLERANCE, abs=TOLERANCE), sizes


@pytest.mark.timeout(300)
def test_gradient_is_the_same_for_random_minibatches_and_splits(model_folder: Path) -> None:
    assert_layouts_agree(model_folder, [["data=2"], ["tensor=2", "sequence=true"]], examples=5)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_gradient_is_the_same_for_many_minibatches_and_layouts(model_folder: Path) -> None:
    layouts = [
        ["tensor=2"],
        ["context=2"],
        ["pipeline=2"],
        ["pipeline=2", "data=2"],
        ["tensor=2", "data=2"],
    ]
    assert_layouts_agree(model_folder, layouts, examples=15)
