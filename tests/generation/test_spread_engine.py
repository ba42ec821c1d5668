"""An SGLang server of two ranks as two nodes, which meet over loopback."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from generation import follower
from generation.meeting import call_path
from generation.sglang_nodes import SpreadSGLangEngine
from megatron_rl.protocol.types import Sampling
from megatron_rl.weights.layout.shape import read_shape
from tests.generation.syncer import SliceSyncer, TrainerProcess
from tests.generation.test_engine_contract import make_setup
from tests.generation.tiny_model import logprobs
from tests.ports import free_port

PROMPT = [5, 6, 7, 8, 9]
LIMIT_S = 300


@pytest.mark.exhaustive
@pytest.mark.slow(150)
@pytest.mark.timeout(LIMIT_S + 30)
def test_two_nodes_serve_take_weights_and_end_together(
    models_dir: Path, tmp_path: Path, new_model: LlamaForCausalLM
) -> None:
    """Both nodes take their slices of a weight sync; when one dies, the leader says so."""
    setup = make_setup(
        models_dir, tmp_path / "logs" / "sglang-0.log", tensor_parallel=2, context_tokens=200
    )
    call = call_path(tmp_path, 0)
    trainer = TrainerProcess()

    async def play() -> tuple[list[torch.Tensor], list[torch.Tensor], str]:
        engine = SpreadSGLangEngine(setup, nodes=2, address="127.0.0.1", call=call)
        # On one host the second node's own port must be another one.
        second = replace(setup, port=free_port())
        following = asyncio.ensure_future(follower.follow(second, call, 1, 2))
        try:
            await engine.start()
            syncer = SliceSyncer(engine, trainer, read_shape(models_dir / "old"), "spread")
            await syncer.open()
            await syncer.sync(new_model, 1)
            await syncer.close()
            sampling = Sampling(max_new_tokens=16, temperature=1.0, top_p=1.0, seed=0)
            found = [one async for one in engine.generate(PROMPT, sampling, [0, 1, 2, 3])]
            assert {span.version for one in found for span in one.spans} == {1}
            wanted = [logprobs(new_model, PROMPT, one.token_ids) for one in found]
            failing = asyncio.ensure_future(engine.failed())
            os.kill(_server_of(tmp_path / "logs" / "sglang-0-node-1.log"), signal.SIGKILL)
            reason = await asyncio.wait_for(failing, 30)
            return [torch.tensor(one.logprobs) for one in found], wanted, reason
        finally:
            following.cancel()
            await engine.close()

    try:
        found, wanted, reason = asyncio.run(asyncio.wait_for(play(), LIMIT_S))
    finally:
        trainer.close()
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)
    assert "part 1 of 2" in reason or "SGLang died" in reason


def _server_of(log_path: Path) -> int:
    """Process id of the server whose log this is."""
    for entry in Path("/proc").iterdir():
        try:
            is_ours = entry.name.isdecimal() and os.readlink(entry / "fd" / "1") == str(log_path)
            command = (entry / "cmdline").read_bytes() if is_ours else b""
        except OSError:
            continue
        if b"sglang.launch_server" in command:
            return int(entry.name)
    raise AssertionError(f"no server writes to {log_path}")
