"""The arithmetic of the engine benchmark and of the machine's limits, on numbers worked by hand."""

import json
import time
from pathlib import Path

import pytest
import torch

from tools.bench import generate, limits
from tools.bench.generate import (
    Speed,
    decode_roofline,
    prefill_roofline,
    speed,
    variables,
)
from tools.bench.generate_peer import Job, endless_model, measure, prompts
from tools.bench.limits import Shapes, loopback

SHAPES = Shapes(layer=((3, 2), (2, 2)), head=(5, 2), layers=4)


def make_job(folder: Path, **changes: object) -> Job:
    values = {"engine": "e", "model": "m", "rows": str(folder / "rows.jsonl")}
    sizes = {"running": [3], "prompt_tokens": 4, "new_tokens": 8, "repeats": 2}
    return Job(**(values | sizes | changes))


def test_decode_leaves_the_first_token_out_and_prefill_counts_prompts() -> None:
    rows = [
        {"running": 10, "first_s": 1.0, "all_s": 3.0},
        {"running": 10, "first_s": 2.0, "all_s": 7.0},
        {"running": 10, "first_s": 4.0, "all_s": 5.0},
        {"running": 1, "first_s": 9.0, "all_s": 99.0},
    ]
    # 10 x 20 tokens in 2, 5 and 1 s; 10 x 8 prompt tokens in 1, 2 and 4 s.
    assert speed(rows, 10, prompt_tokens=8, new_tokens=20) == Speed(prefill=40.0, decode=100.0)


def test_roofline_is_bound_by_weights_or_products_and_adds_the_cache() -> None:
    assert SHAPES.weights == 4 * 10 + 10
    sizes = {"running": 2, "context_tokens": 5, "kv_bytes": 10, "bytes_per_s": 100.0}
    # 50 weights of 2 bytes take 1 s, 2 x 5 tokens of 10 bytes another.
    assert decode_roofline(SHAPES, **sizes, flops_per_s=1e9) == pytest.approx(1.0)
    # 2 x 50 x 2 FLOP take 2 s instead.
    assert decode_roofline(SHAPES, **sizes, flops_per_s=100.0) == pytest.approx(2 / 3)
    assert prefill_roofline(SHAPES, 800.0) == 10.0
    assert generate.KV_BYTES == 23_040


def test_smollm2_has_its_134_million_weights_of_products() -> None:
    # 30 x (576 x 576 x 2 + 192 x 576 x 2 + 3 x 576 x 1536) + 49152 x 576
    assert limits.MODELS["135M"].weights == 30 * 3_538_944 + 28_311_552


def test_rate_of_a_model_weighs_layers_and_head_by_their_work() -> None:
    rates = {"layers_plain": 10.0, "layers_packed": 40.0, "head_plain": 5.0, "head_packed": None}
    # 40 weights at 40 and 10 at 5 take 3; 50 / 3.
    assert limits.model_rate(SHAPES, rates) == pytest.approx(50 / 3)


def test_best_window_is_the_seconds_of_one_call() -> None:
    seconds = limits.best_seconds(lambda: time.sleep(0.002), windows=5, window_s=0.01)
    # The shortest of many.
    assert 0.002 <= seconds < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_products_equal_plain_ones(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(48, 32).to(dtype), torch.randn(8, 32).to(dtype)
    packed = limits.packed_product(weight, 8)
    if packed is None:
        pytest.skip("this torch has no packed products")
    expected = x.double() @ weight.double().T
    for product in (packed, limits.plain_product(weight)):
        torch.testing.assert_close(
            product(x).double(), expected, atol=0.05 if dtype == torch.bfloat16 else 1e-4, rtol=0.01
        )


def test_rates_are_positive_and_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    rates = limits.with_threads(1, lambda: limits.gemm_rates(SHAPES, 4, torch.float32))
    assert torch.get_num_threads() == before
    assert set(rates) == {"layers_plain", "layers_packed", "head_plain", "head_packed"}
    assert all(rate is None or rate > 0 for rate in rates.values())
    assert limits.read_rate(1 << 22) > 1e5 and limits.copy_rate(1 << 22) > 1e5


def test_two_processes_talk_over_loopback() -> None:
    for found in loopback().values():
        assert found["bytes_per_s"] > 1e5 and 0 < found["round_trip_s"] < 30


def test_prompts_are_the_same_for_each_engine_and_new_at_each_call(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    assert prompts(job, 3, 1) == prompts(make_job(tmp_path, engine="other"), 3, 1)
    assert prompts(job, 3, 1) != prompts(job, 3, 2)
    assert [len(prompt) for prompt in prompts(job, 3, 1)] == [4, 4, 4]


def test_a_sample_times_one_token_and_all_of_them(tmp_path: Path) -> None:
    job, asked = make_job(tmp_path), []

    def generate(prompts: list[list[int]], tokens: int) -> list[int]:
        asked.append((len(prompts), tokens))
        return [tokens] * len(prompts)

    measure(job, generate)
    assert asked == [(3, 4), (3, 1), (3, 9), (3, 1), (3, 9)]
    assert len(Path(job.rows).read_text().splitlines()) == 2
    with pytest.raises(RuntimeError, match="asked for 3 x 4 tokens"):
        measure(job, lambda prompts, tokens: [tokens - 1] * len(prompts))


def test_an_endless_model_names_no_end_of_sequence(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"eos_token_id": 2, "hidden_size": 8}')
    (source / "tokenizer.json").write_text("{}")
    (source / "model.safetensors").write_bytes(b"weights")
    folder = endless_model(source, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    assert config == {"eos_token_id": None, "hidden_size": 8}
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert (folder / "model.safetensors").is_symlink()


def test_vllm_is_bound_to_the_cores_and_keeps_its_cache_apart(tmp_path: Path) -> None:
    library = tmp_path / "lib" / "libiomp5.so"
    library.parent.mkdir()
    library.touch()
    found = variables(tmp_path / "bin" / "python", [3, 5], tmp_path / "cache")
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == "3,5" and found["OMP_NUM_THREADS"] == "2"
    assert found["LD_PRELOAD"] == str(library)
    assert found["VLLM_CACHE_ROOT"] == str(tmp_path / "cache") and found["VLLM_PLUGINS"] == ""


def test_ratios_are_taken_at_the_most_running_requests() -> None:
    speeds = {
        "ours": {1: Speed(1.0, 10.0), 64: Speed(100.0, 60.0)},
        "vllm": {1: Speed(1.0, 1.0), 64: Speed(200.0, 80.0)},
        "roofline": {64: Speed(1000.0, 120.0)},
    }
    found = generate.figures(speeds)
    assert found["decode_over_vllm"] == 0.75 and found["prefill_over_vllm"] == 0.5
    assert found["decode_over_roofline"] == 0.5 and found["decode_over_transformers"] is None
    assert found["decode_tokens_per_s"]["ours"] == {"1": 10.0, "64": 60.0}
