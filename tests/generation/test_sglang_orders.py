"""What the engine asks of SGLang's server around a weight sync, as a server hears it."""

import asyncio
import importlib.util
import re
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from generation.sglang_engine import SGLangEngine
from tests.generation.engine_driver import make_setup


async def heard(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Paths and bodies of a pause and a resume."""
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
    engine = SGLangEngine(make_setup(folder, folder / "engine.log"))
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        engine._http = session
        await engine.pause()
        await engine.resume(3)
    await runner.cleanup()
    return found


def test_a_resume_keeps_the_memory_that_sglang_has(tmp_path: Path) -> None:
    found = asyncio.run(heard(tmp_path))
    path, body = found[-1]
    assert path == "/continue_generation" and body == {"torch_empty_cache": False}


def test_sglang_would_give_it_back_by_itself() -> None:
    spec = importlib.util.find_spec("sglang")
    source = (Path(spec.origin).parent / "srt" / "managers" / "io_struct.py").read_text()
    _, _, rest = source.partition("class ContinueGenerationReqInput")
    fields = re.split(r"^class ", rest, flags=re.MULTILINE)[0]
    assert "torch_empty_cache: bool = True" in fields
