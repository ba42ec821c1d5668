"""What the installed engine cannot do is refused before a run."""

import importlib.util
import json
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from megatron_rl.config.errors import ConfigError, InputError
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config, GeneratorConfig
from megatron_rl.launcher import model_checks, preflight
from megatron_rl.weights.layout.shape import read_shape
from tests.generation.layout_models import shape_of, write_model
from tests.tiny_models import LATENT
from tests.tiny_models import write_model as write_policy
from tests.wrapped_models import write_wrapped


@pytest.mark.parametrize("quantization", ["w8a8_fp8", "awq"])
def test_a_training_run_quantises_to_fp8_alone(tmp_path: Path, quantization: str) -> None:
    with pytest.raises(InputError, match="Set generator.quantization='fp8' or ''"):
        model_checks.check_quantization(of_family(tmp_path, "Qwen3", quantization))
    # A run that evaluates one folder loads it once.
    model_checks.check_quantization(of_family(tmp_path, "Qwen3", quantization, "train.steps=0"))


def test_quantised_experts_need_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_checks.sglang_cpu, "is_needed", lambda: True)
    model_checks.check_quantization(of_family(tmp_path, "Qwen3", "fp8"))
    with pytest.raises(InputError, match="without a GPU: .* Set generator.quantization=''"):
        model_checks.check_quantization(of_family(tmp_path, "Mixtral", "fp8"))


