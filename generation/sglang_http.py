"""What is said to SGLang's HTTP server: completions, the events of their answers, and other calls.

Used by `sglang_engine.py`; for completions where requests do not go to the scheduler directly.
"""

import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from generation.engine import EngineError, EngineSetup, EngineTimeout
from generation.event_stream import EventStream
from generation.sglang_answers import check_answer, read_event
from megatron_rl.protocol.types import Sampling

LOAD_S = 5.0


def request_body(
    setup: EngineSetup, prompt_ids: list[int], sampling: Sampling, *, n: int, prefix_key: str
) -> dict[str, Any]:
    """Body of one /generate for n completions."""
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "n": n,
    }
    if setup.stop_ids:
        params["stop_token_ids"] = list(setup.stop_ids)
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    return {
        "input_ids": prompt_ids,
        "sampling_params": params,
        "return_logprob": True,
        "return_routed_experts": setup.returns_expert_choices,
        "stream": True,
        "extra_key": prefix_key,
    }


async def stream_events(
    session: aiohttp.ClientSession, body: dict[str, Any], deadline: float
) -> AsyncIterator[dict[str, Any]]:
    """Server-sent events of one /generate, parsed. Raises EngineError, and TimeoutError.

    deadline: monotonic seconds.
    """
    # Not 0, which means no limit.
    timeout = aiohttp.ClientTimeout(total=max(0.001, deadline - time.monotonic()))
    try:
        async with session.post("/generate", json=body, timeout=timeout) as response:
            if response.status != 200:
                raise EngineError(f"/generate: {response.status} {await response.text()}")
            arriving = EventStream()
            # Not by line: aiohttp refuses lines longer than 64 KiB.
            async for chunk in response.content.iter_any():
                for event in arriving.feed(chunk):
                    if event != b"data: [DONE]":
                        yield read_event(event)
    except aiohttp.ClientError as error:
        # Its timeouts are TimeoutErrors too, and more than that.
        if isinstance(error, TimeoutError):
            raise
        raise EngineError(f"/generate: {type(error).__name__}: {error}") from error


async def post(
    session: aiohttp.ClientSession, path: str, body: dict[str, Any], timeout_s: float
) -> None:
    """POST; EngineError for no answer in time, a bad status, or success=false."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.post(path, json=body, timeout=timeout) as response:
            check_answer(path, response.status, await response.text())
    except TimeoutError as error:
        raise EngineTimeout(f"{path}: no answer in {timeout_s:.0f} s") from error
    except aiohttp.ClientError as error:
        raise EngineError(f"{path}: {type(error).__name__}: {error}") from error


async def load_time(session: aiohttp.ClientSession) -> float | None:
    """When the scheduler told its load last: it does with every few passes. None: no answer."""
    timeout = aiohttp.ClientTimeout(total=LOAD_S)
    try:
        async with session.get("/v1/loads?include=core", timeout=timeout) as response:
            body = await response.json()
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None
    loads = body.get("loads") or [{}]
    return loads[0].get("timestamp")
