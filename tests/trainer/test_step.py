"""The gradient is the same for every packing, microbatch budget and parallel split (fp32).

Gradients are compared in Hugging Face layout, by the slices that each rank holds. The reference is
transformers' own model with an obvious per-sequence loss.
"""

import gc
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_rl.algorithms.objective import find_objective
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.protocol.types import TrainSequence
from megatron_rl.trainer.forward_backward import output_weight
from megatron_rl.trainer.mismatch import mismatch_metrics
from megatron_rl.trainer.model.collate import MicroBatch
from megatron_rl.trainer.model.policy import open_policy
from megatron_rl.trainer.step import Trainer
from megatron_rl.weights.folders.export import export_tensors
from megatron_rl.weights.folders.hf_folder import open_model
from megatron_rl.weights.folders.load import unwrap
from megatron_rl.weights.layout.local_names import named_parameters
from megatron_rl.weights.layout.ranks import own_place
from megatron_rl.weights.layout.shape import read_shape
from megatron_rl.weights.layout.slices import Slice, as_matrix, local_part
from megatron_rl.weights.layout.trainer_layout import copy_slices, trained_slices, untrained
from tests.distributed import run_ranks
from tests.obvious_losses import clipped_loss
from tests.tiny_batches import VOCAB, make_sequences, my_share
from tests.tiny_models import GPT_OSS, MIXED_WINDOWS, PLAIN, QWEN3_MOE, write_model

STILL = ["model.dtype=float32", "optimizer.lr=0", "optimizer.clip_grad_norm=1e9"]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_model(folder, is_tied=True, vocab_size=VOCAB)
    return folder


@pytest.fixture(scope="module")
def mixture_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    write_model(folder, family="Qwen3Moe", vocab_size=VOCAB, num_hidden_layers=2, **QWEN3_MOE)
    return folder


@dataclass(frozen=True)
class Gradient:
    """Of a whole model, as transformers computes it."""

    loss: float
    norm: float
    tensors: dict[str, Tensor]
    """By the name in Hugging Face files, each expert apart."""


Part = tuple[Slice, Tensor]
"""A slice and its gradient."""


def gradient_of(cfg: Config, budget_tokens: int) -> tuple[float, float, list[Part]]:
    """Loss, gradient norm, and what this rank holds of the gradient, after a step that moves
    nothing."""
    with open_policy(cfg) as policy:
        trainer = Trainer(policy, find_objective(cfg.algorithm), cfg.optimizer, 1)
        share = my_share(budget_tokens, has_groups=True)
        told = {metric.name: metric.value for metric in trainer.update(share, version=0)}
        named = named_parameters(policy.chunks)
        held = {name: parameter.main_grad for name, parameter in named.items()}
        place = own_place(policy.chunks[0].config)
        slices = trained_slices(policy.shape, place) + copy_slices(policy.shape, place)
        parts = [(part, local_part(held, part).clone()) for part in slices]
        return told["train/loss"], told["train/grad_norm"], parts


def reference_gradient(folder: Path) -> Gradient:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total = torch.zeros(())
    for s in make_sequences(has_groups=True):
        ids = torch.tensor(s.token_ids, dtype=torch.int64)
        rows = torch.log_softmax(model(ids[None]).logits[0].float(), -1)
        logprobs = torch.stack([rows[i - 1, ids[i]] for i in s.targets])
        ones = torch.ones(len(logprobs))
        old = torch.tensor(s.generator_logprobs)
        total = total + clipped_loss(logprobs, old, ones * s.advantage, ones * s.weight)
    total.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    for parameter in model.parameters():
        parameter.data = parameter.grad
    shape = read_shape(folder)
    # transformers renames tensors and divides experts while it writes.
    with tempfile.TemporaryDirectory() as written, ExitStack() as stack:
        model.save_pretrained(written)
        held = open_model(Path(written), shape, stack).text
        tensors = {name: held[name][:] for name in held.keys() - untrained(shape)}
    return Gradient(total.item(), norm.item(), tensors)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("tensor", "pipeline", "data", "budget_tokens", "extra"),
    [
        (1, 1, 1, 1000, []),
        (1, 1, 1, 1, []),
        (1, 1, 1, 25, []),
        (2, 1, 1, 30, []),
        (2, 1, 1, 30, ["parallel.sequence=true"]),
        (1, 2, 1, 30, []),
        (1, 2, 1, 30, ["parallel.virtual_stages=2"]),
        (1, 2, 1, 1000, ["parallel.virtual_stages=2"]),
        (1, 1, 2, 30, []),
        (2, 2, 1, 25, []),
        (1, 1, 1, 30, ["parallel.context=2"]),
        (1, 1, 1, 1, ["parallel.context=2"]),
        (2, 1, 1, 30, ["parallel.context=2", "parallel.sequence=true"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, list) else str(value),
)
def test_gradient_is_equal_for_every_split(
    model_folder: Path, tensor: int, pipeline: int, data: int, budget_tokens: int, extra: list[str]
) -> None:
    sizes = [
        f"parallel.tensor={tensor}",
        f"parallel.pipeline={pipeline}",
        f"parallel.data={data}",
    ]
    assert_gradient_equal(model_folder, [*sizes, *extra], budget_tokens)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sizes", [[], ["parallel.tensor=2"]], ids=str)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Qwen2", {}),
        # Norms between the product and the rotation: attention in its general form.
        ("Qwen3", {"head_dim": 32}),
        ("Mistral", {"sliding_window": 6}),
        ("SmolLM3", MIXED_WINDOWS),
        ("GptOss", GPT_OSS),
        ("Phi3", {"sliding_window": 6}),
    ],
)
def test_gradient_of_shared_prompts_is_that_of_whole_sequences(
    family: str, options: dict[str, int], sizes: list[str], tmp_path: Path
) -> None:
    layers = 4 if "layer_types" in options else 2
    if family == "GptOss" and "parallel.tensor=2" in sizes:
        sizes = [*sizes, "parallel.sequence=true"]
    write_model(tmp_path, family=family, vocab_size=VOCAB, num_hidden_layers=layers, **options)
    assert_gradient_equal(tmp_path, sizes, budget_tokens=1000)


