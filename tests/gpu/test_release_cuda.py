"""SGLang on CUDA gives its memory back and takes it again: rows of docs/gpu-evidence.md.

What its requests go through is in tests/generation/test_release_memory.py, on any host.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from generation.engine import Completion, load_engine
from generation.sglang_engine import SGLangEngine
from megatron_rl.backend.device import Backend
from megatron_rl.protocol.types import Sampling
from megatron_rl.weights.layout.shape import read_shape
from tests.generation.engine_driver import Driver, make_setup
from tests.generation.precision import assert_near, load_reference
from tests.generation.syncer import SliceSyncer, TrainerProcess
from tests.generation.tiny_model import EOS_ID, logprobs, make_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]
LAYERS, HIDDEN, HEADS, KV_TOKENS, CONTEXT = 8, 512, 8, 262_144, 4096
KV_BYTES = KV_TOKENS * 2 * LAYERS * HIDDEN * 2
"""Of the cache, 4 GiB: heads are not shared, and an element has two bytes."""
PROMPT = [5 + i % 60 for i in range(50)]
SHARE = 0.9
"""Of weights and cache that must come back at least: the saver keeps pages of 2 MiB whole."""


def free_bytes() -> int:
    return torch.cuda.mem_get_info(0)[0]


async def turn(
    driver: Driver,
    syncer: SliceSyncer,
    model: LlamaForCausalLM,
    note: Callable[[str, float], None],
) -> list[Completion]:
    """Completions that a turn of the trainer met; notes free bytes and seconds."""
    engine = driver.engine
    # Kernels that are compiled at first use would take the time in which completions run.
    await driver.collect(PROMPT, Sampling(8, 0.0), [0, 1])
    asked = asyncio.create_task(driver.collect(PROMPT, Sampling(3000, 0.0), [0, 1]))
    await asyncio.sleep(0.2)
    note("before", free_bytes())
    started = time.monotonic()
    await engine.release()
    note("release_s", time.monotonic() - started)
    note("released", free_bytes())
    # What was given back is there for others.
    torch.zeros(KV_BYTES // 2, dtype=torch.uint8, device="cuda").fill_(1)
    torch.cuda.empty_cache()
    assert not asked.done()
    started = time.monotonic()
    await engine.reclaim()
    note("reclaim_s", time.monotonic() - started)
    note("reclaimed", free_bytes())
    await syncer.sync(model, engine.version + 1)
    return await asked


def test_an_engines_memory_falls_and_comes_back(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    sizes = {
        "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "initializer_range": 0.05,
        "max_position_embeddings": CONTEXT,
    }  # fmt: skip
    model = make_model(tmp_path / "old", seed=0, **sizes)
    with torch.no_grad():
        # The end of a sequence is never the likeliest token.
        model.lm_head.weight[EOS_ID] = 0
    model.save_pretrained(tmp_path / "old")
    weights = 2 * sum(parameter.numel() for parameter in model.parameters())
    setup = make_setup(
        tmp_path, tmp_path / "sglang.log", kv_tokens=KV_TOKENS, context_tokens=CONTEXT,
        recomputes_kv_cache=True, releases_memory=True, may_exceed_model=True,
    )  # fmt: skip
    loop, found = asyncio.new_event_loop(), list[dict[str, float]]()
    engine = load_engine("sglang")(setup)
    assert isinstance(engine, SGLangEngine)
    driver = Driver(engine, loop)
    trainer = TrainerProcess()
    syncer = SliceSyncer(engine, trainer, read_shape(tmp_path / "old"), "released")
    try:
        loop.run_until_complete(engine.start())
        driver.run(syncer.open())
        # Twice: the second time pages are mapped that were given back before.
        for _ in range(2):
            figures: dict[str, float] = {}
            completions = driver.run(turn(driver, syncer, model, figures.__setitem__))
            found.append(figures)
            for completion in completions:
                assert len(completion.spans) == 2, "it was not in flight"
                expected = logprobs(load_reference(tmp_path / "old"), PROMPT, completion.token_ids)
                assert_near(completion.logprobs, expected)
    finally:
        loop.run_until_complete(engine.close())
        loop.close()
        trainer.close()
    last = found[-1]
    text = f"{(last['released'] - last['before']) / 2**30:.1f} GiB given back in "
    text += f"{last['release_s']:.2f} s, taken again in {last['reclaim_s']:.2f} s"
    record_property("figure", text)
    for figures in found:
        given_back = figures["released"] - figures["before"]
        assert given_back > SHARE * (weights + KV_BYTES)
        assert figures["released"] - figures["reclaimed"] > SHARE * (weights + KV_BYTES)


def test_a_trainer_rank_gives_back_what_it_has_freed() -> None:
    backend = Backend(torch.device("cuda", 0), "nccl", "local")
    freed = torch.zeros(KV_BYTES // 4, dtype=torch.uint8, device="cuda")
    del freed
    before = free_bytes()
    backend.free_cache()
    assert free_bytes() - before >= KV_BYTES // 4
