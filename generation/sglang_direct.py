"""Requests to SGLang's scheduler over a separate socket, without its HTTP server.

Used by `sglang_engine.py` on the CPU, where HTTP costs more than a small model's tokens. The other
end is `direct_requests.py` of `backend/cpu/sglang`. `vllm_engine.py` adds orders to a vLLM process.

Concurrency, all on the caller's event loop: the loop calls `data_received` for the scheduler's
answers, which wakes each `generate` with ended completions. `close` ends all.
"""

import asyncio
import itertools
import shutil
import tempfile
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from generation.engine import Completion, EngineError, EngineSetup
from generation.weight_versions import spans_from_report
from megatron_rl.protocol.engine_requests import (
    Abort,
    Ended,
    Generate,
    ended_decoder,
    names_of,
    pack,
    unpack,
)
from megatron_rl.protocol.types import Sampling

_CHOICE_BYTES = 4


def direct_request(
    setup: EngineSetup, prompt_ids: list[int], sampling: Sampling, *, prefix_key: str
) -> Generate:
    """Request for completions of a prompt; the engine sets their names and seeds."""
    return Generate(
        names=[],
        prompt_ids=prompt_ids,
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=list(sampling.stop),
        stop_ids=list(setup.stop_ids),
        extra_key=prefix_key,
        returns_expert_choices=setup.returns_expert_choices,
        choices_from=sampling.choices_from,
        is_turn=sampling.is_turn,
    )


def read_ended(ended: Ended, index: int, engine: str = "SGLang") -> Completion:
    """The completion with its index. Raises EngineError if it was aborted or is inconsistent.

    engine: name for the error.
    """
    if ended.finish not in ("stop", "length"):
        raise EngineError(f"{engine} ended a completion by {ended.finish}: {ended.message}")
    token_ids, logprobs = ended.token_ids, ended.logprobs
    if len(ended.expert_choices) % _CHOICE_BYTES:
        raise EngineError(f"{engine} sent {len(ended.expert_choices)} bytes of expert choices")
    if len(logprobs) != len(token_ids):
        raise EngineError(f"{engine} sent {len(logprobs)} logprobs for {len(token_ids)} tokens")
    try:
        spans = spans_from_report(ended.spans, len(token_ids))
    except ValueError as error:
        raise EngineError(f"{engine} reports invalid weight versions: {error}") from error
    return Completion(
        index,
        token_ids,
        logprobs,
        spans,
        ended.finish,
        expert_choices=ended.expert_choices,
        cached_tokens=ended.cached_tokens,
        first_token_at=ended.first_token_at,
    )


class _Waiting:
    """Completions of one request that have ended and were not fetched."""

    def __init__(self) -> None:
        self.ended: deque[Ended] = deque()
        self.has_ended = asyncio.Event()


class _Refusal(asyncio.Protocol):
    """Closes a second connection; the first one stays."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


class DirectRequests(asyncio.Protocol):
    """The generator's end of the socket: it listens, and one scheduler connects."""

    peer = "SGLang's scheduler"
    decoder = ended_decoder

    def __init__(self) -> None:
        self._folder = Path()
        self._server: asyncio.Server | None = None
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._waiting: dict[str, _Waiting] = {}
        """Name of a completion that has not ended -> its request."""
        self._numbers = itertools.count()
        self._lost = ""
        """Why the connection is lost; "": it is not."""

    @property
    def path(self) -> Path:
        """Path of the socket."""
        return self._folder / "requests"

    @property
    def is_connected(self) -> bool:
        """Whether a scheduler has connected."""
        return self._transport is not None

    async def open(self) -> None:
        """Listen on a socket that only this user can open."""
        # Not in the run's folder: the path of a socket has at most 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="megatron-rl-"))
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._protocol, str(self.path))

    def _protocol(self) -> asyncio.Protocol:
        return self if self._transport is None else _Refusal()

    async def generate(
        self, request: Generate, indices: list[int], deadline: float
    ) -> AsyncIterator[tuple[int, Ended]]:
        """Yield (index, completion) as each ends; closing it early stops the others.

        request: this method sets its names. deadline: event loop time. Raises EngineError.
        """
        names = names_of(next(self._numbers), len(indices), is_turn=request.is_turn)
        running = dict(zip(names, indices, strict=True))
        waiting = _Waiting()
        self._waiting |= dict.fromkeys(running, waiting)
        try:
            self._send(msgspec.structs.replace(request, names=list(running)))
            while running:
                async with asyncio.timeout_at(deadline):
                    await waiting.has_ended.wait()
                waiting.has_ended.clear()
                if self._lost:
                    raise EngineError(self._lost)
                while waiting.ended:
                    ended = waiting.ended.popleft()
                    yield running.pop(ended.name), ended
        finally:
            for name in running:
                self._waiting.pop(name, None)
            if running and not self._lost:
                self._send(Abort(list(running)))

    def _send(self, message: msgspec.Struct) -> None:
        if self._transport is None:
            raise EngineError(self._lost or f"{self.peer} has not connected")
        self._transport.write(pack(message))

    # --- called by the event loop ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note that the scheduler has connected."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Hand out the ended completions."""
        self._received += data
        for message in unpack(self._received, self.decoder):
            self._take(message)

    def _take(self, batch: list[Ended]) -> None:
        for ended in batch:
            # None: the caller gave it up.
            waiting = self._waiting.pop(ended.name, None)
            if waiting is not None:
                waiting.ended.append(ended)
                waiting.has_ended.set()

    def connection_lost(self, error: Exception | None) -> None:
        """Wake all waiting requests: no answer will come."""
        self._lost = f"{self.peer} hung up: {error or 'it closed its socket'}"
        self._transport = None
        for waiting in self._waiting.values():
            waiting.has_ended.set()

    async def close(self) -> None:
        """Close the connection and remove the socket."""
        if self._transport is not None:
            self._transport.abort()
        if self._server is not None:
            self._server.close()
            shutil.rmtree(self._folder, ignore_errors=True)
