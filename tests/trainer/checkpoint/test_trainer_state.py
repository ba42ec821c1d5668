"""A saved trainer goes on as if it had not stopped, under any split of ranks (fp32, gloo)."""

import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from safetensors.torch import load_file

from megatron_rl.algorithms.objective import find_objective
from megatron_rl.config.errors import InputError
from megatron_rl.config.expert import public_key
from megatron_rl.config.files import load_config
from megatron_rl.config.staging import optimizer_steps
from megatron_rl.config.tree import Config, OptimizerConfig, ParallelConfig
from megatron_rl.trainer.checkpoint.background_save import BackgroundSave, SavePlans
from megatron_rl.trainer.checkpoint.optimizer_state import (
    adam_steps,
    restore_optimizer_state,
    sharded_optimizer_state,
)
from megatron_rl.trainer.checkpoint.trainer_state import _check_shape, restore, sharded_state
from megatron_rl.trainer.model.policy import open_policy
from megatron_rl.trainer.optimizer import build_optimizer, lr_at
from megatron_rl.trainer.step import Trainer
from megatron_rl.weights.folders.load import unwrap
from megatron_rl.weights.layout.families import FAMILIES
from megatron_rl.weights.layout.local_names import named_tensors
from megatron_rl.weights.layout.shape import read_shape
from tests.distributed import run_ranks
from tests.family_cases import ENDING, family_cases
from tests.tiny_batches import VOCAB, my_share
from tests.tiny_models import CORRECTION, GLM4_MOE, PLAIN, QWEN3_MOE, load_on_rank, write_model

SAVED_AT, STEPS = 2, 4
TOTAL_STEPS = 10


def new_trainer(cfg: Config, policy: object) -> Trainer:
    return Trainer(policy, find_objective(cfg.algorithm), cfg.optimizer, TOTAL_STEPS)


def take_steps(trainer: Trainer, first: int, last: int) -> list[tuple[float, float, float]]:
    """(loss, gradient norm, learning rate) of each step."""
    taken = []
    for step in range(first, last):
        share = my_share(30, seed=step)
        prepared = trainer.prepare([share])[0]
        values = {m.name: m.value for m in trainer.update(share, version=0, prepared=prepared)}
        taken.append((values["train/loss"], values["train/grad_norm"], values["train/lr"]))
    return taken


def saving_run(cfg: Config, folder: Path) -> list[tuple[float, float, float]]:
    """Saves after SAVED_AT steps and goes on while the files are written."""
    with open_policy(cfg) as policy:
        trainer = new_trainer(cfg, policy)
        take_steps(trainer, 0, SAVED_AT)
        torch.rand(3)
        folder.mkdir(exist_ok=True)
        save = BackgroundSave(sharded_state(trainer, SAVED_AT), folder, SavePlans())
        drawn = torch.rand(4).tolist()
        taken = take_steps(trainer, SAVED_AT, STEPS)
        assert save.wait(time.monotonic() + 100)
        save.finalize()
        return [*taken, tuple(drawn)]


def resumed_run(cfg: Config, folder: Path) -> list[tuple[float, float, float]]:
    with open_policy(cfg) as policy:
        trainer = new_trainer(cfg, policy)
        assert restore(trainer, folder) == SAVED_AT
        drawn = torch.rand(4).tolist()
        return [*take_steps(trainer, SAVED_AT, STEPS), tuple(drawn)]


def rates_after_resume(cfg: Config, folder: Path) -> list[float]:
    """Learning rates of the steps from the checkpoint to the end of training."""
    with open_policy(cfg) as policy:
        trainer = new_trainer(cfg, policy)
        trainer.expect_steps(left := optimizer_steps(cfg, restore(trainer, folder)))
        return [rate for _, _, rate in take_steps(trainer, SAVED_AT, SAVED_AT + left)]


def config(model: Path, *overrides: str) -> Config:
    common = [*PLAIN, f"model.path={model}", "model.dtype=float32", "optimizer.lr=0.01"]
    common += [
        "optimizer.warmup_steps=1",
        "optimizer.lr_schedule=linear",
        "optimizer.weight_decay=0.1",
    ]
    return load_config(None, [*common, *overrides])


def public_key_of(size: str) -> str:
    """The override of a size of [parallel], such as "tensor=2"."""
    name, _, value = size.partition("=")
    return f"{public_key(f'parallel.{name}')}={value}"