def of_family(folder: Path, family: str, quantization: str, *overrides: str) -> Config:
    (folder / "config.json").write_text(f'{{"architectures": ["{family}ForCausalLM"]}}')
    given = [f"model.path={folder}", f"generator.quantization={quantization}", *overrides]
    return load_config(None, given)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("engine", "vllm", "generator.engine = 'vllm' with DeepseekV3ForCausalLM"),
        ("engine", "hf", "generator.engine = 'hf' with DeepseekV3ForCausalLM"),
        ("quantization", "fp8", "generator.quantization = 'fp8' with DeepseekV3ForCausalLM"),
        ("seed", "1", "config.json lacks topk_method, scoring_func, moe_layer_freq"),
    ],
)
def test_what_engines_cannot_do_with_latent_attention_is_refused(
    tmp_path: Path, key: str, value: str, message: str
) -> None:
    write_policy(tmp_path / "plain", family="DeepseekV3", **LATENT)
    folder = tmp_path / "plain"
    if key != "seed":
        write_model(folder, family="DeepseekV3", is_tied=False, seed=0)
        model_checks.check_latent(load_config(None, [f"model.path={folder}"]), read_shape(folder))
    given = [f"generator.{key}={value}"] if key != "seed" else []
    config = load_config(None, [f"model.path={folder}", *given])
    with pytest.raises(InputError, match=message):
        model_checks.check_latent(config, read_shape(folder))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("generator.engine=vllm", "generator.engine = 'vllm' with GptOssForCausalLM"),
        ("generator.engine=hf", "generator.engine = 'hf' with GptOssForCausalLM"),
        ("generator.quantization=fp8", "generator.quantization = 'fp8' with GptOssForCausalLM"),
        ("generator.tensor_parallel=2 generator.expert_parallel=2",
         "generator.expert_parallel = 2 with GptOssForCausalLM: .* set it to 1"),
        ("run.seed=1", "quantised weights .* not supported: .*`megatron-rl convert .* --to hf`"),
    ],
)  # fmt: skip
def test_what_engines_cannot_do_with_sinks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, message: str
) -> None:
    monkeypatch.setattr(model_checks.sglang_cpu, "is_needed", lambda: False)
    write_model(tmp_path, family="GptOss", is_tied=False, seed=0)
    shape = read_shape(tmp_path)
    model_checks.check_sinks(load_config(None, [f"model.path={tmp_path}"]), shape)
    if "seed" in given:
        values = json.loads((tmp_path / "config.json").read_text())
        values["quantization_config"] = {"quant_method": "mxfp4"}
        (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(InputError, match=message):
        model_checks.check_model(load_config(None, [f"model.path={tmp_path}", *given.split()]))


@pytest.mark.parametrize("engine", ["sglang", "hf"])
def test_sequences_beyond_the_models_positions_are_refused(tmp_path: Path, engine: str) -> None:
    def check(positions: int, rope: dict[str, object], *given: str) -> None:
        values = {"max_position_embeddings": positions, "rope_parameters": rope}
        (tmp_path / "config.json").write_text(json.dumps(values))
        given = (f"model.path={tmp_path}", f"generator.engine={engine}", *given)
        model_checks.check_positions(load_config(None, list(given)))

    check(2048, {"rope_type": "default"})  # generator.context_tokens by default
    check(512, {"rope_type": "linear", "factor": 4.0})
    check(512, {"full_attention": {"rope_type": "yarn", "factor": 4.0}})
    check(512, {}, "train.steps=0", "eval.prompts=0", "sft.steps=1", "sft.dataset=x")
    if engine == "hf":
        # It does not look at them.
        check(2047, {})
        return
    for positions, rope in ((2047, {"rope_type": "default"}), (511, {"factor": 4.0})):
        scaled = positions * int(rope.get("factor", 1))
        with pytest.raises(InputError, match=f"2048 is above the {scaled} positions"):
            check(positions, rope)
    with pytest.raises(InputError, match="9 positions .* sglang serves no longer sequences"):
        check(9, {}, "train.steps=0")


@pytest.mark.parametrize("has_gpu", [True, False])
def test_divided_experts_need_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    write_model(tmp_path, family="Qwen3Moe", is_tied=False, seed=0)
    shape = shape_of(tmp_path)
    monkeypatch.setattr(model_checks.sglang_cpu, "is_needed", lambda: not has_gpu)
    divided = GeneratorConfig(tensor_parallel=2, expert_parallel=2)
    model_checks.check_expert_parallel(GeneratorConfig(tensor_parallel=2), shape)
    if has_gpu:
        model_checks.check_expert_parallel(divided, shape)
        return
    with pytest.raises(InputError, match="without a GPU: SGLang's CPU mode cannot .* set it to 1"):
        model_checks.check_expert_parallel(divided, shape)


def test_experts_of_an_engine_without_experts_or_ranks_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, family="Llama", is_tied=True, seed=0)
    divided = ["generator.tensor_parallel=2", "generator.expert_parallel=2"]
    config = load_config(None, divided)
    with pytest.raises(InputError, match="expert_parallel = 2, but the model has no experts"):
        model_checks.check_expert_parallel(config.generator, shape_of(tmp_path))
    with pytest.raises(ConfigError, match="must divide the generator.tensor_parallel=3"):
        load_config(None, ["generator.tensor_parallel=3", "generator.expert_parallel=2"])
    with pytest.raises(ConfigError, match="which is one process: set it to 1"):
        load_config(None, [*divided, "generator.engine=hf"])


def test_engines_copy_no_key_value_heads_that_are_normed_together(tmp_path: Path) -> None:
    # 4 heads, 2 key-value heads.
    for family in ("Llama", "Olmo2"):
        write_model(tmp_path, family=family, is_tied=False, seed=0)
        config = load_config(None, [f"model.path={tmp_path}", "generator.tensor_parallel=4"])
        if family == "Llama":
            model_checks.check_model(config)
            continue
        with pytest.raises(InputError, match="tensor_parallel = 4 .*normed together; .*: 2$"):
            model_checks.check_model(config)


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_other_engines_take_no_weights_of_a_wrapped_text_model(tmp_path: Path, engine: str) -> None:
    write_wrapped(tmp_path, "Mistral3", num_hidden_layers=1)
    config = load_config(None, [f"model.path={tmp_path}", "generator.engine=sglang"])
    model_checks.check_model(config)
    config = load_config(None, [f"model.path={tmp_path}", f"generator.engine={engine}"])
    with pytest.raises(InputError, match=f"Mistral3.*='{engine}' takes.*set it to 'sglang'"):
        model_checks.check_model(config)


