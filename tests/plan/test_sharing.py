"""A GPU that trainer and engine share, worked by hand; a model that fits only in turns."""

import json
from pathlib import Path

import pytest

from megatron_rl.config.files import load_config
from megatron_rl.config.gpus import GIB, find_gpu
from megatron_rl.plan.generator import EngineMemory
from megatron_rl.plan.plan import Hardware, SizingPlan, make_plan
from megatron_rl.plan.problems import SharedMemory, shared_memory
from megatron_rl.plan.trainer_memory import RankMemory, StateBytes
from tests.plan.test_plan import config_path  # noqa: F401 - a fixture

ROOT = Path(__file__).resolve().parents[2]
SHARED = ["generator.colocate=true", "weights.method=folder", "generator.replicas=1"]
TURNS = [*SHARED, "generator.release_memory=true", "weights.kv_cache=recompute"]


def test_turns_take_turns_with_what_is_given_back() -> None:
    states = StateBytes(weights=2, gradients=4, masters=4, moments=8)
    trainer = RankMemory(
        stage=0, parameters=1, states=states, activations=30, backward=6, logits=7, sync_buffers=3,
        reserve=5,
    )  # fmt: skip
    engine = EngineMemory(weights=11, kv_per_token=2, reserve=13, kv_room=1000)
    cache = ["generator.kv_tokens=10", "generator.context_tokens=5", "sampling.max_new_tokens=4",
             "eval.max_new_tokens=4", "reward.length_margin_tokens=1"]  # fmt: skip
    alone, beside, turns = (
        shared_memory(load_config(None, [*cache, *given]), trainer, engine)
        for given in ([], SHARED, TURNS)
    )
    assert alone is None
    # 18 + 30 + max(6, 7) + 3 + 5 of the trainer, 11 + 10 * 2 + 13 of the engine.
    assert beside == SharedMemory(107, 107)
    assert turns == SharedMemory(trainers_turn=63 + 13, engines_turn=107 - 37)
    assert turns.peak == 76


def planned(path: Path, *given: str) -> SizingPlan:
    shape = ["parallel.tensor=4", "parallel.sequence=true", "parallel.data=2",
             "parallel.distributed_optimizer=true", "generator.context_tokens=8192",
             "train.microbatch_tokens=8192"]  # fmt: skip
    return make_plan(load_config(path, [*shape, *given]), Hardware())


def test_what_does_not_fit_side_by_side_fits_in_turns(config_path: Path) -> None:  # noqa: F811
    cache = "generator.kv_tokens=200000"
    [problem] = planned(config_path, *SHARED, cache).problems
    assert "on one GPU need" in problem and "or set generator.release_memory=true" in problem
    turns = planned(config_path, *TURNS, cache)
    assert turns.problems == () and turns.shared is not None
    assert (
        turns.shared.peak
        <= find_gpu("h100-80g").memory_bytes
        < turns.trainer.total
        + (turns.engine.weights + turns.engine.reserve + 200000 * turns.engine.kv_per_token)
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("generator.kv_tokens=380000", "an engine and the states of a trainer rank need"),
        ("train.microbatch_tokens=131072", "a trainer rank and what an engine keeps need"),
    ],
)
def test_each_turn_must_fit(config_path: Path, given: str, words: str) -> None:  # noqa: F811
    plan = planned(config_path, *TURNS, "generator.kv_tokens=65536", given)
    assert plan.shared is not None
    size = f"{plan.shared.peak / GIB:.1f} GiB of 79.6"
    assert any(words in text and size in text for text in plan.problems)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((1536, 8960, 28, 12), "its 1.5B model needs {beside} GiB at once"),
        (
            (2048, 11008, 36, 16),
            "it says {beside} GiB at once, and in turns {trainers} GiB while the trainer computes "
            "and {engines} GiB while the engine generates",
        ),
    ],
)
def test_the_page_on_turns_says_what_the_plan_finds(
    tmp_path: Path, sizes: tuple[int, ...], words: str
) -> None:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    # Qwen2.5's.
    shape = dict(zip(names, sizes, strict=True)) | {
        "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2, "vocab_size": 151936,
        "max_position_embeddings": 32768, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    example = [f"model.path={tmp_path}", "prompts.0.path=prompts.jsonl"]
    beside, turns = (
        make_plan(load_config(ROOT / "examples/one_gpu.toml", [*example, *more]), Hardware()).shared
        for more in ([], ["generator.release_memory=true", "weights.kv_cache=recompute"])
    )
    assert beside is not None and turns is not None
    figures = {
        "beside": beside.peak, "trainers": turns.trainers_turn, "engines": turns.engines_turn
    }  # fmt: skip
    text = words.format(**{name: f"{value / GIB:.1f}" for name, value in figures.items()})
    assert text in " ".join((ROOT / "docs/nodes.md").read_text().split())


def test_requests_that_would_time_out_in_the_trainers_turn_are_noted(
    config_path: Path,  # noqa: F811
) -> None:
    notes = {
        limit: [
            text for text in planned(config_path, *TURNS, limit, cache).advice if "wait" in text
        ]
        for cache in ["generator.kv_tokens=65536"]
        for limit in (
            "expert.generator.request_timeout_s=1",
            "expert.generator.request_timeout_s=299",
        )
    }
    assert len(notes["expert.generator.request_timeout_s=1"]) == 1
    assert notes["expert.generator.request_timeout_s=299"] == []
