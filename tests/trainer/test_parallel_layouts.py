"""Every way to divide the work gives the same gradients, and trains alike for three steps."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.algorithms.objective import find_objective
from megatron_rl.config.expert import public_key
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.trainer.model.policy import Policy, open_policy
from megatron_rl.trainer.step import Trainer
from megatron_rl.weights.layout.families import FAMILIES
from megatron_rl.weights.layout.families.family import Family
from megatron_rl.weights.layout.local_names import named_parameters, named_tensors
from tests.distributed import run_ranks
from tests.family_cases import ENDING, family_cases
from tests.tiny_batches import VOCAB, my_share
from tests.tiny_models import GLM4_MOE, GPT_OSS, PLAIN, write_model
from tests.trainer.test_step import assert_gradient_equal, reference_gradient

STEPS = 3
COMMON = [
    "model.dtype=float32",
    "optimizer.lr=1e-3",
    "optimizer.warmup_steps=0",
]
SEQUENCE = "tensor=2 sequence=true"
INTERLEAVED = "pipeline=2 virtual_stages=2"
SHARDED = "data=2 distributed_optimizer=true"
OVERLAP = "overlap_gradients=true overlap_parameters=true"

DENSE = [
    "tensor=2",
    SEQUENCE,
    "pipeline=2",
    "pipeline=2 last_stage_layers=1",
    INTERLEAVED,
    "data=2 overlap_gradients=true",
    SHARDED,
    f"{SHARDED} {OVERLAP}",
    "context=2",
    f"context=2 {SEQUENCE}",
    f"pipeline=2 {SEQUENCE}",
    f"pipeline=2 {SHARDED}",
    f"{INTERLEAVED} {SHARDED} {OVERLAP}",
    "recompute=selective",
    "recompute=full",
    "data=2",
    "context=4",
    "context=2 pipeline=2",
    f"context=2 {SHARDED} {OVERLAP}",
    f"{INTERLEAVED} {SEQUENCE}",
    # What tensor=2 data=2 derives.
    f"{SHARDED} overlap_gradients=true {SEQUENCE}",
    f"context=2 {SEQUENCE} recompute=full",
]
MIXED = [
    f"{SHARDED} expert=2",
    f"{SEQUENCE} expert=2",
    f"{SEQUENCE} data=2 expert=2 expert_tensor=2",
    "context=2 expert=2",
    f"{SHARDED} {OVERLAP} expert=2",
    f"{SEQUENCE} expert_tensor=2",
    f"{INTERLEAVED} data=2 expert=2",
    "data=2 expert=2 recompute=selective",
]

Curve = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


def train(cfg: Config) -> Curve:
    """Some updates on this rank."""
    with open_policy(cfg) as policy:
        trainer = Trainer(policy, find_objective(cfg.algorithm), cfg.optimizer, STEPS)
        curve = []
        for _ in range(STEPS):
            found = {m.name: m.value for m in trainer.update(my_share(30), version=0)}
            curve.append((found["train/loss"], found["train/grad_norm"]))
    return curve


def keys_of(layout: str) -> list[str]:
    """Overrides: a layout is keys of `parallel` and recompute."""
    sections = {"recompute": "model"}
    sized = [key.partition("=") for key in layout.split()]
    return [
        public_key(f"{sections.get(name, 'parallel')}.{name}") + f"={value}"
        for name, _, value in sized
    ]


def config_of(folder: Path, layout: str) -> Config:
    """A float32 run of the model in `folder`."""
    return load_config(None, [*PLAIN, *COMMON, f"model.path={folder}", *keys_of(layout)])


def curve_of(folder: Path, layout: str) -> Curve:
    """Of rank 0, as a whole run would log it."""
    cfg = config_of(folder, layout)
    first, *others = run_ranks(train, cfg.parallel.world_size, cfg)
    assert all(other == first for other in others)
    return first


def splits_of(options: dict[str, Any], family: Family) -> list[str]:
    """Layouts of a model of `family_cases` in which each rank has whole gradients."""
    splits = ["", "pipeline=2", "pipeline=2 last_stage_layers=1", INTERLEAVED, "context=2"]
    splits += ["data=2", "recompute=selective", "recompute=full"]
    if options["num_key_value_heads"] % 2 == 0:
        splits += [SEQUENCE, f"context=2 {SEQUENCE}", f"pipeline=2 {SEQUENCE}"]
        splits += [] if family.experts else ["tensor=2"]
    else:
        splits.append("tensor=3 sequence=true")
    if family.experts:
        splits += [f"{one} expert=2" for one in splits if one in (SEQUENCE, "context=2", "data=2")]
        # Ranks cannot share the biases of an expert.
        splits += [] if family.has_biases else ["data=2 expert_tensor=2"]
    return splits


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "options"), family_cases())
def test_every_split_of_a_family_has_the_gradients_of_transformers(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    write_model(tmp_path, family=name, vocab_size=VOCAB, **options)
    expected = reference_gradient(tmp_path)
    zero = [tensor for tensor, gradient in expected.tensors.items() if not gradient.any()]
    assert all(".experts." in tensor for tensor in zero)
    for split in splits_of(options, FAMILIES[name + ENDING]):
        assert_gradient_equal(tmp_path, keys_of(split), 30, expected)


TRAINED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "Llama": ({"is_tied": True}, DENSE),
    "Glm4Moe": (GLM4_MOE, [*MIXED, "pipeline=2", "pipeline=2 last_stage_layers=1"]),
    # Ranks cannot share the biases of an expert.
    "GptOss": (GPT_OSS, [one for one in MIXED if "expert_tensor" not in one]),
}
"""Options of the tiny model, and layouts."""
Trained = Callable[[str], tuple[Path, Curve]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Gives the folder and the curve of one process of a family."""

    @functools.cache
    def of_family(family: str) -> tuple[Path, Curve]:
        folder = tmp_path_factory.mktemp(family)
        write_model(folder, family=family, vocab_size=VOCAB, **TRAINED[family][0])
        return folder, curve_of(folder, "")

    return of_family


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    ("family", "layout"),
    [(family, layout) for family, (_, layouts) in TRAINED.items() for layout in layouts],
)
def test_a_model_trains_alike(family: str, layout: str, trained: Trained) -> None:
    folder, expected = trained(family)
    for found, alone in zip(curve_of(folder, layout), expected, strict=True):
        assert found == pytest.approx(alone, rel=1e-5)
    losses = [loss for loss, _ in expected]
    assert losses[-1] < losses[0] - 1e-3, "the steps must matter"


