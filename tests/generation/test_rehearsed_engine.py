"""Slices of weight syncs against SGLang's own models at their real sizes, without weights."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from generation import rehearsed_engine
from generation.rehearsed_engine import (
    check_engine,
    differences,
    trace_engine,
    trace_engines,
)
from generation.sglang_engine import SGLangEngine
from generation.sglang_trace import RankTrace
from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.weights.exchange.plan import EngineKind
from megatron_rl.weights.layout.families import FAMILIES
from megatron_rl.weights.layout.shape import read_shape
from megatron_rl.weights.layout.slices import Slice
from megatron_rl.weights.layout.trainer_layout import hf_shapes, untrained
from tests.family_cases import ENDING, family_cases
from tests.generation import layout_loader
from tests.generation.engine_driver import make_setup
from tests.generation.layout_models import LATENT_IN_ENGINES, shape_of, write_model
from tests.generation.test_sglang_layout import _load_only
from tests.tiny_models import write_model as write_tiny

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300
COMMON = {"max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
          "hidden_act": "silu", "tie_word_embeddings": False, "head_dim": 128,
          "torch_dtype": "bfloat16"}  # fmt: skip
NAMES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "vocab_size", "intermediate_size")  # fmt: skip
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
GLM = {"n_routed_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
       "moe_intermediate_size": 1408, "n_shared_experts": 1, "first_k_dense_replace": 1,
       "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "attention_bias": True,
       "use_qk_norm": False, "partial_rotary_factor": 0.5, "num_nextn_predict_layers": 1,
       "rms_norm_eps": 1e-5}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 16384}  # fmt: skip
GPT_OSS = {"num_local_experts": 32, "num_experts_per_tok": 4, "swiglu_limit": 7.0, "head_dim": 64,
           "attention_bias": True, "sliding_window": 128,
           "layer_types": ["sliding_attention", "full_attention"] * 12}  # fmt: skip
OLMO = {"attention_bias": False, "rms_norm_eps": 1e-6}
MODELS: dict[str, tuple[str, tuple[int, ...], dict[str, Any], int]] = {
    # Class and type, sizes, other keys, and the number of parameters of the published files.
    "Magistral-24B": ("Mistral", (5120, 40, 32, 8, 131072, 32768), {}, 23_572_403_200),
    "Llama-3.1-8B": ("Llama", (4096, 32, 32, 8, 128256, 14336), {}, 8_030_261_248),
    "Qwen2.5-7B": ("Qwen2", (3584, 28, 28, 4, 152064, 18944), {}, 7_615_616_512),
    "SmolLM2-135M": (
        "Llama", (576, 30, 9, 3, 49152, 1536), {"head_dim": 64, "tie_word_embeddings": True},
        134_515_008,
    ),
    "Qwen3-30B-A3B": (
        "Qwen3Moe", (2048, 48, 32, 4, 151936, 6144), {**EXPERTS, "moe_intermediate_size": 768},
        30_532_122_624,
    ),
    "Qwen3-235B-A22B": (
        "Qwen3Moe", (4096, 94, 64, 4, 151936, 12288), {**EXPERTS, "moe_intermediate_size": 1536},
        235_093_634_560,
    ),
    # Without corrections of routers, which no weight sync sends.
    "GLM-4.5-Air": (
        "Glm4Moe", (4096, 46, 96, 8, 151552, 10944), GLM, 106_852_245_504,
    ),
    "gpt-oss-20b": ("GptOss", (2880, 24, 64, 8, 201088, 2880), GPT_OSS, 20_914_757_184),
    # The text models alone.
    "OLMo-2-7B": ("Olmo2", (4096, 32, 32, 32, 100352, 11008), OLMO, 7_298_617_344),
    "Olmo-3-7B": (
        "Olmo3", (4096, 32, 32, 32, 100278, 11008),
        {**OLMO, "sliding_window": 4096, "rope_theta": 5e5,
         "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
         "rope_scaling": {"rope_type": "yarn", "factor": 8.0,
                          "original_max_position_embeddings": 8192}}, 7_298_011_136,
    ),
    "Ministral-3-3B": (
        "Ministral3", (3072, 26, 32, 8, 131072, 9216),
        {"tie_word_embeddings": True, "rope_theta": None, "rope_parameters": YARN}, 3_429_006_336,
    ),
    "Magistral-2507": ("Mistral3", (5120, 40, 32, 8, 131072, 32768), {}, 23_572_403_200),
    "SmolLM3-3B": ("SmolLM3", (2048, 36, 16, 4, 128256, 11008),
                   {"tie_word_embeddings": True}, 3_075_098_624),
    "Phi-4": ("Phi3", (5120, 40, 40, 10, 100352, 17920), {}, 14_659_507_200),
    "Qwen2.5-VL-7B": ("Qwen2_5_VL", (3584, 28, 28, 4, 152064, 18944), {}, 7_615_616_512),
    "Qwen3-VL-30B-A3B": (
        "Qwen3VLMoe", (2048, 48, 32, 4, 151936, 6144), {**EXPERTS, "moe_intermediate_size": 768},
        30_532_122_624,
    ),
    "Qwen3-VL-8B": ("Qwen3VL", (4096, 36, 32, 8, 151936, 12288), {}, 8_190_735_360),
}  # fmt: skip
WRAPPERS = {
    "Mistral3": ("Mistral3", "mistral3", "mistral"),
    "Ministral3": ("Mistral3", "mistral3", "ministral3"),
    "Qwen2_5_VL": ("Qwen2_5_VL", "qwen2_5_vl", "qwen2_5_vl_text"),
    "Qwen3VL": ("Qwen3VL", "qwen3_vl", "qwen3_vl_text"),
    "Qwen3VLMoe": ("Qwen3VLMoe", "qwen3_vl_moe", "qwen3_vl_moe_text"),
}
"""Class, its type and that of the text model."""
TYPES = {"Mistral": "mistral", "Llama": "llama", "Qwen2": "qwen2", "Qwen3Moe": "qwen3_moe",
         "Glm4Moe": "glm4_moe", "SmolLM3": "smollm3", "Phi3": "phi3", "Olmo2": "olmo2",
         "Olmo3": "olmo3", "GptOss": "gpt_oss"}  # fmt: skip
PART = "model.layers.0.mlp.down_proj.weight"


def configured(
    folder: Path, *, tensor: int, expert: int = 1, quantization: str = "", **extra: Any
) -> Config:
    """A configuration whose engines serve the folder's model."""
    config = Config()
    generator = {"tensor_parallel": tensor, "expert_parallel": expert,
                 "quantization": quantization, "extra_args": extra,
                 "context_tokens": 200}  # fmt: skip
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": folder}),
            "generator": config.generator.model_copy(update=generator),
        }
    )