def test_models_that_overlapped_tensor_ranks_cannot_divide_are_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    write_policy(tmp_path, **sizes)
    overlapped = [
        "parallel.tensor=2",
        "parallel.sequence=true",
        "expert.parallel.overlap_tensor=true",
    ]
    overrides = [f"model.path={tmp_path}", "expert.train.pad_microbatches=true"]
    config = load_config(None, [*overrides, *overlapped])
    with pytest.raises(InputError, match="hidden size that 64 divides, and the model has 96"):
        model_checks.check_model(config)
    write_policy(tmp_path, **sizes | {"hidden_size": 128})
    model_checks.check_model(config)
    write_model(tmp_path, family="DeepseekV3", is_tied=False, seed=0)
    with pytest.raises(InputError, match="overlap_tensor=true with latent attention"):
        model_checks.check_model(config)


def test_sglangs_cpu_mode_knows_no_experts_of_other_ranks() -> None:
    """It counts tokens by the numbers that the dispatcher gave them, where -1 is another rank's."""
    layers = Path(importlib.util.find_spec("sglang").submodule_search_locations[0]) / "srt/layers"
    native = (layers / "moe/fused_moe_native.py").read_text()
    assert "len_experts = layer.num_experts\n" in native
    assert "cnts.scatter_(1, topk_ids.to(torch.int64), 1)" in native
    dispatcher = (layers / "moe/token_dispatcher/standard.py").read_text()
    assert "topk_output = topk_output._replace(topk_ids=topk_ids_local)" in dispatcher


def test_the_overlap_scheduler_needs_a_pause_that_takes_what_is_in_flight() -> None:
    with pytest.raises(ConfigError, match="overlap_schedule with weights.kv_cache='keep'"):
        load_config(None, ["expert.generator.overlap_schedule=true"])
    load_config(None, ["expert.generator.overlap_schedule=true", "weights.kv_cache=recompute"])
    srt = Path(importlib.util.find_spec("sglang").submodule_search_locations[0]) / "srt"
    scheduler = (srt / "managers/scheduler.py").read_text()
    pause = scheduler[scheduler.index("def pause_generation(") :]
    in_place, drained = (
        pause.index(words)
        for words in (
            'if recv_req.mode == "in_place":',
            "if self.enable_overlap and self.last_batch:",
        )
    )
    # The one returns before the other takes the token in flight.
    assert in_place < pause.index("            return\n", in_place) < drained
    assert pause.index("self.process_batch_result(tmp_batch, tmp_result)") > drained
    versions = (srt / "utils/weight_versions.py").read_text()
    assert "num_output_tokens=len(req.output_ids)" in versions


RELEASING = [
    "generator.release_memory=true", "generator.colocate=true", "weights.method=ipc",
    "weights.kv_cache=recompute",
]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("generator.engine=hf", "engine='hf': SGLang alone gives memory back; set .*'sglang'"),
        ("generator.colocate=false", "without generator.colocate: .* set colocate=true"),
        ("weights.kv_cache=keep", "weights.kv_cache='keep': .* set weights.kv_cache='recompute'"),
        ("expert.weights.overlap=true", "and expert.weights.overlap=true exclude each other"),
        ("eval.replicas=1", "and eval.replicas=1 exclude each other: no engine keeps the version"),
        ("generator.quantization=fp8", "quantization='fp8': .* leave one of them out"),
        (
            "expert.generator.start_timeout_s=1300",
            "join_timeout_s=1200 below .*start_timeout_s=1300",
        ),
    ],
)
def test_what_makes_no_sense_with_engines_that_give_memory_back_is_refused_at_load(
    given: str, words: str
) -> None:
    config = load_config(None, RELEASING)
    # Several engines evaluate all together: none keeps an older version while others train.
    assert (
        config.model_copy(
            update={"generator": config.generator.model_copy(update={"replicas": 8})}
        ).evaluators
        == 0
    )
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        load_config(None, [*RELEASING, given])


