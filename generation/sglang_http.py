"""Requests to SGLang's HTTP server: completions, the events of their answers, and other calls.

Used by `sglang_engine.py`. Completions use it unless the scheduler takes them directly.
`HttpRequests.generate` has one task per completion, which ends with it.
"""

import asyncio
import itertools
import json
import logging
import time
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

import aiohttp

from generation.engine import EngineError, EngineTimeout, RequestRefused
from megatron_rl.protocol.engine_requests import Ended, Generate, names_of

log = logging.getLogger(__name__)

LOAD_S = 5.0
ABORT_S = 5.0
_EVENT_END = b"\n\n"


class HttpRequests:
    """Completions over HTTP; `generate` is that of `DirectRequests`."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._numbers = itertools.count()

    async def generate(
        self, request: Generate, indices: list[int], deadline: float
    ) -> AsyncIterator[tuple[int, Ended]]:
        """Yield (index, completion) as each ends; closing it early stops the others.

        The other requests follow the first token of the first one: their prompt is then in the
        prefix cache. deadline: event loop time. Raises EngineError and TimeoutError.
        """
        names = names_of(next(self._numbers), len(indices))
        running = dict(zip(names, indices, strict=True))
        is_cached = asyncio.Event()
        seeds = request.seeds or [None] * len(names)
        tasks = [
            asyncio.create_task(self._complete(body, is_cached, is_first=not place))
            for place, body in enumerate(map(partial(request_body, request), names, seeds))
        ]
        loop, pending = asyncio.get_running_loop(), set(tasks)
        try:
            while pending:
                ended, pending = await asyncio.wait(
                    pending,
                    timeout=max(0.0, deadline - loop.time()),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not ended:
                    raise TimeoutError
                for task in ended:
                    completion = task.result()
                    yield running.pop(completion.name), completion
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*map(self._abort, running))

    async def _complete(
        self, body: dict[str, Any], is_cached: asyncio.Event, *, is_first: bool
    ) -> Ended:
        if not is_first:
            await is_cached.wait()
        first_token_at, ended = -1.0, None
        async with aclosing(self._events(body)) as events:
            # To the end of the answer: aiohttp closes a connection whose answer was left unread.
            async for event in events:
                is_cached.set()
                if event["meta_info"]["completion_tokens"] == 1 and first_token_at < 0:
                    first_token_at = time.monotonic()
                if event["meta_info"]["finish_reason"] is not None:
                    ended = read_last_event(event, body["rid"], first_token_at)
        if ended is None:
            raise EngineError("SGLang closed its answer to /generate before the completion ended")
        return ended

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Server-sent events of one /generate, parsed. Raises EngineError."""
        # `generate` keeps the deadline.
        timeout = aiohttp.ClientTimeout(total=None)
        try:
            async with self._session.post("/generate", json=body, timeout=timeout) as response:
                if response.status != 200:
                    raise EngineError(f"/generate: {response.status} {await response.text()}")
                arriving = EventStream()
                # Not by line: aiohttp refuses lines longer than 64 KiB.
                async for chunk in response.content.iter_any():
                    for event in arriving.feed(chunk):
                        if event != b"data: [DONE]":
                            yield read_event(event)
        except aiohttp.ClientError as error:
            raise EngineError(f"/generate: {type(error).__name__}: {error}") from error

    async def _abort(self, name: str) -> None:
        """Stop an unread completion: SGLang notices a closed connection only seconds later."""
        try:
            await post(self._session, "/abort_request", {"rid": name}, ABORT_S)
        except EngineError as error:
            log.warning("SGLang may continue with a cancelled request: %s", error)