def write_config(folder: Path, name: str) -> None:
    """The config.json of a published model."""
    family, sizes, more, _ = MODELS[name]
    values = COMMON | dict(zip(NAMES, sizes, strict=True)) | more
    if family in WRAPPERS:
        name, outer, inner = WRAPPERS[family]
        values = {
            "architectures": [f"{name}ForConditionalGeneration"], "model_type": outer,
            "text_config": {**values, "model_type": inner}, "vision_config": {},
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(values))
        return
    kind = {"architectures": [f"{family}ForCausalLM"], "model_type": TYPES[family]}
    (folder / "config.json").write_text(json.dumps(values | kind))


def held_elements(name: str, ranks: int) -> int:
    """Elements that all ranks of an engine hold together, without padding."""
    family, (hidden, layers, _, kv_heads, _, _), more, total = MODELS[name]
    head_dim = more.get("head_dim", 128)
    on_all = layers * 2 * hidden + hidden
    if family in ("Olmo2", "Olmo3"):
        on_all += layers * 2 * hidden
    if family in ("Qwen3Moe", "Qwen3VL", "Qwen3VLMoe"):
        on_all += layers * 2 * head_dim
    if family in ("Qwen3Moe", "Qwen3VLMoe"):
        on_all += layers * EXPERTS["num_experts"] * hidden
    if family == "Glm4Moe":
        on_all += (layers - 1) * GLM["n_routed_experts"] * hidden
    if family == "GptOss":
        on_all += layers * (GPT_OSS["num_local_experts"] * (hidden + 1) + hidden)
    has_bias = family in ("Qwen2", "Qwen2_5_VL", "Glm4Moe")
    keys_values = layers * 2 * kv_heads * head_dim * (hidden + has_bias)
    copies = max(1, ranks // kv_heads)
    return total + on_all * (ranks - 1) + keys_values * (copies - 1)


def assert_fits(folder: Path, name: str, tensor: int, expert: int, quantization: str = "") -> None:
    """No difference on any rank, and all elements of the published model."""
    write_config(folder, name)
    config = configured(folder, tensor=tensor, expert=expert, quantization=quantization)
    shape = read_shape(folder)
    traces = trace_engine(config, shape)
    kind = EngineKind("sglang", tensor, expert_parallel=expert)
    assert [
        differences(kind.slices(shape, rank), trace, "bfloat16")
        for rank, trace in enumerate(traces)
    ] == [[]] * tensor
    loaded = sum(part.size for trace in traces for part in trace.loaded)
    assert loaded == held_elements(name, tensor)


@pytest.mark.timeout(LIMIT_S)
def test_24b_fit_both_ranks_of_an_engine(tmp_path: Path) -> None:
    assert_fits(tmp_path, "Magistral-24B", 2, 1)


@pytest.mark.exhaustive
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    ("name", "tensor", "expert", "quantization"),
    [
        ("Magistral-24B", 1, 1, ""), ("Magistral-24B", 8, 1, ""), ("Magistral-24B", 8, 1, "fp8"),
        ("Llama-3.1-8B", 1, 1, ""), ("Llama-3.1-8B", 8, 1, ""), ("Llama-3.1-8B", 16, 1, ""),
        ("Qwen2.5-7B", 1, 1, "fp8"), ("Qwen2.5-7B", 2, 1, ""), ("Qwen2.5-7B", 4, 1, ""),
        ("SmolLM3-3B", 1, 1, ""), ("SmolLM3-3B", 4, 1, "fp8"),
        ("Phi-4", 1, 1, ""), ("Phi-4", 2, 1, "fp8"), ("Phi-4", 5, 1, ""),
        ("SmolLM2-135M", 1, 1, ""), ("SmolLM2-135M", 3, 1, ""),
        ("Qwen3-30B-A3B", 1, 1, ""), ("Qwen3-30B-A3B", 8, 1, ""), ("Qwen3-30B-A3B", 8, 2, "fp8"),
        ("Qwen3-30B-A3B", 8, 8, ""),
        ("Qwen3-235B-A22B", 8, 1, ""), ("Qwen3-235B-A22B", 8, 4, ""),
        ("Qwen3-235B-A22B", 8, 8, "fp8"),
        ("Ministral-3-3B", 1, 1, ""), ("Ministral-3-3B", 8, 1, "fp8"),
        ("OLMo-2-7B", 2, 1, ""), ("Olmo-3-7B", 1, 1, ""), ("Olmo-3-7B", 8, 1, "fp8"),
        ("Magistral-2507", 8, 1, ""), ("Magistral-2507", 2, 1, "fp8"),
        ("Qwen2.5-VL-7B", 1, 1, ""), ("Qwen2.5-VL-7B", 4, 1, "fp8"), ("Qwen3-VL-8B", 8, 1, ""),
        ("GLM-4.5-Air", 1, 1, ""), ("GLM-4.5-Air", 8, 1, ""), ("GLM-4.5-Air", 8, 8, ""),
        ("GLM-4.5-Air", 8, 2, "fp8"), ("GLM-4.5-Air", 16, 1, ""),
        ("gpt-oss-20b", 1, 1, ""), ("gpt-oss-20b", 2, 1, ""), ("gpt-oss-20b", 8, 1, ""),
    ],
)  # fmt: skip
def test_published_models_fit(
    tmp_path: Path, name: str, tensor: int, expert: int, quantization: str
) -> None:
    assert_fits(tmp_path, name, tensor, expert, quantization)


