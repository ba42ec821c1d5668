"""The vllm engine beyond the contract: what it refuses, the death of its process, temperatures."""

import asyncio
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import LlamaForCausalLM

from generation import vllm_command
from generation.engine import EngineError, load_engine
from megatron_rl.protocol.types import Sampling, VersionSpan
from tests.generation.engine_driver import Driver, make_setup
from tests.generation.tiny_model import EOS_ID, make_model
from tests.generation.vllm_installed import NEEDS_VLLM

PROMPT = [5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"head_dim": 16}, "head_dim = 16"),
    ],
)
def test_a_model_that_vllm_cannot_run_is_refused(
    models_dir: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    values = json.loads((models_dir / "old" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"head_dim": 32} | changes))
    with pytest.raises(EngineError, match=said):
        vllm_command.refuse_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values | {"head_dim": 32}))
    vllm_command.refuse_model(tmp_path)


def test_without_vllm_the_fix_is_named(
    models_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(vllm_command.PYTHON_VARIABLE, str(tmp_path / "bin" / "python"))
    with pytest.raises(EngineError, match="install.sh cpu --with vllm"):
        load_engine("vllm")(make_setup(models_dir, tmp_path / "vllm.log"))


@NEEDS_VLLM
@pytest.mark.slow(60)
@pytest.mark.timeout(300)
def test_temperatures_limits_pauses_and_death(tmp_path: Path) -> None:
    model = make_model(tmp_path / "old", seed=0, head_dim=32)
    loop = asyncio.new_event_loop()
    engine = load_engine("vllm")(make_setup(tmp_path, tmp_path / "vllm.log", context_tokens=128))
    driver = Driver(engine, loop)
    try:
        loop.run_until_complete(engine.start())
        check_temperatures(driver, model)
        check_lengths(driver)
        check_pause(driver, tmp_path / "old")
        check_death(driver)
    finally:
        loop.run_until_complete(engine.close())
        loop.close()


def check_temperatures(driver: Driver, model: LlamaForCausalLM) -> None:
    """Of several in one batch, each has its own; top_p does not change what is told."""
    wanted = [Sampling(12, 0.6), Sampling(12, 1.0), Sampling(12, 0.0), Sampling(12, 1.4, 0.8)]

    async def together() -> list[Any]:
        return await asyncio.gather(*(driver.collect(PROMPT, one, [0, 1]) for one in wanted))

    for sampling, found in zip(wanted, driver.run(together()), strict=True):
        for completion in found:
            ids = torch.tensor([PROMPT + completion.token_ids])
            with torch.no_grad():
                logits = model(ids).logits[0, len(PROMPT) - 1 : -1].double()
            table = torch.log_softmax(logits / (sampling.temperature or 1.0), -1)
            expected = table[torch.arange(len(table)), torch.tensor(completion.token_ids)].float()
            told = torch.tensor(completion.logprobs)
            torch.testing.assert_close(told, expected, atol=1e-5, rtol=0)


def check_lengths(driver: Driver) -> None:
    """The context ends a completion; a prompt that fills it is refused."""
    for completion in driver.run(driver.collect([5] * 120, Sampling(50, 1.0), [0, 1, 2])):
        ended = completion.token_ids[-1] == EOS_ID
        assert len(completion.token_ids) == 8 or ended
    with pytest.raises(EngineError, match="generator.context_tokens=128"):
        driver.run(driver.collect([5] * 128, Sampling(5, 1.0), [0]))


def check_pause(driver: Driver, folder: Path) -> None:
    """A request fails in its time also during a pause, and weights come only during one."""
    engine = driver.engine
    with pytest.raises(EngineError, match="pause first"):
        driver.run(engine.load(folder, 1))
    driver.run(engine.pause())
    setup = engine._setup
    engine._setup = replace(setup, request_timeout_s=0.3)
    with pytest.raises(EngineError, match="expert.generator.request_timeout_s"):
        driver.run(driver.collect(PROMPT, Sampling(4, 1.0), [0]))
    engine._setup = setup
    driver.run(engine.resume(3))
    (completion,) = driver.run(driver.collect(PROMPT, Sampling(4, 0.0), [0]))
    assert completion.spans == [VersionSpan(3, 0, len(completion.token_ids))]


def check_death(driver: Driver) -> None:
    """Who waits learns of it at once."""
    (child,) = psutil.Process().children()

    async def kill() -> tuple[Any, str]:
        endless = asyncio.create_task(driver.collect(PROMPT, Sampling(110, 1.0), list(range(16))))
        await asyncio.sleep(0.02)
        os.kill(child.pid, signal.SIGKILL)
        return (await asyncio.gather(endless, return_exceptions=True))[0], (
            await driver.engine.failed()
        )

    error, reason = driver.run(kill())
    assert isinstance(error, EngineError) and "hung up" in str(error)
    assert reason.startswith("vLLM died: the server ended with exit code -9")
    with pytest.raises(EngineError, match="hung up"):
        driver.run(driver.engine.pause())
