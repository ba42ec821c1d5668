"""What the engine asks of SGLang's server around a weight sync, as a server hears it."""

import asyncio
import importlib.util
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from generation.sglang_engine import SGLangEngine
from megatron_rl.protocol.types import Receive
from tests.generation.engine_driver import make_setup

ORDER = Receive("127.0.0.1", 1, "syncer", "generator-0", 0, "gloo", 1, 5, 1.0)


async def heard(
    folder: Path, *, recomputes: bool = False, has_slices: bool = True
) -> list[tuple[str, dict[str, Any]]]:
    """Paths and bodies of a weight sync, or of a pause without one."""
    found: list[tuple[str, dict[str, Any]]] = []

    async def answer(request: web.Request) -> web.Response:
        found.append((request.path, await request.json()))
        return web.json_response({"success": True, "message": ""})

    app = web.Application()
    app.router.add_post("/{path}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    setup = make_setup(folder, folder / "engine.log", recomputes_kv_cache=recomputes)
    engine = SGLangEngine(setup)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        engine._http = session
        await engine.pause()
        if has_slices:
            await engine.receive(ORDER)
        await engine.resume(3)
    await runner.cleanup()
    return found


def test_a_resume_keeps_the_memory_that_sglang_has(tmp_path: Path) -> None:
    found = asyncio.run(heard(tmp_path))
    path, body = found[-1]
    assert path == "/continue_generation" and body == {"torch_empty_cache": False}


@pytest.mark.parametrize("recomputes", [True, False])
def test_the_last_call_of_a_weight_sync_empties_the_prefix_cache_and_no_other_memory(
    tmp_path: Path, recomputes: bool
) -> None:
    found = asyncio.run(heard(tmp_path, recomputes=recomputes))
    assert [path for path, _ in found] == [
        "/pause_generation", "/begin_weight_update", "/update_weights_from_tensor",
        "/update_weights_from_tensor", "/end_weight_update", "/continue_generation",
    ]  # fmt: skip
    calls = [body for path, body in found if path == "/update_weights_from_tensor"]
    assert [call["flush_cache"] for call in calls] == [False, recomputes]
    assert [call["torch_empty_cache"] for call in calls] == [False, False]


@pytest.mark.parametrize("recomputes", [True, False])
def test_a_pause_without_slices_empties_the_prefix_cache_by_itself(
    tmp_path: Path, recomputes: bool
) -> None:
    found = asyncio.run(heard(tmp_path, recomputes=recomputes, has_slices=False))
    paths = [path for path, _ in found]
    assert ("/flush_cache" in paths) is recomputes
    assert "/update_weights_from_tensor" not in paths
    assert paths[-1] == "/continue_generation"


def test_sglang_would_give_it_back_by_itself() -> None:
    spec = importlib.util.find_spec("sglang")
    source = (Path(spec.origin).parent / "srt" / "managers" / "io_struct.py").read_text()
    _, _, rest = source.partition("class ContinueGenerationReqInput")
    fields = re.split(r"^class ", rest, flags=re.MULTILINE)[0]
    assert "torch_empty_cache: bool = True" in fields


def test_sglang_leaves_cached_memory_to_the_caller_of_an_update_alone() -> None:
    """What a flush by /flush_cache gives back, look again when this fails."""
    srt = Path(importlib.util.find_spec("sglang").origin).parent / "srt" / "managers"
    assert "def flush_cache(self, empty_cache: bool = True)" in (srt / "scheduler.py").read_text()
    updater = (srt / "scheduler_components" / "weight_updater.py").read_text()
    assert "empty_cache=recv_req.torch_empty_cache" in updater