LARGER = {"vocab_size": 331, "max_position_embeddings": 256}
"""Each of three ranks has tokens, in blocks of 64."""


@pytest.mark.exhaustive
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("name", {name: None for name, _ in family_cases()})
def test_engines_of_every_family_fit(name: str, tmp_path: Path) -> None:
    family, engines, sizes = FAMILIES[name + ENDING], [], []
    # No engine has tied embeddings besides experts.
    other = {"tie_word_embeddings": False} if family.experts else {}
    other |= LATENT_IN_ENGINES if family.is_latent else {}
    # SGLang 0.5.23 skips queries without a latent there (glm4_moe_lite.py:855).
    other |= {"q_lora_rank": 40} if name == "Glm4MoeLite" else {}
    for number, options in enumerate(one for case, one in family_cases() if case == name):
        folder = tmp_path / str(number)
        write_tiny(folder, family=name, **LARGER, **(options | other))
        for ranks in (1, 3 if number else 2):
            sizes.append(ranks)
            engines.append((configured(folder, tensor=ranks), read_shape(folder)))
    assert sizes == [1, 2, 1, 3]
    traces = trace_engines(engines)
    for (config, shape), ranks, found in zip(engines, sizes, traces, strict=True):
        for rank, trace in enumerate(found):
            slices = EngineKind("sglang", ranks).slices(shape, rank)
            assert differences(slices, trace, config.model.dtype) == []
        held = {part.hf for trace in found for part in trace.loaded}
        assert held == hf_shapes(shape).keys() - untrained(shape)