def splits(*texts: str) -> list[list[str]]:
    """Overrides of each "tensor=2 data=2"."""
    return [[public_key_of(size) for size in text.split()] for text in texts]


def check(model: Path, folder: Path, saved: list[str], resumed: list[list[str]]) -> None:
    """Save under one split, resume under each of the others and under the same."""
    cfg = config(model, *saved)
    *expected, drawn = run_ranks(saving_run, cfg.parallel.world_size, cfg, folder)[0]
    cfg = config(model, *saved)
    assert run_ranks(resumed_run, cfg.parallel.world_size, cfg, folder)[0] == [*expected, drawn]
    for split in resumed:
        cfg = config(model, *split)
        *taken, _ = run_ranks(resumed_run, cfg.parallel.world_size, cfg, folder)[0]
        for step, step_expected in zip(taken, expected, strict=True):
            assert step == pytest.approx(step_expected, rel=1e-5), split


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    write_model(folder, is_tied=True, vocab_size=VOCAB)
    return folder


def test_a_reference_that_follows_the_policy_and_a_value_are_resumed(
    dense: Path, tmp_path: Path
) -> None:
    average = ["algorithm.reference.policy=ema", "algorithm.reference.decay=0.5"]
    average += ["algorithm.preset=dro", "expert.algorithm.shaping.value_lr=0.5"]
    held = ["algorithm.kl.placement=loss", "algorithm.kl.coefficient=0.5", *average]
    splits_of_ranks = [[*split, *held] for split in splits("tensor=1", "tensor=2", "pipeline=2")]
    check(dense, tmp_path / "c", held, splits_of_ranks)


def save_after_steps(trainer: Trainer, folder: Path) -> None:
    take_steps(trainer, 0, SAVED_AT)
    folder.mkdir(exist_ok=True)
    save = BackgroundSave(sharded_state(trainer, SAVED_AT), folder, SavePlans())
    assert save.wait(time.monotonic() + 100)
    save.finalize()


def average_of(cfg: Config, folder: Path, is_saving: bool) -> list[torch.Tensor]:
    """This rank's part of the average, before it is saved or after it was read back."""
    with open_policy(cfg) as policy:
        trainer = new_trainer(cfg, policy)
        if is_saving:
            save_after_steps(trainer, folder)
        else:
            restore(trainer, folder)
        return trainer.reference._weights


def test_the_average_of_a_bfloat16_policy_is_resumed_bit_for_bit(
    dense: Path, tmp_path: Path
) -> None:
    ema = [
        "algorithm.preset=dro",
        "algorithm.reference.policy=ema",
        "algorithm.reference.decay=0.9",
    ]
    given = ["model.dtype=bfloat16", "parallel.tensor=2", "train.deterministic=true"]
    cfg = config(dense, *given, *ema)
    saved, resumed = (run_ranks(average_of, 2, cfg, tmp_path / "c", way) for way in (True, False))
    for before, after in zip(saved, resumed, strict=True):
        assert all(map(torch.equal, before, after))
        # Else any dtype would do.
        assert not all(torch.equal(part, part.bfloat16().float()) for part in before)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    write_model(folder, family="Qwen3Moe", vocab_size=VOCAB, num_hidden_layers=2, **QWEN3_MOE)
    return folder


SHARDED = "data=2 distributed_optimizer=true"


def test_resumed_trainer_takes_the_steps_of_the_uninterrupted_one(
    dense: Path, tmp_path: Path
) -> None:
    check(dense, tmp_path / "c", *splits("tensor=2"), splits("tensor=1", "pipeline=2", SHARDED))


def test_the_learning_rate_ends_at_its_least_after_a_resume_with_more_minibatches(
    dense: Path, tmp_path: Path
) -> None:
    run_ranks(saving_run, 1, config(dense), tmp_path / "c")
    # Two steps were taken with one minibatch. Three batches of two are left: 8 in all. With the
    # minibatches that the run had, the rates are those without a stop, bit for bit.
    for batches, minibatches, total in ((5, 2, 8), (TOTAL_STEPS, 1, TOTAL_STEPS)):
        cfg = config(dense, f"train.steps={batches}", f"train.minibatches={minibatches}")
        rates = run_ranks(rates_after_resume, 1, cfg, tmp_path / "c")[0]
        assert rates == [lr_at(step, cfg.optimizer, total) for step in range(2, total)]
        assert rates[-1] == pytest.approx(0.01 * 0.1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "saved",
    [
        "tensor=1",
        "pipeline=2",
        "pipeline=2 virtual_stages=2",
        "data=2",
        SHARDED,
        f"tensor=2 {SHARDED}",
        "context=2 distributed_optimizer=true",
    ],
)
def test_any_split_is_resumed_under_any_other(dense: Path, tmp_path: Path, saved: str) -> None:
    others = splits("tensor=1", "tensor=2", "tensor=2 pipeline=2", "data=2", SHARDED)
    others += splits("pipeline=2 virtual_stages=2", "context=2 distributed_optimizer=true")
    check(dense, tmp_path / "c", *splits(saved), others)


OVERLAPPED = f"{SHARDED} overlap_gradients=true overlap_parameters=true"
FURTHER = ["pipeline=2 virtual_stages=2", OVERLAPPED, "context=2"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("saved", [*FURTHER, f"{FURTHER[0]} {OVERLAPPED}"])
def test_interleaved_overlapped_and_context_splits_are_resumed(
    dense: Path, tmp_path: Path, saved: str
) -> None:
    check(dense, tmp_path / "c", *splits(saved), splits("tensor=2", *FURTHER))


EXPERTS = [
    "tensor=2 sequence=true expert=2",
    "data=2",
    f"expert=2 {SHARDED}",
    "tensor=2 sequence=true expert_tensor=2",
]


@pytest.fixture(scope="module")
def corrected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corrected")
    write_model(folder, family="Glm4Moe", vocab_size=VOCAB, **GLM4_MOE)
    return folder


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "options"), family_cases())
def test_every_family_is_resumed_under_another_split(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    write_model(tmp_path / "m", family=name, vocab_size=VOCAB, **options)
    count = options["num_key_value_heads"]
    tensor = f"tensor={2 if count % 2 == 0 else 3} sequence=true"
    experts = " expert=2" if FAMILIES[name + ENDING].experts else ""
    saved, resumed = f"pipeline=2 {SHARDED}{experts}", [f"{tensor} distributed_optimizer=true"]
    if experts and count % 2 == 0:
        resumed[0] += experts
    check(tmp_path / "m", tmp_path / "c", *splits(saved), splits(*resumed))


def corrections(cfg: Config, folder: Path, is_saving: bool) -> dict[str, torch.Tensor]:
    """This rank's corrections of routers after steps, or after they were read back."""
    with open_policy(cfg) as policy:
        trainer = new_trainer(cfg, policy)
        held = {n: t for n, t in named_tensors(policy.chunks).items() if n.endswith(".expert_bias")}
        if is_saving:
            save_after_steps(trainer, folder)
        else:
            for tensor in held.values():
                tensor.fill_(7)
            restore(trainer, folder)
        return {name: tensor.clone() for name, tensor in held.items()}


def test_corrections_of_routers_stay_exact_in_a_bfloat16_run(
    corrected: Path, tmp_path: Path
) -> None:
    cfg = config(corrected, "model.dtype=bfloat16", *splits(EXPERTS[0])[0])
    saved, resumed = (run_ranks(corrections, 2, cfg, tmp_path / "c", way) for way in (True, False))
    published = load_file(corrected / "model.safetensors")
    for number in (1, 2, 3):
        expected = published[f"model.layers.{number}.mlp{CORRECTION}"]
        # Else any dtype would do.
        assert not torch.equal(expected, expected.bfloat16().float())
        for rank in (*saved, *resumed):
            found = rank[f"decoder.layers.{number}.mlp.router.expert_bias"]
            assert found.dtype == torch.float32 and torch.equal(found, expected)


def test_a_checkpoint_from_before_a_field_of_the_shape_fits(dense: Path, tmp_path: Path) -> None:
    policy = SimpleNamespace(shape=read_shape(dense))
    older = dataclasses.asdict(policy.shape)
    del older["rotary_dim"], older["dense_layers"]
    _check_shape(policy, older, tmp_path)
    policy.shape = dataclasses.replace(policy.shape, rotary_dim=4)
    with pytest.raises(InputError, match="its rotary_dim is 0, that of model.path is 4"):
        _check_shape(policy, older, tmp_path)


def test_experts_are_resumed_under_another_split(mixture: Path, tmp_path: Path) -> None:
    check(mixture, tmp_path / "c", *splits(EXPERTS[2]), splits("tensor=1"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("saved", ["tensor=1", *EXPERTS, "pipeline=2 data=2 expert=2"])
def test_experts_are_resumed_under_any_other_split(
    mixture: Path, tmp_path: Path, saved: str
) -> None:
    check(mixture, tmp_path / "c", *splits(saved), splits(*EXPERTS))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("saved", ["data=2", SHARDED])
def test_masters_of_a_bfloat16_model_are_resumed(dense: Path, tmp_path: Path, saved: str) -> None:
    # Were masters made anew from the weights, the same split would differ in bits.
    check(dense, tmp_path / "c", ["model.dtype=bfloat16", *splits(saved)[0]], [])


def put_and_gather(folder: Path) -> list[str]:
    """Names of the parameters whose optimizer state comes back changed, with many small buckets."""
    loaded = load_on_rank(folder, ParallelConfig(data=2, distributed_optimizer=True))
    module = unwrap(loaded.model[0])
    buckets = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=10_000
    )
    chunk = DistributedDataParallel(module.config, buckets, module)
    assert len(chunk.buffers[0].buckets) > 5
    optimizer = build_optimizer(OptimizerConfig(), [chunk])
    model = {"model0": module.sharded_state_dict()}
    wanted = sharded_optimizer_state(optimizer, model, is_loading=True)
    torch.manual_seed(3)
    values = {
        number: {name: torch.rand(shard.data.shape) for name, shard in state.items()}
        for number, state in wanted.items()
    }
    restore_optimizer_state(optimizer, model, values, steps=5)
    assert adam_steps(optimizer) == 5
    gathered = sharded_optimizer_state(optimizer, model)
    return [
        shard.key
        for number, state in gathered.items()
        for name, shard in state.items()
        if not torch.equal(shard.data, values[number][name])
    ]


def test_state_is_gathered_right_from_padded_buckets(dense: Path) -> None:
    assert run_ranks(put_and_gather, 2, dense) == [[], []]


def host_bytes(cfg: Config, folder: Path) -> tuple[int, int, int]:
    """Of a save: (host bytes of copies of optimizer state, of all state on this rank, foreign).

    foreign: tensors to be saved that are not in the optimizer's own memory.
    """
    with open_policy(cfg) as policy:
        trainer = new_trainer(cfg, policy)
        take_steps(trainer, 0, 1)
        state = sharded_state(trainer, 1)
        inner = [part.optimizer for part in trainer.optimizer.chained_optimizers]
        held = [t for each in inner for state in each.state.values() for t in state.values()]
        held += [t for each in inner for group in each.param_groups for t in group["params"]]
        own = {t.untyped_storage().data_ptr() for t in held if isinstance(t, torch.Tensor)}
        shards = [shard for each in state["optimizer"].values() for shard in each.values()]
        foreign = sum(s.data.untyped_storage().data_ptr() not in own for s in shards)
        size = sum(s.data.numel() * s.data.element_size() for s in shards)
        folder.mkdir(exist_ok=True)
        save = BackgroundSave(state, folder, SavePlans())
        copied = sum(
            item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
            for item in save._writer._plan.items
            if item.tensor_data is not None and item.index.fqn.startswith("optimizer.state.")
        )
        assert save.wait(time.monotonic() + 100)
        save.finalize()
        return copied, size, foreign


@pytest.mark.parametrize("split", ["data=4", "tensor=2 data=2"])
def test_a_rank_saves_its_share_from_where_it_lies(dense: Path, tmp_path: Path, split: str) -> None:
    cfg = config(dense, *splits(f"{split} distributed_optimizer=true")[0], "model.dtype=bfloat16")
    [alone] = run_ranks(host_bytes, 1, config(dense, "model.dtype=bfloat16"), tmp_path / "alone")
    found = run_ranks(host_bytes, 4, cfg, tmp_path / "saved")
    copied, sizes, foreign = zip(*found, strict=True)
    assert foreign == (0, 0, 0, 0)
    # Nothing is written twice, and nothing is missing: as much as one rank alone writes.
    assert sum(copied) == alone[0] == alone[1]
    # Megatron pads a bucket so that each rank's share begins at 64 elements.
    share = alone[0] / 4
    # Tensor ranks hold norms both; each saves its own copy's share at most.
    assert max(sizes) <= share * 1.1 + 4 * 64 * 3
    assert max(copied) <= share * 1.1 + 4 * 64 * 3
