"""An OpenAI-compatible endpoint to the policy, for environments whose loop is a program of its own.

Runs in the generator's process, on its event loop, and listens on loopback. Each episode has a key,
which is valid while the episode runs (`proxy_session.py`).

| task | waits for | ends |
|---|---|---|
| `_complete` for each request | the request's body, and its answer | with the answer |
"""

import asyncio
import logging
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from weakref import WeakSet

from aiohttp import web

from generation.chat_requests import ApiError, read_request
from generation.proxy_session import MAX_REQUESTS, MODEL, Episode, Session, invalid_key
from megatron_rl.protocol.wire import LOOPBACK
from verification.environments.episode import Clock
from verification.environments.settings import EnvironmentSettings

MAX_CONNECTIONS = 4096
"""Or half of the files that this process may open, if that is less."""
STRANGER_TIMEOUT_S = 10.0
"""Time of a new connection to show a valid key."""
IDLE_TIMEOUT_S = 30.0
BODY_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


class Proxy:
    """The endpoint, for all episodes of a generator. `open_proxy` makes one."""

    def __init__(self, settings: EnvironmentSettings, url: str = "") -> None:
        self.url = url
        self._settings = settings
        self._sessions: dict[str, Session] = {}
        self._ignored: set[str] = set()
        self._known: WeakSet[asyncio.Transport] = WeakSet()
        """Connections that showed a valid key."""

    @asynccontextmanager
    async def serve(self, episode: Episode) -> AsyncIterator[Session]:
        """Serve an episode until the block ends."""
        session = Session(episode, Clock(self._settings))
        self._sessions[session.key] = session
        try:
            yield session
        finally:
            del self._sessions[session.key]
            await session.close()

    def application(self) -> web.Application:
        """The server's routes."""
        application = web.Application(
            client_max_size=self._settings.max_message_bytes, middlewares=[_in_api_form]
        )
        application.router.add_post("/v1/chat/completions", self._complete)
        application.router.add_get("/v1/models", self._models)
        return application

    def _session_of(self, request: web.Request) -> Session:
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(key.strip())
        if kind.lower() != "bearer" or session is None:
            raise invalid_key()
        if request.transport is not None:
            self._known.add(request.transport)
            session.connections.add(request.transport)
        return session

    def end_stranger(self, connection: web.RequestHandler) -> None:
        """Close a connection that has shown no valid key."""
        transport = connection.transport
        if transport is not None and transport not in self._known:
            transport.abort()

    async def _models(self, request: web.Request) -> web.Response:
        self._session_of(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megatron-rl"}
        return web.json_response({"object": "list", "data": [model]})

    async def _complete(self, request: web.Request) -> web.Response:
        session = self._session_of(request)
        try:
            with session.admit():
                body = await _read_body(request)
                asked = read_request(body, session.stop)
                self._note_ignored(asked.ignored)
                answer = await session.answer(body, asked, request.headers)
        except (ApiError, web.HTTPException):
            session.refuse()
            raise
        if asked.is_streamed:
            events = answer.events(has_usage_chunk=asked.has_usage_chunk)
            response = web.Response(body=events, content_type="text/event-stream", charset="utf-8")
        else:
            response = web.json_response(answer.body())
        if len(session.connections) > MAX_REQUESTS:
            response.force_close()
        return response

    def _note_ignored(self, names: list[str]) -> None:
        for name in set(names) - self._ignored:
            self._ignored.add(name)
            log.info("requests set %s, which the run's own sampling replaces", name)


async def _read_body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError as error:
        raise ApiError(408, f"the body did not arrive in {BODY_TIMEOUT_S:g} s") from error
    except web.RequestPayloadError as error:
        raise ApiError(400, f"the body cannot be read: {error}"[:500]) from error


@web.middleware
async def _in_api_form(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer errors in the API's form."""
    try:
        return await handler(request)
    except ApiError as error:
        refusal = error
    except web.HTTPException as error:
        refusal = ApiError(error.status, error.reason)
    headers = {"Retry-After": "1"} if refusal.status == 429 else {}
    return web.json_response(refusal.body, status=refusal.status, headers=headers)


@asynccontextmanager
async def open_proxy(settings: EnvironmentSettings) -> AsyncIterator[Proxy]:
    """The endpoint on a free port of loopback, until the block ends."""
    proxy = Proxy(settings)
    runner = web.AppRunner(
        proxy.application(), access_log=None, handle_signals=False,
        shutdown_timeout=CLOSE_TIMEOUT_S, keepalive_timeout=IDLE_TIMEOUT_S,
    )  # fmt: skip
    await runner.setup()
    try:
        serve, loop = runner.server, asyncio.get_running_loop()
        assert serve is not None
        most = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)

        def accept() -> asyncio.Protocol:
            if len(serve.connections) >= most:
                return _Refusal()
            connection = serve()
            loop.call_later(STRANGER_TIMEOUT_S, proxy.end_stranger, connection)
            return connection

        server = await loop.create_server(accept, LOOPBACK[0], 0)
        try:
            proxy.url = f"http://{LOOPBACK[0]}:{server.sockets[0].getsockname()[1]}/v1"
            yield proxy
        finally:
            server.close()
    finally:
        await runner.cleanup()


class _Refusal(asyncio.Protocol):
    """A connection too many: it is closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
