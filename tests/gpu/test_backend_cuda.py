"""The trainer on CUDA: backend, TransformerEngine in bf16 and FP8, Adam, several GPUs.

Each test is a row of docs/gpu-evidence.md. One GPU is enough but for those that say otherwise.
"""

import importlib
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_rl.backend.environment import DETERMINISTIC
from megatron_rl.config.files import load_config
from megatron_rl.protocol.types import MinibatchShare, TrainSequence
from megatron_rl.trainer.model.policy import open_policy
from megatron_rl.trainer.reference import EmaReference, Teacher
from tests.distributed import run_ranks
from tests.tiny_models import GPT_OSS, write_model

pytestmark = pytest.mark.gpu
HAS_ENGINE = importlib.util.find_spec("transformer_engine") is not None
HAS_FLASH = importlib.util.find_spec("flash_attn_2_cuda") is not None
needs_engine = pytest.mark.skipif(not HAS_ENGINE, reason="TransformerEngine is not installed")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
SHARDED = "parallel.distributed_optimizer=true"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.05,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_share() -> MinibatchShare:
    """Sixteen sequences in one microbatch."""
    rng = np.random.default_rng(0)
    sequences = [
        TrainSequence(
            token_ids=rng.integers(0, 512, 32).astype(np.int32),
            prompt_length=8,
            generator_logprobs=np.zeros(24, np.float32),
            version_runs=[(0, 24)],
            advantage=0.0,
            weight=1 / (16 * 24),
        )
        for _ in range(16)
    ]
    return MinibatchShare([sequences])


def losses(overrides: list[str]) -> list[float]:
    """Supervised losses of a few steps on one rank."""
    from megatron_rl.algorithms.objective import find_objective
    from megatron_rl.config.algorithm import AlgorithmConfig
    from megatron_rl.trainer.model.policy import open_policy
    from megatron_rl.trainer.step import Trainer

    cfg = load_config(None, ["optimizer.lr=1e-3", "optimizer.warmup_steps=0", *overrides])
    with open_policy(cfg) as policy:
        trainer = Trainer(policy, find_objective(AlgorithmConfig(preset="sft")), cfg.optimizer, 5)
        found = []
        for _ in range(5):
            metrics = trainer.update(make_share(), version=0)
            found.append(next(m.value for m in metrics if m.name == "train/loss"))
    return found


def selection() -> tuple[str, str, str]:
    from megatron_rl.backend.device import select_backend

    backend = select_backend(load_config(None).model)
    return backend.device.type, backend.collectives, backend.layers


def test_backend_selects_cuda_nccl_and_the_engine() -> None:
    # Without flash-attn TransformerEngine computes packed sequences on these alone.
    has_kernel = torch.cuda.get_device_capability()[0] in (9, 10) or HAS_FLASH
    expected = "transformer_engine" if HAS_ENGINE and has_kernel else "local"
    assert run_ranks(selection, 1)[0] == ("cuda", "nccl", expected)


@needs_engine
def test_engine_layers_in_bf16_learn_like_local_ones(model_folder: Path) -> None:
    common = [f"model.path={model_folder}", "model.dtype=bfloat16"]
    engine = run_ranks(
        losses, 1, [*common, "expert.model.layers=transformer_engine"], timeout_s=300
    )[0]
    local = run_ranks(losses, 1, [*common, "expert.model.layers=local"], timeout_s=300)[0]
    assert engine == pytest.approx(local, rel=1e-2)
    assert engine[-1] < engine[0]


def steps_without_all_scores(overrides: list[str]) -> tuple[str, bool]:
    """Layers of a few steps, and whether TransformerEngine computed attention unfused.

    torch raises an error where its only way is the one that keeps the scores of all pairs.
    """
    from megatron_rl.algorithms.objective import find_objective
    from megatron_rl.config.algorithm import AlgorithmConfig
    from megatron_rl.trainer.step import Trainer

    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    cfg = load_config(None, overrides)
    with open_policy(cfg) as policy, sdpa_kernel([*kernels, SDPBackend.CUDNN_ATTENTION]):
        trainer = Trainer(policy, find_objective(AlgorithmConfig(preset="sft")), cfg.optimizer, 5)
        trainer.update(make_share(), version=0)
        layers = policy.backend.layers
    if layers == "local":
        return layers, False
    attention = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
    chosen = importlib.import_module(attention)._attention_backends
    assert "thd" in chosen["attention_params"].qkv_layout
    return layers, bool(chosen["use_unfused_attention"])