@pytest.mark.exhaustive
@pytest.mark.timeout(LIMIT_S)
def test_a_layout_that_is_wrong_is_reported_for_all_ranks_and_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tmp_path, "SmolLM2-135M")
    slices = EngineKind.slices

    class Wrong(EngineKind, frozen=True):
        def slices(self, shape: Any, rank: int) -> list[Slice]:
            return [
                part._replace(column=0) if part.local.endswith("down_proj.weight") else part
                for part in slices(self, shape, rank)
            ]

    monkeypatch.setattr(rehearsed_engine, "EngineKind", Wrong)
    config = configured(tmp_path, tensor=3)
    (found,) = check_engine(config, read_shape(tmp_path))
    # Rank 0 begins at column 0 anyway; each of the 30 layers is wrong on the others.
    assert found == (
        f"engine rank 1: {PART}: a weight sync copies rows 0 to 575, columns 0 to 511 of {PART} to "
        f"row 0, column 0; SGLang copies rows 0 to 575, columns 512 to 1023 of {PART} to row 0, "
        "column 0 (60 such problems on ranks 1, 2)"
    )


@pytest.mark.exhaustive
@pytest.mark.timeout(LIMIT_S)
def test_a_server_holds_the_same_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Sizes that SGLang's CPU mode, in which the server runs, does not pad.
    for seed, name in enumerate(("old", "new")):
        write_model(
            tmp_path / name, family="Qwen3Moe", is_tied=False, seed=seed, moe_intermediate_size=128
        )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv(layout_loader.OLD, str(tmp_path / "old"))
    monkeypatch.setenv(layout_loader.NEW, str(tmp_path / "new"))
    monkeypatch.setenv(layout_loader.REPORTS, str(tmp_path))
    monkeypatch.setenv("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "false")
    monkeypatch.setattr(SGLangEngine, "loader", layout_loader.NAME)
    setup = make_setup(tmp_path, tmp_path / "server.log", tensor_parallel=2, context_tokens=200)
    asyncio.run(asyncio.wait_for(_load_only(SGLangEngine(setup)), timeout=LIMIT_S / 2))
    traces = trace_engine(configured(tmp_path / "old", tensor=2), shape_of(tmp_path / "old"))
    for rank, trace in enumerate(traces):
        report = json.loads((tmp_path / f"{rank}.json").read_text())
        assert report["different"] == []
        assert {n: list(size) for n, (size, _) in trace.parameters.items()} == report["parameters"]


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    ("runner", "quantization"),
    [
        ("flashinfer_trtllm", ""),
        pytest.param("flashinfer_cutlass", "", marks=pytest.mark.exhaustive),
        pytest.param("triton_kernel", "", marks=pytest.mark.exhaustive),
        pytest.param("flashinfer_trtllm", "fp8", marks=pytest.mark.exhaustive),
    ],
)
def test_experts_in_another_order_are_refused(
    runner: str, quantization: str, tmp_path: Path
) -> None:
    """As SGLang chooses by itself on some GPUs, if nothing is said."""
    write_config(tmp_path, "Qwen3-30B-A3B")
    more = {"moe-runner-backend": runner}
    config = configured(tmp_path, tensor=1, quantization=quantization, **more)
    (found,) = check_engine(config, read_shape(tmp_path))
    assert f"model.layers.0.mlp.experts: experts of SGLang's runner {runner!r} lie in" in found