EXPERT_SPLITS = [
    {},
    {"data": 2},
    {"data": 2, "expert": 2},
    {"tensor": 2, "sequence": "true"},
    {"tensor": 2, "sequence": "true", "expert": 2},
    {"pipeline": 2, "data": 2, "expert": 2},
    {"tensor": 2, "sequence": "true", "data": 2, "expert": 2},
]


@pytest.mark.parametrize("sizes", EXPERT_SPLITS[-2:], ids=str)
def test_gradient_of_experts_is_equal_on_four_ranks(
    mixture_folder: Path, sizes: dict[str, int | str]
) -> None:
    extra = [f"parallel.{name}={size}" for name, size in sizes.items()]
    assert_gradient_equal(mixture_folder, extra, budget_tokens=30)


def test_gradient_of_experts_is_equal_when_recomputed(mixture_folder: Path) -> None:
    extra = ["model.recompute=full", "parallel.data=2", "parallel.expert=2"]
    assert_gradient_equal(mixture_folder, extra, budget_tokens=30)


def assert_gradient_equal(
    folder: Path, extra: list[str], budget_tokens: int, expected: Gradient | None = None
) -> None:
    """On every rank, replicas and copies too; the ranks together hold every element."""
    cfg = load_config(None, [*PLAIN, f"model.path={folder}", *STILL, *extra])
    expected = expected or reference_gradient(folder)
    held = {name: torch.zeros_like(one, dtype=torch.bool) for name, one in expected.tensors.items()}
    for loss, norm, parts in run_ranks(gradient_of, cfg.parallel.world_size, cfg, budget_tokens):
        for part, found in parts:
            rows = slice(part.row, part.row + part.rows)
            columns = slice(part.column, part.column + part.columns)
            gradient = as_matrix(expected.tensors[part.hf])
            error, size = (found - gradient[rows, columns]).norm(), gradient.norm()
            # An expert without tokens has zero gradients.
            assert error <= 1e-5 * size, f"{extra}: {part}: error {error:.1e} of {size:.1e}"
            as_matrix(held[part.hf])[rows, columns] = True
        assert (loss, norm) == pytest.approx((expected.loss, expected.norm), rel=1e-5), extra
    assert not [name for name, mask in held.items() if not mask.all()]


def step_of(cfg: Config) -> tuple[float, dict[str, torch.Tensor]]:
    """Gradient norm of one update, and the weights after it (rank 0)."""
    with open_policy(cfg) as policy:
        trainer = Trainer(policy, find_objective(cfg.algorithm), cfg.optimizer, 1)
        metrics = {metric.name: metric.value for metric in trainer.update(my_share(30), version=0)}
        return metrics["train/grad_norm"], dict(export_tensors(policy.chunks, policy.shape))


