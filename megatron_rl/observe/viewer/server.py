"""Serves the viewer: loopback only, under a random path.

| task | does | waits for |
|---|---|---|
| aiohttp's handlers | query the index, one at a time | a thread that holds the lock |
| `_follow` | indexes new rollouts every REFRESH_S | the same |

A model's texts are sent as JSON and shown as text; the page's policy allows only our script and
style.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from megatron_rl.config.errors import InputError
from megatron_rl.config.thinking import ThinkTags
from megatron_rl.observe.viewer.index import SORTABLE, Filter, Index
from megatron_rl.observe.viewer.tokens import read_record, view_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)
HOST = "127.0.0.1"
REFRESH_S = 5.0
MAX_PAGE = 500
_STATIC = Path(__file__).parent / "static"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Viewer:
    """Request handlers of one run's viewer."""

    def __init__(
        self, index: Index, decoder: "Tokenizer | None", *, name: str, tags: ThinkTags | None = None
    ) -> None:
        """tags: around the thoughts, which are dimmed; None: nothing is."""
        self._index = index
        self._decoder = decoder
        self._name = name
        self._tags = tags and {"open": tags.open, "close": tags.close}
        self._lock = asyncio.Lock()

    def application(self, token: str) -> web.Application:
        """The application; all paths are below /TOKEN/."""
        app = web.Application(middlewares=[_guard(token)])
        app.router.add_get("/{token}/", self._page)
        app.router.add_get("/{token}/api/run", self._run)
        app.router.add_get("/{token}/api/rows", self._rows)
        app.router.add_get("/{token}/api/rollout/{number:\\d{1,15}}", self._rollout)
        app.router.add_get("/{token}/{name:[a-z]+\\.(?:js|css)}", self._file)
        app.cleanup_ctx.append(self._follow)
        return app

    async def _ask(self, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Query the index in a thread, one query at a time."""
        async with self._lock:
            return await asyncio.to_thread(call, *given, **named)

    async def _follow(self, app: web.Application) -> AsyncIterator[None]:
        async def refresh() -> None:
            while True:
                await asyncio.sleep(REFRESH_S)
                try:
                    await self._ask(self._index.refresh)
                except InputError as error:
                    log.warning("later rollouts are not shown: %s", error)
                    return

        task = asyncio.create_task(refresh())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _page(self, request: web.Request) -> web.Response:
        return _static("page.html")

    async def _file(self, request: web.Request) -> web.Response:
        return _static(request.match_info["name"])

    async def _run(self, request: web.Request) -> web.Response:
        facets = await self._ask(self._index.facets)
        return _json(
            {"name": self._name, "facets": facets, "sortable": SORTABLE, "tags": self._tags}
        )

    async def _rows(self, request: web.Request) -> web.Response:
        query = request.query
        try:
            wanted = msgspec.json.decode(query.get("filter", "{}"), type=Filter)
            limit, offset = int(query.get("limit", 50)), int(query.get("offset", 0))
        except ValueError as error:
            raise web.HTTPBadRequest(text=f"filter, limit or offset: {error}") from error
        order = query.get("order", "id")
        if order not in SORTABLE or not 0 < limit <= MAX_PAGE or not 0 <= offset < 2**53:
            raise web.HTTPBadRequest(
                text=f"order one of {', '.join(SORTABLE)}, limit 1 to {MAX_PAGE}, offset from 0"
            )
        is_falling = query.get("falling") == "1"
        total, rows = await self._ask(
            self._index.page, wanted, order=order, is_falling=is_falling, limit=limit, offset=offset
        )
        return _json({"total": total, "rows": rows})

    async def _rollout(self, request: web.Request) -> web.Response:
        number = int(request.match_info["number"])
        place = await self._ask(self._index.place, number)
        if place is None:
            raise web.HTTPNotFound(text=f"there is no rollout {number}")
        record = await asyncio.to_thread(read_record, place)
        group = await self._ask(self._index.group_of, number)
        tokens, why_not = None, ""
        if self._decoder is None:
            why_not = "the model's folder has no tokenizer.json"
        else:
            try:
                tokens = await asyncio.to_thread(view_tokens, place, record, self._decoder)
            except InputError as error:
                why_not = str(error)
        answer = {"record": record, "group": group, "file": place.path.name}
        return _json(answer | {"tokens": tokens, "why_no_tokens": why_not})


def _static(name: str) -> web.Response:
    path = _STATIC / name
    if not path.is_file():
        raise web.HTTPNotFound
    return web.Response(text=path.read_text(), content_type=_TYPES[path.suffix])


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _guard(token: str) -> Any:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer 404 without the token, or for a host name other than loopback."""
        given = request.path.split("/", 2)[1]
        # Against DNS rebinding: a foreign page's name may resolve to this address.
        host = request.host.rpartition(":")[0] or request.host
        is_known = secrets.compare_digest(given.encode(), token.encode())
        if not is_known or host not in (HOST, "localhost"):
            return web.Response(status=404, text="not found", headers=_HEADERS)
        try:
            response = await handler(request)
        except web.HTTPException as error:
            error.headers.update(_HEADERS)
            raise
        response.headers.update(_HEADERS)
        return response

    return check


async def serve(
    viewer: Viewer, port: int, announce: Callable[[str], None], until: asyncio.Event
) -> None:
    """Serve until the event; announce gets the address. Raises OSError for a port in use."""
    token = secrets.token_urlsafe(24)
    runner = web.AppRunner(viewer.application(token), access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, HOST, port)
        await site.start()
        announce(f"http://{HOST}:{runner.addresses[0][1]}/{token}/")
        await until.wait()
    finally:
        await runner.cleanup()
