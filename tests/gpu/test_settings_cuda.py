"""Settings for speed and memory on CUDA: recomputation, fusions, segments, narrow and FP8 tensors.

Each test is a row of docs/gpu-evidence.md. One GPU is enough.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_rl.backend.environment import ranks_environment
from megatron_rl.config.files import load_config
from megatron_rl.trainer.model.build import packed
from megatron_rl.trainer.model.policy import open_policy
from megatron_rl.trainer.model.router_replay import replayed, routers_of
from megatron_rl.weights.exchange.parcels import PlainParameters, is_quantised
from megatron_rl.weights.layout.local_names import named_parameters
from megatron_rl.weights.layout.slices import Share
from tests.distributed import run_ranks
from tests.tiny_models import QWEN3_MOE, write_model

HAS_ENGINE = importlib.util.find_spec("transformer_engine") is not None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_ENGINE, reason="TransformerEngine is not installed"),
]
TOKENS, TOPK = 2048, 2
DENSE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
LIMIT_S = 300
TIES = 0.05
"""A CPU's gradients move by 0.006 when other ones of experts with equal scores are taken."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in ("dense", "mixture")}
    write_model(made["dense"], **DENSE)
    write_model(made["mixture"], family="Qwen3Moe", num_hidden_layers=4, **QWEN3_MOE)
    return made


def gradients(folder: Path, overrides: list[str]) -> tuple[Tensor, int]:
    """All gradients in one, on the host, and bytes held between the passes."""
    cfg = load_config(None, [f"model.path={folder}", *overrides])
    with open_policy(cfg) as policy:
        [chunk] = policy.chunks
        ids = (torch.arange(TOKENS)[None] * 7) % policy.shape.vocab
        inputs = [ids.to(policy.device), torch.arange(TOKENS)[None].to(policy.device), None]
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        logits = chunk(*inputs, packed_seq_params=packed([TOKENS], policy.device))
        held = torch.cuda.memory_allocated() - before
        logits.square().mean().backward()
        return torch.cat([p.main_grad.flatten() for p in chunk.parameters()]).cpu(), held


def distance(found: Tensor, expected: Tensor) -> float:
    """Of all gradients, relative. bfloat16 has 8 bits: another order costs some of its units."""
    assert expected.norm() > 0
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("kind", "modules"),
    [("dense", '["mlp"]'), ("mixture", '["moe", "layernorm"]'), ("mixture", '["moe_act"]')],
)
def test_recomputed_modules_keep_less(
    folders: dict[str, Path],
    kind: str,
    modules: str,
    record_property: Callable[[str, object], None],
) -> None:
    chosen = ["model.recompute=selective", f"model.recompute_modules={modules}"]
    [(expected, whole)] = run_ranks(gradients, 1, folders[kind], [], timeout_s=LIMIT_S)
    [(found, kept)] = run_ranks(gradients, 1, folders[kind], chosen, timeout_s=LIMIT_S)
    record_property("figure", f"{modules} keeps {kept / whole:.2f} of the bytes")
    assert kept < whole
    assert distance(found, expected) <= 0.02


@pytest.mark.parametrize(
    ("kind", "fusions", "limit"),
    [
        ("dense", '["swiglu"]', 0.02),
        ("dense", "auto", 0.02),
        ("mixture", '["swiglu", "moe_permute"]', 0.02),
        ("mixture", '["moe_router"]', TIES),
    ],
)
def test_fused_operations_give_the_same_gradients(
    folders: dict[str, Path],
    kind: str,
    fusions: str,
    limit: float,
    record_property: Callable[[str, object], None],
) -> None:
    chosen = [f"expert.model.fusions={fusions}"]
    apart_kernels = ["expert.model.fusions=[]"]
    [(expected, _)] = run_ranks(gradients, 1, folders[kind], apart_kernels, timeout_s=LIMIT_S)
    [(found, _)] = run_ranks(gradients, 1, folders[kind], chosen, timeout_s=LIMIT_S)
    apart = distance(found, expected)
    record_property("figure", f"{fusions}: {apart:.1e} apart")
    assert apart <= limit


def synced(folder: Path) -> tuple[int, bool, bool]:
    """(quantised parameters, whether their values are synced, and each made once)."""
    overrides = ["model.fp8=tensorwise", "expert.model.fp8_parameters=true"]
    overrides += ["parallel.distributed_optimizer=true", f"model.path={folder}"]
    with open_policy(load_config(None, overrides)) as policy:
        parameters = named_parameters(policy.chunks)
        names = [name for name, parameter in parameters.items() if is_quantised(parameter)]
        plain = PlainParameters(parameters)
        found = {name: plain[name] for name in names}
        are_values = all(
            value.dtype == torch.bfloat16
            and not is_quantised(value)
            and torch.equal(value, parameters[name].dequantize())
            for name, value in found.items()
        )
        return len(names), are_values, all(plain[name] is found[name] for name in names)


def test_values_of_fp8_parameters_are_synced(folders: dict[str, Path]) -> None:
    [(count, are_values, are_kept)] = run_ranks(synced, 1, folders["dense"], timeout_s=LIMIT_S)
    assert count >= 4 * DENSE["num_hidden_layers"] and are_values and are_kept


def replay(folder: Path) -> tuple[int, str]:
    """Bytes on the device of choices during a forward pass, and where they are kept after it."""
    cfg = load_config(None, [f"model.path={folder}", "train.router_replay=true"])
    with open_policy(cfg) as policy:
        [chunk] = policy.chunks
        layers = policy.shape.layers
        choices = torch.arange(TOPK, dtype=torch.int16).repeat(TOKENS, layers)
        before = torch.cuda.memory_allocated()
        with replayed(chunk, choices, topk=TOPK, share=Share(), pin=policy.backend.pin):
            held = torch.cuda.memory_allocated() - before
        [(_, router), *_] = routers_of(chunk)
        [kept] = router.replay_backward_list
        narrow = next(iter(vars(kept).values()))
        return held, "pinned" if narrow.is_pinned() else narrow.device.type


def test_replay_takes_two_bytes_a_choice(folders: dict[str, Path]) -> None:
    [(held, place)] = run_ranks(replay, 1, folders["mixture"], timeout_s=LIMIT_S)
    # torch's allocator rounds up to 512 bytes.
    assert held <= TOKENS * 4 * TOPK * 2 + 512
    assert place == "pinned"


def segments() -> list[bool]:
    torch.ones(1 << 20, device="cuda")
    return [segment["is_expandable"] for segment in torch.cuda.memory_snapshot()]


def test_segments_are_expandable() -> None:
    environment = ranks_environment("cuda", 1, expandable_segments=True, given={})
    [found] = run_ranks(segments, 1, timeout_s=LIMIT_S, env=environment)
    assert found and all(found)


def libraries() -> dict[str, list[str]]:
    """Files of each of torch's libraries in this process, beside TransformerEngine."""
    importlib.import_module("transformer_engine.pytorch")
    torch.nn.Conv2d(1, 1, 1, device="cuda")(torch.ones(1, 1, 8, 8, device="cuda"))
    paths = {line.split()[-1] for line in Path("/proc/self/maps").open() if ".so" in line}
    names = ("libcudnn.so", "libcublas.so", "libnvrtc.so", "libnccl.so")
    return {name: sorted(path for path in paths if name in path) for name in names}


def test_no_library_is_loaded_twice() -> None:
    environment = ranks_environment("cuda", 1, given={})
    [found] = run_ranks(libraries, 1, timeout_s=LIMIT_S, env=environment)
    assert found["libcudnn.so"] and all(len(paths) <= 1 for paths in found.values()), found