@pytest.mark.parametrize("family", ["Llama", "GptOss"])
@pytest.mark.parametrize(
    "settings", ["", "expert.model.layers=local", "model.dtype=float32", "train.deterministic=true"]
)
def test_attention_keeps_no_scores_of_all_pairs(
    family: str, settings: str, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in DETERMINISTIC.items():
        if "deterministic" in settings:
            monkeypatch.setenv(name, value)
    if family == "GptOss":
        write_model(tmp_path, family=family, **{**GPT_OSS, "vocab_size": 512})
    folder = tmp_path if family == "GptOss" else model_folder
    given = [f"model.path={folder}", *settings.split()]
    layers, is_unfused = run_ranks(steps_without_all_scores, 1, given, timeout_s=300)[0]
    assert not is_unfused
    is_for_local = {"expert.model.layers=local", "model.dtype=float32"}
    if settings in is_for_local or (family == "GptOss" and settings):
        assert layers == "local"


@needs_engine
@pytest.mark.parametrize(
    "recipe",
    [
        "model.fp8=delayed",
        "model.fp8=tensorwise",
        "model.fp8=blockwise",
        "model.fp8=blockwise expert.model.fp8_bf16_edge_layers=1",
        f"model.fp8=tensorwise expert.model.fp8_parameters=true {SHARDED}",
        f"model.fp8=blockwise expert.model.fp8_parameters=true {SHARDED}",
    ],
)
def test_fp8_learns_near_bf16(model_folder: Path, recipe: str) -> None:
    common = [f"model.path={model_folder}", "model.dtype=bfloat16"]
    fp8 = run_ranks(losses, 1, [*common, *recipe.split()], timeout_s=300)[0]
    bf16 = run_ranks(losses, 1, common, timeout_s=300)[0]
    assert fp8 == pytest.approx(bf16, rel=5e-2)
    assert fp8 != bf16 and fp8[-1] < fp8[0]


def test_optimizer_in_host_memory_learns_like_one_on_the_device(model_folder: Path) -> None:
    common = [f"model.path={model_folder}", "model.dtype=bfloat16", SHARDED]
    away = run_ranks(losses, 1, [*common, "optimizer.offload=true"], timeout_s=300)[0]
    here = run_ranks(losses, 1, common, timeout_s=300)[0]
    assert away == pytest.approx(here, rel=1e-3)


def losses_beside_reference(overrides: list[str]) -> tuple[list[float], list[torch.Tensor]]:
    """The same losses, and the logprobs of the weights before them after each step."""
    from megatron_rl.algorithms.objective import find_objective
    from megatron_rl.config.algorithm import AlgorithmConfig
    from megatron_rl.trainer.model.policy import open_policy
    from megatron_rl.trainer.step import Trainer

    cfg = load_config(None, ["optimizer.lr=1e-3", "optimizer.warmup_steps=0", *overrides])
    algorithm = AlgorithmConfig.model_validate({"preset": "sft", "reference": {"policy": "start"}})
    with open_policy(cfg) as policy:
        trainer = Trainer(policy, find_objective(algorithm), cfg.optimizer, 5)
        found, logprobs = [], []
        for _ in range(5):
            (prepared,) = trainer.prepare([make_share()])
            logprobs.append(prepared[0].reference_logprobs.cpu())
            metrics = trainer.update(make_share(), version=0, prepared=prepared)
            trainer.gather()
            found.append(next(m.value for m in metrics if m.name == "train/loss"))
    return found, logprobs


def test_a_reference_in_the_policys_place_changes_no_step(model_folder: Path) -> None:
    common = [f"model.path={model_folder}", "model.dtype=bfloat16"]
    found, logprobs = run_ranks(losses_beside_reference, 1, common, timeout_s=300)[0]
    # Attention's backward pass on CUDA sums in no fixed order.
    assert found == pytest.approx(run_ranks(losses, 1, common, timeout_s=300)[0], rel=5e-3)
    for later in logprobs[1:]:
        torch.testing.assert_close(later, logprobs[0], rtol=0, atol=1e-3)


def divergences_from_teacher(
    overrides: list[str], folder: str
) -> tuple[list[float], set[str], tuple[int, int]]:
    """Mean KL to it at each step of distillation, and where its weights are between passes.

    Also how many weights of the policy and of the teacher have copies in FP8 in the end.
    """
    from megatron_rl.algorithms.objective import find_objective
    from megatron_rl.trainer.model.policy import open_policy
    from megatron_rl.trainer.step import Trainer

    given = ["algorithm.preset=distill", f"algorithm.reference.policy={folder}"]
    given += [f"algorithm.kl.{each}" for each in ("placement=loss", "estimator=exact")]
    cfg = load_config(None, ["optimizer.lr=1e-3", "optimizer.warmup_steps=0", *given, *overrides])
    with open_policy(cfg) as policy:
        trainer = Trainer(policy, find_objective(cfg.algorithm), cfg.optimizer, 5)
        assert isinstance(trainer.reference, Teacher)
        found = []
        for _ in range(5):
            (prepared,) = trainer.prepare([make_share()])
            metrics = trainer.update(make_share(), version=0, prepared=prepared)
            trainer.gather()
            metric = next(m for m in metrics if m.name == "train/reference_kl")
            found.append(metric.value / metric.count)
        copied = [
            sum(len(getattr(m, "_fp8_workspaces", ())) for c in chunks for m in c.modules())
            for chunks in (policy.chunks, trainer.reference._passes.policy.chunks)
        ]
        devices = {p.device.type for p in trainer.reference.parameters}
        return found, devices, (copied[0], copied[1])


@pytest.mark.parametrize("fp8", ["none", pytest.param("tensorwise", marks=needs_engine)])
def test_a_teacher_is_on_the_device_for_its_pass_alone_and_draws_the_policy(
    model_folder: Path, tmp_path: Path, fp8: str
) -> None:
    sizes = {"vocab_size": 512, "num_hidden_layers": 2, "hidden_size": 128}
    write_model(tmp_path, initializer_range=0.2, **sizes)
    common = [f"model.path={model_folder}", "model.dtype=bfloat16", f"model.fp8={fp8}"]
    found, devices, (of_policy, of_teacher) = run_ranks(
        divergences_from_teacher, 1, common, str(tmp_path), timeout_s=300
    )[0]
    assert devices == {"cpu"}
    assert of_teacher == 0 and (of_policy > 0) == (fp8 != "none")
    assert found[-1] < found[0]


@needs_two_gpus
@pytest.mark.parametrize(
    "layout",
    [
        "parallel.tensor=2 parallel.sequence=true",
        "parallel.pipeline=2 parallel.virtual_stages=2",
        pytest.param("parallel.context=2 expert.parallel.context_exchange=p2p", marks=needs_engine),
        "parallel.context=2 expert.model.layers=local",
    ],
)
def test_two_gpus_learn_like_one(model_folder: Path, layout: str) -> None:
    common = [f"model.path={model_folder}", "model.dtype=bfloat16"]
    together = run_ranks(losses, 2, [*common, *layout.split()], timeout_s=300)[0]
    alone = run_ranks(losses, 1, common, timeout_s=300)[0]
    assert together == pytest.approx(alone, rel=1e-2)


@needs_two_gpus
@needs_engine
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_fp8_of_divided_positions_learns_like_bf16(model_folder: Path, recipe: str) -> None:
    common = [f"model.path={model_folder}", "model.dtype=bfloat16"]
    divided = ["parallel.tensor=2", "parallel.sequence=true", f"model.fp8={recipe}"]
    together = run_ranks(losses, 2, [*common, *divided], timeout_s=300)[0]
    alone = run_ranks(losses, 1, common, timeout_s=300)[0]
    assert together == pytest.approx(alone, rel=5e-2)


def adam_difference() -> float:
    """Largest difference of parameters after 5 steps of the chosen Adam and torch's AdamW."""
    from megatron.core import optimizer as megatron_optimizer

    from megatron_rl.backend.device import select_backend

    device = select_backend(load_config(None).model).device
    torch.manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(1000, device=device))
    theirs = torch.nn.Parameter(ours.detach().clone())
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    fused = megatron_optimizer.Adam([ours], **settings)
    reference = torch.optim.AdamW([theirs], **settings)
    for _ in range(5):
        ours.grad = torch.randn(1000, device=device)
        theirs.grad = ours.grad.clone()
        fused.step()
        reference.step()
    return float((ours - theirs).abs().max())


