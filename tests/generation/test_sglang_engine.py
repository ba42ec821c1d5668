"""What is read from SGLang's answers, and what it is started with; no server is needed."""

import argparse
import dataclasses
import json
from pathlib import Path

import pytest
from sglang.srt.environ import envs

from generation.engine import EngineError, EngineSetup, engine_setup
from generation.sglang_command import server_command, server_environment
from generation.sglang_direct import read_ended
from generation.sglang_http import check_answer, read_event, read_last_event
from generation.sglang_orders import LOADER
from megatron_rl.backend.cpu import sglang as sglang_cpu
from megatron_rl.config.files import load_config
from megatron_rl.protocol.types import VersionSpan
from megatron_rl.weights.layout.families import FAMILIES

META = {
    "finish_reason": {"type": "stop", "matched": 1},
    "output_token_logprobs": [[-0.5, 7, None], [-1.5, 1, None]],
    "cached_tokens": 5,
}


def test_a_completion_is_read_with_its_versions() -> None:
    report = [{"version": "4", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 2}]
    event = {"output_ids": [7, 1], "meta_info": {**META, "weight_versions": report}}
    ended = read_last_event(event, "mrl-0-3.", 20.5)
    assert (ended.name, ended.cached_tokens) == ("mrl-0-3.", 5)
    completion = read_ended(ended, 3)
    assert completion.index == 3
    assert completion.logprobs == [-0.5, -1.5]
    assert completion.spans == [VersionSpan(4, 0, 1), VersionSpan(5, 1, 2)]
    assert completion.finish_reason == "stop" and completion.expert_choices == b""
    assert completion.first_token_at == 20.5
    event["meta_info"]["routed_experts"] = "AwAAAAEAAAA="  # 3 and 1 as int32
    assert read_last_event(event, "", -1.0).expert_choices == b"\3\0\0\0\1\0\0\0"


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({"finish_reason": {"type": "abort", "message": "out of memory"}}, "abort: out of memory"),
        ({"output_token_logprobs": [[-0.5, 7, None]]}, "1 logprobs for 2 tokens"),
        ({"weight_versions": [{"version": "4", "start": 0, "end": 1}]}, "do not cover 2 tokens"),
        ({}, "invalid weight versions"),  # as of SGLang before 0.5.20, which reports none
    ],
)
def test_a_completion_that_contradicts_itself_is_refused(meta: dict, words: str) -> None:
    event = {"output_ids": [7, 1], "meta_info": META | meta}
    with pytest.raises(EngineError, match=words):
        read_ended(read_last_event(event, "", -1.0), 0)