def test_the_memory_saver_of_engines_on_gpus_is_looked_for_before_a_model_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preflight.check_memory_saver("cpu", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    monkeypatch.setattr(preflight, "_MEMORY_SAVER", "no-such-package")
    with pytest.raises(InputError, match="needs the package no-such-package.*install.sh gpu"):
        preflight.check_memory_saver("cuda", {})
    monkeypatch.setattr(preflight, "_MEMORY_SAVER", "numpy")
    preflight.check_memory_saver("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"})
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        with pytest.raises(InputError, match=f"{name}=a:1.*sets it for trainer ranks alone"):
            preflight.check_memory_saver("cuda", {name: "a:1,expandable_segments:True"})
    monkeypatch.setattr(preflight, "_MEMORY_SAVER", "no-such-package")
    monkeypatch.setattr(preflight, "device_of_host", lambda gpus: "cuda")
    # The folder of the model is not there: this comes first.
    with pytest.raises(InputError, match="no-such-package"):
        preflight.check(load_config(None, RELEASING))


def test_the_gpu_lock_file_holds_the_memory_saver() -> None:
    root = Path(__file__).resolve().parent.parent.parent
    assert "\ntorch-memory-saver==" in (root / "requirements/gpu.txt").read_text()


def test_sglang_releases_its_memory_only_when_no_request_runs() -> None:
    """What the order of an engine's calls rests on; look again when this fails."""
    srt = Path(importlib.util.find_spec("sglang").submodule_search_locations[0]) / "srt"
    updater = (srt / "managers/scheduler_components/weight_updater.py").read_text()
    release, resume = updater[updater.index("def release_memory_occupation(") :].split(
        "def resume_memory_occupation("
    )
    assert release.index("assert self.is_fully_idle(") < release.index("memory_saver_adapter.pause")
    # Requests that a pause has put back may wait.
    assert "ignore_waiting=scheduler is not None and scheduler._engine_paused" in release
    kept = release.index("if GPU_MEMORY_TYPE_KV_CACHE in tags:")
    assert kept < release.index("self.flush_cache()") < release.index("if GPU_MEMORY_TYPE_WEIGHTS")
    # Buffers come back, parameters do not; a second call for one release would raise.
    assert "_export_static_state" in release and "_import_static_state" in resume
    assert "self.offload_tags.remove(tag)" in resume
    backend = (srt / "model_executor/runner_backend/full_cuda_graph_backend.py").read_text()
    assert "tag=GPU_MEMORY_TYPE_CUDA_GRAPH" in backend and "enable_cpu_backup=True" in backend


def test_weight_syncs_beside_training_on_gpus_are_refused_before_a_model_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "device_of_host", lambda gpus: "cuda" if gpus else "cpu")
    beside = Config(weights={"overlap": True})
    preflight.check_overlap(beside, [])
    # An evaluation alone has no trainer.
    preflight.check_overlap(Config(weights={"overlap": True}, train={"steps": 0}), ["0"])
    monkeypatch.setattr(preflight, "listed_gpus", lambda: ["0"])
    # The folder of the model is not there: this comes first.
    with pytest.raises(InputError, match="method=reshard needs a trainer without GPUs"):
        preflight.check(beside)


def test_the_check_of_a_run_asks_for_it(tmp_path: Path) -> None:
    """Before the model is read."""
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "tokenizer.json").touch()
    save_file({}, tmp_path / "model.safetensors")
    config = Config(model={"path": tmp_path}, generator={"quantization": "awq"})
    with pytest.raises(InputError, match="generator.quantization='awq' with a model"):
        preflight.check(config)