def test_each_planted_fault_is_named() -> None:
    slices = [Slice(PART, 0, 4, 8, 4, PART, 0, 0), Slice("n", 0, 0, 8, 1, "norm", 0, 0)]
    parameters = {PART: ((8, 4), "bfloat16"), "norm": ((8,), "bfloat16")}
    trace = RankTrace(parameters, list(slices), [])
    assert differences(slices, trace, "bfloat16") == []
    # A renamed parameter: nothing reaches the one, nobody takes the other.
    renamed = [slices[0]._replace(local="other"), slices[1]]
    assert differences(renamed, trace, "bfloat16") == [
        f"no weight sync reaches {PART}",
        "a weight sync sends other, which SGLang's model does not have",
    ]
    assert differences(slices[:1], trace, "bfloat16") == ["no weight sync reaches norm"]
    # The wrong half, although its size fits.
    (found,) = differences([slices[0]._replace(column=0), slices[1]], trace, "bfloat16")
    assert "columns 0 to 3" in found and "SGLang copies rows 0 to 7, columns 4 to 7" in found
    # Both sides leave out a part of a parameter that has no padding.
    short = [slices[0]._replace(rows=6), slices[1]]
    assert differences(short, RankTrace(parameters, short, []), "bfloat16") == [
        f"{PART}: 8 of its elements are in no slice"
    ]
    assert differences(slices, trace, "float32") == [
        f"{name}: SGLang stores bfloat16, and a weight sync sends float32"
        for name in (PART, "norm")
    ]
    (found,) = differences(slices, RankTrace(parameters, slices, ["x to y"]), "bfloat16")
    assert found == "SGLang copies x to y: slices cannot follow it"


def test_only_sglangs_models_can_be_built(tmp_path: Path) -> None:
    write_config(tmp_path, "SmolLM2-135M")
    config = configured(tmp_path, tensor=1)
    hf = config.model_copy(
        update={"generator": config.generator.model_copy(update={"engine": "hf"})}
    )
    with pytest.raises(InputError, match="generator.engine = 'hf'"):
        check_engine(hf, read_shape(tmp_path))


def test_sizes_that_do_not_divide_the_model_are_a_problem(tmp_path: Path) -> None:
    write_config(tmp_path, "SmolLM2-135M")
    (found,) = check_engine(configured(tmp_path, tensor=2), read_shape(tmp_path))
    assert "generator.tensor_parallel = 2 does not divide the model's 9 attention heads" in found
