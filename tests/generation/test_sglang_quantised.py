"""Slices that an engine quantises at the receiver, against SGLang's own loading of their folder."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.backend.cpu import sglang as sglang_cpu
from megatron_rl.protocol.types import Sampling
from tests.generation import syncer
from tests.generation.engine_driver import driven, make_setup
from tests.generation.inspected_engine import InspectedEngine
from tests.generation.layout_models import shape_of, write_model
from tests.generation.precision import IS_ON_CPU
from tests.generation.quantised_models import CASES
from tests.generation.tiny_model import logprobs

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 500
HIDDEN, QKV, FFN, EXPERTS = 64, 256, 160, 4
FUSED = {
    "self_attn.qkv_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "self_attn.o_proj": ["self_attn.o_proj"],
    "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.down_proj": ["mlp.down_proj"],
}
FP8_TOLERANCE = 0.3
"""Mean difference of logprobs that FP8 weights and bfloat16 make; other weights make a larger one.
"""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What every case compared; one process, as importing SGLang takes most of the time."""
    environment = {**os.environ, **sglang_cpu.server_environment(1)}
    environment["PYTHONPATH"] += os.pathsep + str(ROOT)
    # Without the CPU engine SGLang takes the path of a GPU; see `quantised_models.py`.
    environment |= {"SGLANG_USE_CPU_ENGINE": "0", "TRITON_INTERPRET": "1"}
    folder = tmp_path_factory.mktemp("quantised")
    done = subprocess.run(
        [sys.executable, "-m", "tests.generation.quantised_models", str(folder), *CASES],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.exhaustive
@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize("name", CASES)
def test_codes_and_scales_are_those_of_sglangs_own_loading(
    name: str, played: dict[str, dict[str, Any]]
) -> None:
    found = played[name]
    assert found["same_names"] and found["different"] == []
    # CUDA graphs hold addresses: nothing was replaced.
    assert found["moved"] == []
    # Two layers with four matrices each, all of other values than before.
    assert (found["codes"], found["kept"]) == (8, [])
    assert found["left_bytes"] == 0


@pytest.mark.exhaustive
@pytest.mark.timeout(LIMIT_S + 20)
def test_scales_are_one_a_row_one_a_matrix_or_one_an_expert(
    played: dict[str, dict[str, Any]],
) -> None:
    rows = {"qkv_proj": [1, QKV], "o_proj": [1, HIDDEN], "gate_up_proj": [1, 2 * FFN],
            "down_proj": [1, HIDDEN]}  # fmt: skip
    for name, expected in (
        ("qwen3", rows),
        ("llama-per-tensor", dict.fromkeys(rows, [])),
        ("moe", {"qkv_proj": [1, QKV], "o_proj": [1, HIDDEN], "experts": [EXPERTS]}),
    ):
        found = {each.split(".")[-2]: shape for each, shape in played[name]["scales"].items()}
        assert found == expected, name


@pytest.mark.exhaustive
@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize("name", CASES)
def test_a_rehearsal_quantises_the_layers_that_sglang_does(
    name: str, played: dict[str, dict[str, Any]]
) -> None:
    # Megatron-Core is slow to import.
    from megatron_rl.rehearsal.engine_parameters import QUANTISED

    layers, scales = played[name]["layers"], played[name]["scales"]
    quantised = {each.rpartition(".")[0] for each in scales}
    assert {each for each in layers if QUANTISED.search(each)} == quantised
    # In two layers: attention has two, an MLP two, and experts are one.
    assert len(quantised) == 2 * (3 if name in ("moe", "mixtral") else 4) < len(layers)


@pytest.mark.exhaustive
@pytest.mark.timeout(LIMIT_S + 20)
def test_only_layers_in_flight_are_staged(played: dict[str, dict[str, Any]]) -> None:
    # Two layers of each: gate and up in bf16 are the largest matrix of one that has no experts.
    for name in ("qwen2", "qwen3", "llama-per-tensor"):
        assert played[name]["peak_bytes"] == 2 * 2 * FFN * HIDDEN, name
    # Gate, up and down of four experts of 96 units.
    for name, units in (("moe", 96), ("mixtral", FFN)):
        assert played[name]["peak_bytes"] == 2 * EXPERTS * 3 * units * HIDDEN, name
    mixed = played["qwen3-mixed"]
    assert mixed["largest_bytes"] < mixed["peak_bytes"] <= mixed["all_bytes"]


@pytest.mark.exhaustive
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.skipif(not IS_ON_CPU, reason="the scales are those of SGLang's CPU mode")
def test_a_server_quantises_the_slices_that_a_trainer_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # SGLang has FP8 for activations of 16 bits alone. The trainer's process reads the variable.
    monkeypatch.setenv("MEGATRON_RL_TEST_DTYPE", "bfloat16")
    monkeypatch.setattr(syncer, "DTYPE", torch.bfloat16)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    torch.set_num_threads(1)
    old, new = (
        write_model(tmp_path / name, family="Llama", is_tied=False, seed=seed).bfloat16()
        for seed, name in enumerate(("old", "new"))
    )
    for name, model in (("old", old), ("new", new)):
        model.save_pretrained(tmp_path / name)
    setup = make_setup(
        tmp_path, tmp_path / "logs" / "server.log", dtype="bfloat16", quantization="fp8",
        context_tokens=200,
    )  # fmt: skip
    setup.log_path.parent.mkdir()
    trainer = syncer.TrainerProcess()
    with driven(InspectedEngine(setup)) as driver:
        weights = syncer.SliceSyncer(driver.engine, trainer, shape_of(tmp_path / "new"), "fp8")
        driver.run(weights.open())
        for version, model in enumerate((old, new), start=1):
            driver.run(weights.sync(model, version))
        found = driver.run(driver.collect([5, 6, 7], Sampling(24, 1.0), [0]))
        driver.run(weights.close())
    trainer.close()
    held = torch.load(setup.log_path.parent / "held-0.pt")
    for layer in range(2):
        for name, parts in FUSED.items():
            place = f"model.layers.{layer}.{name}"
            codes, scale = per_tensor(new, [f"model.layers.{layer}.{part}" for part in parts])
            assert torch.equal(
                held[f"{place}.weight"].view(torch.uint8), codes.t().view(torch.uint8)
            )
            assert torch.equal(held[f"{place}.weight_scale"], scale), place
    # Sampled with the new weights, which the old ones differ from by far.
    token_ids, sampled = found[0].token_ids, torch.tensor(found[0].logprobs)
    near, far = (
        (logprobs(model, [5, 6, 7], token_ids) - sampled).abs().mean() for model in (new, old)
    )
    assert near < FP8_TOLERANCE < far, (float(near), float(far))


def per_tensor(model: torch.nn.Module, names: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of several matrices below each other, [rows, columns], and their one scale."""
    weight = torch.cat([model.get_parameter(f"{name}.weight") for name in names]).detach().float()
    factor = torch.finfo(torch.float8_e4m3fn).max / weight.abs().max()
    return (weight * factor).to(torch.float8_e4m3fn), factor.reciprocal()
