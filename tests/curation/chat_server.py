"""A server that speaks OpenAI's chat completions, well or badly, for tests of our client.

It stands for the party outside: `answers` says what it does with each question. In a thread of its
own, with an event loop of its own; a context manager.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from aiohttp import web

Answers = Callable[[dict], Awaitable[web.StreamResponse | None]]
"""Body of the question -> response; None breaks the connection."""
MODEL = "translator"


def completion(text: str | None, finish_reason: str = "stop") -> web.Response:
    """A well-formed answer."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    return web.json_response({"id": "x", "object": "chat.completion", "choices": [choice]})


class ChatServer:
    """Serves until the end of the block."""

    def __init__(self, answers: Answers, *, port: int = 0) -> None:
        self._answers = answers
        self._port = port
        self.questions: list[dict] = []
        """Bodies, in the order of arrival."""
        self.keys: list[str] = []
        """Authorization headers of them."""
        self.at_once_max = 0
        """Most questions that were open at the same time."""
        self._open = 0
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def url(self) -> str:
        """Of --endpoint."""
        return f"http://127.0.0.1:{self._port}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(20)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        runner = self._loop.run_until_complete(self._start())
        self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self._port)
        await site.start()
        self._port = runner.addresses[0][1]
        return runner

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.questions.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        self._open += 1
        self.at_once_max = max(self.at_once_max, self._open)
        try:
            response = await self._answers(body)
        finally:
            self._open -= 1
        if response is None:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return response