def router_gradients(cfg: Config) -> dict[str, Tensor]:
    """Of the routers after an update, and the corrections, which none may change."""
    with open_policy(cfg) as policy:
        before = {name: one.clone() for name, one in corrections_of(policy).items()}
        trainer = Trainer(policy, find_objective(cfg.algorithm), cfg.optimizer, STEPS)
        trainer.update(my_share(30), version=0)
        after = corrections_of(policy)
        assert before.keys() == after.keys() and len(after) == 3
        assert all(torch.equal(one, after[name]) and one.any() for name, one in before.items())
        assert all(one.dtype == torch.float32 for one in after.values())
        named = named_parameters(policy.chunks)
        return {n: p.main_grad.clone() for n, p in named.items() if ".router." in n}


def corrections_of(policy: Policy) -> dict[str, Tensor]:
    return {n: t for n, t in named_tensors(policy.chunks).items() if n.endswith("expert_bias")}


@pytest.mark.parametrize("layout", [f"{SEQUENCE} expert=2", "data=2 expert=2"])
def test_routers_get_the_same_gradient_and_keep_their_corrections(
    layout: str, trained: Trained
) -> None:
    folder, _ = trained("Glm4Moe")
    [alone] = run_ranks(router_gradients, 1, config_of(folder, ""))
    for found in run_ranks(router_gradients, 2, config_of(folder, layout)):
        assert found.keys() == alone.keys() and len(found) == 3
        for name, expected in alone.items():
            error = (found[name] - expected).norm() / expected.norm()
            assert error < 1e-5 and expected.norm() > 0


def parameters_around_a_gather(cfg: Config) -> list[Tensor]:
    """All parameters in one after an update, before and after they are gathered."""
    with open_policy(cfg) as policy:
        trainer = Trainer(policy, find_objective(cfg.algorithm), cfg.optimizer, STEPS)
        trainer.update(my_share(30), version=0)
        found = []
        for _ in range(2):
            held = named_parameters(policy.chunks).values()
            found.append(torch.cat([parameter.detach().flatten() for parameter in held]))
            trainer.gather()
    return found


def test_overlapped_parameters_are_whole_once_gathered(trained: Trained) -> None:
    folder, _ = trained("Llama")
    plain, overlapped = (
        run_ranks(parameters_around_a_gather, 2, config_of(folder, layout))
        for layout in (SHARDED, f"{SHARDED} {OVERLAP}")
    )
    expected = plain[0][0]
    assert not any(torch.equal(before, expected) for before, _ in overlapped)
    assert all(torch.equal(after, expected) for _, after in overlapped)