def test_fused_adam_steps_like_torch_adamw() -> None:
    # Some units in the last place of numbers up to 4; a wrong moment or decay gives 1e-3.
    assert run_ranks(adam_difference, 1)[0] < 1e-5


def swap_of_a_reference(overrides: list[str]) -> tuple[bool, bool, float]:
    """Whether all copies are pinned, whether the policy is as before, and the reference's error."""
    with open_policy(load_config(None, overrides)) as policy:
        reference = EmaReference(policy, decay=0.5)
        pinned = all(copy.is_pinned() for copy in (*reference._own, *reference._weights))
        parameters = [p for chunk in policy.chunks for p in chunk.parameters()]
        start = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(3)
        reference.follow(lambda: None)
        with reference.in_place():
            pairs = zip(parameters, start, strict=True)
            error = max(float((p - 2 * s).abs().max()) for p, s in pairs)
        pairs = zip(parameters, start, strict=True)
        return pinned, all(torch.equal(p, 3 * s) for p, s in pairs), error


def test_a_reference_swaps_through_pinned_memory(model_folder: Path) -> None:
    overrides = [f"model.path={model_folder}", "model.dtype=float32"]
    [(pinned, is_kept, error)] = run_ranks(swap_of_a_reference, 1, overrides)
    assert pinned and is_kept and error < 1e-6