@pytest.mark.parametrize(
    ("status", "text", "words"),
    [
        (500, "boom", "/path: 500 boom"),
        (200, '{"success": false, "message": "no such group"}', "/path: no such group"),
    ],
)
def test_errors_carry_the_servers_words(status: int, text: str, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        check_answer("/path", status, text)
    check_answer("/path", 200, '{"success": true}')
    check_answer("/path", 200, "plain text")
    with pytest.raises(EngineError, match="too long"):
        read_event(b'data: {"error": {"message": "too long"}}')


SETUP = EngineSetup(
    model=Path("/m"), dtype="bfloat16", stop_ids=(), tensor_parallel=2, max_running=8,
    kv_tokens=1024, context_tokens=256, nice=0, start_timeout_s=1, request_timeout_s=1,
    weights_timeout_s=1, host="127.0.0.1", port=1234, seed=5, version=-1, log_path=Path("/l"),
)  # fmt: skip


def test_variables_of_the_user_do_not_break_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the engine's own reading of them."""
    (tmp_path / "config.json").write_text("{}")
    for name in ("SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED", "SGLANG_RETURN_ORIGINAL_LOGPROB"):
        monkeypatch.setenv(name, "1")
    alone = dataclasses.replace(SETUP, model=tmp_path)
    for setup in (alone, dataclasses.replace(alone, colocate=True)):
        for name, value in server_environment(setup).items():
            monkeypatch.setenv(name, value)
        assert envs.SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED.get() is False
        assert envs.SGLANG_RETURN_ORIGINAL_LOGPROB.get() is False
        assert envs.SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK.get() is not setup.colocate


def test_the_server_is_started_with_what_exact_versions_need() -> None:
    setup = SETUP
    command = server_command(setup, LOADER)
    assert {"--disable-overlap-schedule", "--weight-version=-1", "--tp-size=2"} <= set(command)
    assert "--ep-size=1" in command
    # Else each event of a stream would hold all ids again: 21 GB of JSON for 32k tokens.
    assert "--stream-interval=1000000" in command
    overlapping = dataclasses.replace(setup, overlaps_schedule=True)
    assert "--disable-overlap-schedule" not in server_command(overlapping, LOADER)
    dividing = dataclasses.replace(setup, expert_parallel=2)
    assert "--ep-size=2" in server_command(dividing, LOADER)
    # One engine, and not one a node.
    assert "--nccl-port=1235" in command
    # Strings that end a completion are looked for with a tokenizer.
    assert "--skip-tokenizer-init" in command
    reading = dataclasses.replace(setup, stops_at_text=True)
    assert "--skip-tokenizer-init" not in server_command(reading, LOADER)
    given = {"page_size": 16, "enable-metrics": True, "cuda-graph-bs-decode": [1, 2]}
    extended = server_command(dataclasses.replace(setup, extra_args=given), LOADER)
    assert extended == [
        *command, "--page-size=16", "--enable-metrics", "--cuda-graph-bs-decode", "1", "2"
    ]  # fmt: skip
    spread = dataclasses.replace(setup, nodes=2, node_rank=1, meets_at="10.0.0.1:99")
    there = set(server_command(spread, LOADER))
    assert {"--nnodes=2", "--node-rank=1", "--dist-init-addr=10.0.0.1:99"} <= there
    assert not any("--nccl-port" in word for word in there)
    assert ("--device" in command) == sglang_cpu.is_needed()
    assert not any("--quantization" in word for word in command)
    quantised = dataclasses.replace(setup, quantization="fp8")
    assert "--quantization=fp8" in server_command(quantised, LOADER)
    assert "--enable-return-routed-experts" not in command
    choosing = dataclasses.replace(setup, returns_expert_choices=True)
    assert "--enable-return-routed-experts" in server_command(choosing, LOADER)
    assert "--enable-fp32-lm-head" not in command
    wide = dataclasses.replace(setup, has_wide_head=True)
    assert "--enable-fp32-lm-head" in server_command(wide, LOADER)


WITH_EXPERTS = {
    "MixtralForCausalLM", "Qwen3MoeForCausalLM", "Qwen3VLMoeForConditionalGeneration",
    "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM",
}  # fmt: skip


@pytest.mark.parametrize("is_cpu", [False, True])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_experts_are_stored_in_the_order_of_slices(
    architecture: str, is_cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_cpu, "is_needed", lambda: is_cpu)
    values = {"architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    setup = dataclasses.replace(SETUP, model=tmp_path)
    for quantization in ("", "fp8"):
        given = dataclasses.replace(setup, quantization=quantization)
        runners = [word for word in server_command(given, LOADER) if "runner" in word]
        has_experts = architecture in WITH_EXPERTS
        assert runners == ["--moe-runner-backend=triton"] * has_experts


def test_a_frozen_model_with_codes_has_the_runner_that_fits(tmp_path: Path) -> None:
    values = {"architectures": ["Qwen3MoeForCausalLM"]}
    setup = dataclasses.replace(SETUP, model=tmp_path)
    for more, quantization in (
        ({"quantization_config": {"quant_method": "fp8"}}, ""),
        ({}, "w8a8"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(values | more))
        command = server_command(dataclasses.replace(setup, quantization=quantization), LOADER)
        assert not any("runner" in word for word in command)


def test_sglangs_watchdog_is_slower_than_the_longest_pause() -> None:
    given = ["generator.replicas=3", "expert.weights.deadline_s=100",
             "expert.weights.join_timeout_s=300", "expert.train.batch_timeout_s=600",
             "expert.checkpoint.write_timeout_s=1800"]  # fmt: skip
    setup = engine_setup(load_config(None, given), 0, ())
    flags = [flag for flag in server_command(setup, LOADER) if "watchdog" in flag]
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    parsed = parser.parse_args(["--model-path=/m", *flags])
    # Three transfers, a missing generator, a batch and a checkpoint; nine times, since eight
    # weight syncs may pass a generator by.
    assert parsed.watchdog_timeout == 9 * (3 * 100 + 300 + 600 + 1800)


@pytest.mark.parametrize(
    ("takes_all_memory", "has_gpu", "is_bounded"),
    [(True, True, False), (True, False, True), (False, True, True)],
)
def test_the_cache_is_bounded_but_on_a_gpu_that_it_may_fill(
    monkeypatch: pytest.MonkeyPatch, takes_all_memory: bool, has_gpu: bool, is_bounded: bool
) -> None:
    monkeypatch.setattr(sglang_cpu, "is_needed", lambda: not has_gpu)
    setup = EngineSetup(
        model=Path("/m"), dtype="bfloat16", stop_ids=(), tensor_parallel=1, max_running=8,
        kv_tokens=1024, context_tokens=256, nice=0, start_timeout_s=1, request_timeout_s=1,
        weights_timeout_s=1, host="127.0.0.1", port=1234, seed=5, version=-1, log_path=Path("/l"),
        takes_all_memory=takes_all_memory,
    )  # fmt: skip
    assert ("--max-total-tokens=1032" in server_command(setup, LOADER)) == is_bounded


def test_two_ranks_are_pinned_to_two_cores() -> None:
    assert sglang_cpu.server_environment(2)["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"
    path = sglang_cpu.server_environment(1)["PYTHONPATH"].split(":")
    assert path[0].endswith("cpu/sglang/site") and path[1].endswith("sglang-only")