def request_body(request: Generate, name: str, seed: int | None = None) -> dict[str, Any]:
    """Body of the /generate request of one completion."""
    params: dict[str, Any] = {
        "max_new_tokens": request.max_new_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k or -1,
        "min_p": request.min_p,
    }
    if request.stop_ids:
        params["stop_token_ids"] = request.stop_ids
    if request.stop:
        params["stop"] = request.stop
    if seed is not None:
        params["sampling_seed"] = seed
    return {
        "rid": name,
        "input_ids": request.prompt_ids,
        "sampling_params": params,
        "return_logprob": True,
        "return_routed_experts": request.returns_expert_choices,
        "routed_experts_start_len": request.choices_from,
        "stream": True,
        "extra_key": request.extra_key,
    }


def read_event(event: bytes) -> dict[str, Any]:
    """Body of one server-sent event. Raises EngineError when it reports an error."""
    body = json.loads(event.removeprefix(b"data: "))
    if "error" in body:
        raise EngineError(f"/generate: {body['error'].get('message', body['error'])}")
    return body


def read_last_event(event: dict[str, Any], name: str, first_token_at: float) -> Ended:
    """The completion that an event ends."""
    meta = event["meta_info"]
    finish = meta["finish_reason"]
    return Ended(
        name,
        event.get("output_ids", []),
        [entry[0] for entry in meta.get("output_token_logprobs", [])],
        [(s["version"], s["start"], s["end"]) for s in meta.get("weight_versions", [])],
        finish["type"],
        str(finish.get("message", "")),
        meta.get("cached_tokens", 0),
        # Present if asked for: [prompt + completion - 1, layers, experts of a token] int32.
        b64decode(meta.get("routed_experts", "")),
        first_token_at,
    )


class EventStream:
    """Collects chunks of bytes until a server-sent event is complete, and joins them once.

    An event with expert choices has tens of megabytes in chunks of some kilobytes. Appending each
    chunk to the earlier bytes would copy them all every time.
    """

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        """Chunks of the incomplete event."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the events that end in this chunk, without their ends; chunk: not empty."""
        # The two characters of an end may come in two chunks: the first one is moved.
        if self._chunks and self._chunks[-1].endswith(_EVENT_END[:1]):
            self._chunks[-1] = self._chunks[-1][:-1]
            chunk = _EVENT_END[:1] + chunk
        first, *rest = chunk.split(_EVENT_END)
        self._chunks.append(first)
        if not rest:
            return []
        events = [b"".join(self._chunks), *rest[:-1]]
        self._chunks = [rest[-1]] if rest[-1] else []
        return events


async def post(
    session: aiohttp.ClientSession, path: str, body: dict[str, Any], timeout_s: float
) -> dict[str, Any]:
    """POST; the answer as `check_answer` reads it. Raises EngineTimeout, and what that raises."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.post(path, json=body, timeout=timeout) as response:
            return check_answer(path, response.status, await response.text())
    except TimeoutError as error:
        raise EngineTimeout(f"{path}: no answer in {timeout_s:.0f} s") from error
    except aiohttp.ClientError as error:
        raise EngineError(f"{path}: {type(error).__name__}: {error}") from error


def check_answer(path: str, status: int, text: str) -> dict[str, Any]:
    """The JSON object of an answer; {} for another body, as some routes answer in plain text.

    Raises RequestRefused for status 400, EngineError for another bad one and for success=false.
    """
    if status != 200:
        kind = RequestRefused if status == 400 else EngineError
        raise kind(f"{path}: {status} {text}")
    try:
        body = json.loads(text)
    except json.JSONDecodeError:
        return {}
    if not isinstance(body, dict):
        return {}
    if body.get("success") is False:
        raise EngineError(f"{path}: {body.get('message', text)}")
    return body


async def load_time(session: aiohttp.ClientSession) -> float | None:
    """When the scheduler last reported its load, every few passes. None: no answer."""
    timeout = aiohttp.ClientTimeout(total=LOAD_S)
    try:
        async with session.get("/v1/loads?include=core", timeout=timeout) as response:
            body = await response.json()
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None
    loads = body.get("loads") or [{}]
    return loads[0].get("timestamp")