@pytest.mark.exhaustive
def test_step_with_experts_is_equal_for_every_split(mixture_folder: Path) -> None:
    # A large epsilon makes Adam's first step follow the gradient's size, which it else forgets.
    common = [f"model.path={mixture_folder}", "model.dtype=float32", "optimizer.lr=1"]
    common += ["optimizer.warmup_steps=0", "expert.optimizer.eps=10"]
    norms, weights = [], []
    sharded = {"data": 2, "expert": 2, "distributed_optimizer": "true"}
    for sizes in [*EXPERT_SPLITS, sharded]:
        extra = [f"parallel.{name}={size}" for name, size in sizes.items()]
        cfg = load_config(None, [*PLAIN, *common, *extra])
        norm, after = run_ranks(step_of, cfg.parallel.world_size, cfg)[0]
        norms.append(norm)
        weights.append(after)
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-5)
    before = load_file(mixture_folder / "model.safetensors")
    for after in weights:
        for name, tensor in after.items():
            step = weights[0][name] - before[name]
            assert (tensor - weights[0][name]).norm() < 1e-3 * step.norm(), name


def most_alive(cfg: Config) -> tuple[int, int]:
    """Microbatches that were collated by all passes of a step, and how many existed at a time."""
    with open_policy(cfg) as policy:
        trainer = Trainer(policy, find_objective(cfg.algorithm), cfg.optimizer, 1)
        alive: list[int] = []
        real = trainer._passes._microbatch

        def counted(share: list[TrainSequence]) -> MicroBatch:
            batch = real(share)
            alive.append(sum(isinstance(each, MicroBatch) for each in gc.get_objects()))
            return batch

        trainer._passes._microbatch = counted
        share = my_share(10, has_groups=True)
        (prepared,) = trainer.prepare([share])
        trainer.update(share, version=0, prepared=prepared)
        return len(alive), max(alive)


@pytest.mark.parametrize("layout", ["data=1", "pipeline=2", "pipeline=2 virtual_stages=2"])
def test_a_microbatch_is_made_when_a_pass_takes_it(model_folder: Path, layout: str) -> None:
    overrides = [f"parallel.{key}" for key in layout.split()]
    overrides += ["model.dtype=float32", f"model.path={model_folder}"]
    cfg = load_config(None, [*overrides, "algorithm.policy_loss.old_logprobs=recompute"])
    for made, alive in run_ranks(most_alive, cfg.parallel.world_size, cfg):
        assert made >= 12 and alive <= 2


def dtype_and_head_gradients(cfg: Config) -> tuple[torch.dtype, list[torch.Tensor]]:
    """Of hidden states; and of the output layer with Megatron's fused gradients, and without."""
    with open_policy(cfg) as policy:
        trainer = Trainer(policy, find_objective(cfg.algorithm), cfg.optimizer, 1)
        share, [chunk] = my_share(20), policy.chunks
        batch, _ = next(iter(trainer._passes.inputs(share)))
        hidden = trainer._passes.forward(batch, chunk)
        found = []
        for is_fused in (True, False):
            unwrap(chunk).config.gradient_accumulation_fusion = is_fused
            trainer.accumulate(share, version=0)
            found.append(output_weight(unwrap(chunk)).main_grad.clone())
        return hidden.dtype, found


def test_hidden_states_are_bfloat16_and_the_heads_gradient_is_float32(tmp_path: Path) -> None:
    write_model(tmp_path, vocab_size=VOCAB)
    cfg = load_config(None, [f"model.path={tmp_path}", "model.dtype=bfloat16"])
    dtype, (fused, plain) = run_ranks(dtype_and_head_gradients, 1, cfg)[0]
    assert dtype is torch.bfloat16
    # On CUDA Megatron's fusion is a choice, and the gradient is summed in the same place without.
    assert torch.equal(fused, plain) and fused.dtype is torch.float32
    assert not torch.equal(fused, fused.bfloat16().float())


def measured_tokens(cfg: Config) -> list[float]:
    """Tokens that measure the mismatch: in a batch's first minibatch, and in a later one."""
    with open_policy(cfg) as policy:
        trainer = Trainer(policy, find_objective(cfg.algorithm), cfg.optimizer, 1)
        share = my_share(20)
        (prepared,) = trainer.prepare([share])
        found = (
            trainer.accumulate(share, version=0, prepared=prepared, is_first=is_first)
            for is_first in (True, False)
        )
        return [
            metric.value
            for totals in found
            for metric in mismatch_metrics(totals.mismatch)
            if metric.name == "train/logprob_gap_tokens"
        ]


@pytest.mark.parametrize("old_logprobs", ["generator", "recompute"])
def test_later_minibatches_measure_no_mismatch_after_the_updates_of_earlier_ones(
    model_folder: Path, old_logprobs: str
) -> None:
    given = ["model.dtype=float32", f"algorithm.policy_loss.old_logprobs={old_logprobs}"]
    cfg = load_config(None, [f"model.path={model_folder}", *given])
    fresh = sum(int((s.token_versions == 0).sum()) for s in make_sequences())
    assert fresh
    expected = [fresh, fresh if old_logprobs == "recompute" else 0]
    assert run_ranks(measured_tokens, 1, cfg) == [expected]
