"""Shipped examples are rehearsed at real size: no problem, and the memory that the plan says."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli import main as cli
from megatron_rl.cli.plan_weights import forecast
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.protocol.process import EXIT_BAD_INPUT
from megatron_rl.rehearsal.events import SYNC
from megatron_rl.rehearsal.rehearse import chosen_ranks, rehearsable
from tests.rehearsal.shapes import (
    EXAMPLES,
    GLM_45_AIR,
    GPT_OSS_20B,
    MISTRAL_24B,
    QWEN3_30B_A3B,
    QWEN25_15B,
    TINY,
    TINY_GPT_OSS,
    write_shape,
)

ROOT = Path(__file__).resolve().parents[2]
GLM = GLM_45_AIR | {"num_hidden_layers": 8}


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.slow(60)
@pytest.mark.parametrize("name", [*EXAMPLES, "one_gpu-offload", "one_node-offload"])
def test_an_example_has_no_problem_and_the_planned_memory(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, _, offload = name.partition("-")
    model = write_shape(tmp_path, EXAMPLES[name])
    words = [str(ROOT / "examples" / f"{name}.toml"), f"model.path={model}"]
    if offload:
        words += ["parallel.distributed_optimizer=true", "optimizer.offload=true"]
    stages = load_config(Path(words[0]), []).parallel.pipeline
    # In FP8 the first backward pass makes transposed codes of weights. With no more microbatches
    # than stages no forward pass follows, so that fewer activations and all codes make the peak.
    assert cli.main(["rehearse", *words, f"--microbatches={stages + 1}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    assert len(found["stages"]) == stages
    cfg = load_config(Path(words[0]), words[1:])
    is_sent = cfg.weights.method != "folder"
    assert bool(found["engine_ranks"]) == is_sent
    for stage in found["stages"]:
        assert stage["peak_bytes"] == pytest.approx(stage["planned_bytes"], rel=0.03)
        assert bool(stage["weight_sync_calls"]) == is_sent
        assert stage["peak_parts"].get(SYNC, 0) <= forecast(cfg).peak_bytes


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.slow(60)
@pytest.mark.parametrize(
    ("values", "layout"),
    [
        (GLM, ("tensor=2", "sequence=true", "expert=2")),
        (GLM, ("pipeline=2", "data=2", "expert=2")),
        (GPT_OSS_20B, ("tensor=2", "sequence=true", "data=4", "expert=8")),
        (GPT_OSS_20B, ("pipeline=2", "data=4", "expert=4")),
    ],
    ids=["glm-tensor", "glm-pipeline", "gpt-oss-tensor", "gpt-oss-pipeline"],
)
def test_layers_of_two_kinds_need_the_planned_memory_with_transformer_engine(
    values: dict[str, Any],
    layout: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = write_shape(tmp_path, values)
    (tmp_path / "run.toml").write_text(
        f'[model]\npath = "{model}"\n[expert.model]\n'
        'fusions = ["swiglu", "gradient_accumulation", "moe_permute"]\n'
    )
    sizes = ["train.microbatch_tokens=8192", "generator.context_tokens=8192"]
    sizes += ["train.router_replay=true", *(f"parallel.{key}" for key in layout)]
    words = [str(tmp_path / "run.toml"), *sizes]
    assert cli.main(["rehearse", *words, "--microbatches=2", "--gpu=b200-180g", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    for stage in found["stages"]:
        assert stage["peak_bytes"] == pytest.approx(stage["planned_bytes"], rel=0.03)


FP8_DENSE, FP8_EXPERTS = (
    MISTRAL_24B | {"num_hidden_layers": 8},
    QWEN3_30B_A3B | {"num_hidden_layers": 16},
)
FP8_CASES = {
    "tensor": (FP8_DENSE, "delayed tensorwise blockwise", ("tensor=4", "sequence=true")),
    "recomputed": (FP8_DENSE, "tensorwise blockwise", ("tensor=4", "sequence=true")),
    "experts": (FP8_EXPERTS, "delayed tensorwise blockwise", ("data=8", "expert=8")),
}


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.slow(40)
@pytest.mark.parametrize(
    ("name", "recipe"),
    [(name, recipe) for name, (_, recipes, _) in FP8_CASES.items() for recipe in recipes.split()],
)
def test_layers_in_fp8_need_the_planned_memory(
    name: str, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values, _, layout = FP8_CASES[name]
    model = write_shape(tmp_path, values)
    (tmp_path / "run.toml").write_text(f'[model]\npath = "{model}"\nfp8 = "{recipe}"\n')
    words = [str(tmp_path / "run.toml"), *(f"parallel.{key}" for key in layout)]
    words += ["train.microbatch_tokens=8192", "generator.context_tokens=8192"]
    words += ["weights.method=folder"]
    if name == "experts":
        words += ['expert.model.fusions=["swiglu","gradient_accumulation","moe_permute"]']
    if name == "recomputed":
        words += ["model.recompute=full", "expert.model.fp8_bf16_edge_layers=2"]
    assert cli.main(["rehearse", *words, "--microbatches=2", "--gpu=b200-180g", "--json"]) == 0
    [stage] = json.loads(capsys.readouterr().out)["stages"]
    assert stage["peak_bytes"] == pytest.approx(stage["planned_bytes"], rel=0.03)
    assert stage["peak_parts"]["codes of weights"] > 0


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.slow(15)
def test_a_step_that_does_not_fit_says_which_stage_needs_how_much(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_shape(tmp_path, QWEN25_15B)
    (tmp_path / "run.toml").write_text(f'[model]\npath = "{model}"\n')
    long = ["train.microbatch_tokens=16384", "generator.context_tokens=16384"]
    words = [str(tmp_path / "run.toml"), *long, "--microbatches=1", "--gpu=a100-40g"]
    assert cli.main(["rehearse", *words]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "problem: stage 0 needs " in text and "more than the " in text


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.slow(10)
def test_what_transformer_engine_cannot_do_with_sinks_is_the_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_shape(tmp_path, TINY_GPT_OSS)
    (tmp_path / "run.toml").write_text(f'[model]\npath = "{model}"\n')
    sizes = ["train.microbatch_tokens=64", "generator.context_tokens=64"]
    words = [str(tmp_path / "run.toml"), *sizes, "sampling.max_new_tokens=32"]
    assert cli.main(["rehearse", *words, "parallel.context=2", "--json"]) == 1
    [problem] = json.loads(capsys.readouterr().out)["problems"]
    assert problem.startswith("rank 0, rank 1 failed:")
    assert "parallel.context = 2: TransformerEngine exchanges neither keys nor values" in problem


def test_a_sample_has_both_ends_of_each_dimension_at_every_stage() -> None:
    parallel = ParallelConfig(tensor=4, context=2, pipeline=3, data=5)
    found = chosen_ranks(parallel, "sample")
    places = {(r % 4, r // 4 % 2, r // 8 % 5, r // 40) for r in found}
    assert places == {
        (t, c, d, p) for t in (0, 3) for c in (0, 1) for d in (0, 4) for p in range(3)
    }
    assert chosen_ranks(parallel, "all") == list(range(120))


def test_what_cannot_be_rehearsed_is_left_out_and_said(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\npath = "{write_shape(tmp_path, TINY)}"\nfp8 = "blockwise"\n')
    assert rehearsable(load_config(path, []))[1] == []
    words = ["expert.model.fp8_parameters=true", "parallel.distributed_optimizer=true"]
    cfg, notes = rehearsable(load_config(path, words))
    assert (cfg.model.fp8, cfg.model.fp8_parameters) == ("blockwise", False)
    assert notes == ["expert.model.fp8_parameters is rehearsed with parameters in bfloat16 and "
                     "their copies in FP8"]  # fmt: skip


def test_the_layers_are_those_of_the_named_gpu(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\npath = "{write_shape(tmp_path, TINY_GPT_OSS)}"\n')
    cfg, notes = rehearsable(load_config(path, []))
    assert (cfg.model.layers, notes) == ("auto", [])
    cfg, [note] = rehearsable(load_config(path, ["train.deterministic=true"]))
    assert cfg.model.layers == "local" and "no deterministic kernel for sinks" in note
    cfg, [note] = rehearsable(load_config(path, []), "l40s-48g")
    assert cfg.model.layers == "local" and "sinks on compute capability 8.9" in note
    with pytest.raises(InputError, match="nearest possible: model.fp8 = .none."):
        rehearsable(load_config(path, ["model.fp8=blockwise"]), "l40s-48g")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus=6"], "--gpus 6 is no multiple of parallel.tensor x pipeline x context = 4"),
        (["--microbatches=0"], "--microbatches 0 must be above 0"),
    ],
)
def test_impossible_options_are_refused_before_anything_starts(
    tmp_path: Path, words: list[str], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\npath = "{write_shape(tmp_path, TINY)}"\n')
    assert cli.main(["rehearse", str(path), "parallel.tensor=4", *words]) == EXIT_BAD_INPUT
    assert message in caplog.text


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.slow(40)
@pytest.mark.parametrize("values", [TINY, TINY_GPT_OSS], ids=["dense", "gpt-oss"])
def test_context_ranks_of_local_layers_never_wait_for_the_device(
    values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_shape(tmp_path, values)
    (tmp_path / "run.toml").write_text(f'[model]\npath = "{model}"\n')
    words = [str(tmp_path / "run.toml"), "train.microbatch_tokens=64", "parallel.context=2"]
    words += ["generator.context_tokens=64", "sampling.max_new_tokens=32", "weights.method=folder"]
    assert cli.main(["rehearse", *words, "--gpu=a100-80g", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []
