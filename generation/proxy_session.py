"""The requests of one episode to the policy: matching of histories, retries, limits.

Used by the generator's proxy (`proxy.py`), on its event loop. The conversation tree of the episode
keeps the token ids; a session finds the turn that a request continues. A history whose messages up
to its last reply are known continues that reply. Any other history begins a conversation.

| task | waits for | ends |
|---|---|---|
| `Session._answer` for each reply | the engine, or room | with the reply, or with the episode |

An answer outlives its connection, because a client that lost the connection asks again.
"""

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

from generation.chat_requests import Answer, ApiError, ChatRequest, Message
from generation.conversation import OUT_OF_TOKENS, OutOfTokens, Turn
from generation.histories import Histories, Place
from generation.tasks import end_with_first
from megatron_rl.protocol.call_forms import ToolCall
from megatron_rl.protocol.chat_template import RenderError, Tool
from megatron_rl.protocol.chat_template import Turn as GivenMessage
from megatron_rl.protocol.tool_calls import ParsedReply
from verification.environments.episode import Clock
from verification.environments.policy import Outcome, ToGrade
from verification.environments.settings import EnvironmentFailed

MAX_REQUESTS = 64
"""Requests of one key at once, and connections that wait for another request of it."""
REQUESTS_PER_S = 100
"""Requests of one key, on average."""
BURST_REQUESTS = 200
MAX_REFUSED = 1000
"""Refused requests of one key, after which its environment is given up."""
MAX_ANSWERS = 64
"""Answers of one key that are kept for clients that ask again."""
REQUEST_TIMEOUT_S = 600.0
"""Time of a reply, with the wait for room. The openai client gives up at the same time."""
MAX_CHARS_PER_TOKEN = 64
"""Longer requests are refused unread: texts have fewer characters a token."""
CLOSE_TIMEOUT_S = 5.0
MODEL = "policy"
"""Name of the policy; requests may use any other."""

log = logging.getLogger(__name__)


class Episode(Protocol):
    """The conversations of an episode; `Episode` of `episodes.py`, which imports this file."""

    histories: Histories

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a reply."""

    def place(
        self,
        parent: Turn | None,
        earlier: Iterable[GivenMessage],
        messages: list[GivenMessage],
        tools: list[Tool],
    ) -> Place:
        """As `Histories.place`, for the episode's task. Raises RenderError, OutOfTokens."""

    async def take_turn(self, place: Place, max_tokens: int | None) -> Turn:
        """A turn with its reply. Raises OutOfTokens, EngineError."""


class _Reply(NamedTuple):
    """A reply, and its parts as they were returned."""

    turn: Turn
    found: ParsedReply
    faults: list[GivenMessage]
    """Of the calls that were not returned, for the policy: they precede the client's results."""


class Session:
    """Requests of one episode."""

    def __init__(self, episode: Episode, clock: Clock) -> None:
        self.key = secrets.token_urlsafe(32)
        self.clock = clock
        """Stands still while the policy replies."""
        self.stop = episode.stop
        """Strings that end a reply."""
        self.refused = 0
        self.connections: WeakSet[asyncio.Transport] = WeakSet()
        self._episode = episode
        self._replies: dict[bytes, list[_Reply]] = {}
        """By the history that each ends."""
        self._answers: OrderedDict[bytes, asyncio.Task[Answer]] = OrderedDict()
        """By what names a request that is sent again."""
        self._tasks: set[asyncio.Task[Answer]] = set()
        self._failed: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._running = self._called = 0
        self._is_closed = False
        self._allowance, self._allowed_at = float(BURST_REQUESTS), time.monotonic()
        self._is_out_of_tokens = False

    async def watch(self, running: Coroutine[Any, Any, Outcome | ToGrade]) -> Outcome | ToGrade:
        """The outcome of the episode. Raises what `running` raises, and what its requests meet.

        An environment that fails because there is no room for a reply has that outcome.
        """
        try:
            outcome: Outcome | ToGrade = await end_with_first(running, _wait(self._failed))
        except EnvironmentFailed as error:
            if error.kind == "exception" and self._is_out_of_tokens:
                return Outcome(0.0, OUT_OF_TOKENS)
            raise
        return outcome

    async def close(self) -> None:
        """End all answers."""
        self._is_closed = True
        self._failed.cancel()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)
        if self.refused:
            log.warning("%d requests of an environment's program were refused", self.refused)

    def refuse(self) -> None:
        """Count a refused request."""
        self.refused += 1
        if self.refused > MAX_REFUSED and not self._failed.done():
            text = f"it went on after {MAX_REFUSED} of its requests were refused"
            self._failed.set_exception(EnvironmentFailed(text, "flood"))

    @contextmanager
    def admit(self) -> Iterator[None]:
        """The time of one request. Raises ApiError."""
        now = time.monotonic()
        more = (now - self._allowed_at) * REQUESTS_PER_S
        self._allowance, self._allowed_at = min(BURST_REQUESTS, self._allowance + more), now
        if self._allowance < 1 or self._running >= MAX_REQUESTS:
            raise ApiError(
                429,
                f"too many requests: {MAX_REQUESTS} at once and {REQUESTS_PER_S} a second may be",
                code="rate_limit_exceeded",
            )
        self._allowance -= 1
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    async def answer(self, body: bytes, asked: ChatRequest, headers: Mapping[str, str]) -> Answer:
        """The answer to a request: the earlier one if it is sent again. Raises ApiError."""
        named = headers.get("Idempotency-Key", "")
        key = sha256(named.encode(errors="replace") + b"\0" + body).digest()
        is_again = named or headers.get("x-stainless-retry-count", "0") != "0"
        task = self._answers.get(key) if is_again else None
        if task is None:
            if self._is_closed:  # while the body arrived
                raise invalid_key()
            task = asyncio.create_task(self._answer(asked))
            self._tasks.add(task)
            task.add_done_callback(self._note_end)
            self._answers[key] = task
            self._answers.move_to_end(key)
            while len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)
        await asyncio.wait({task})
        if task.cancelled():
            raise invalid_key()
        error = task.exception()
        if error is None:
            return task.result()
        if self._answers.get(key) is task:
            del self._answers[key]  # A refusal may not hold for the next time.
        if isinstance(error, ApiError):
            raise error
        raise ApiError(500, "the engine failed; the episode ends")

    def _note_end(self, task: asyncio.Task[Answer]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ApiError) and not self._failed.done():
            self._failed.set_exception(error)

    async def _answer(self, asked: ChatRequest) -> Answer:
        """One turn of the policy. Raises ApiError, EngineError."""
        self.clock.stop()
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                turn = await self._episode.take_turn(self._place(asked), asked.max_tokens)
        except OutOfTokens as error:
            self._is_out_of_tokens = True
            raise ApiError(400, str(error), code="context_length_exceeded") from error
        except RenderError as error:
            raise ApiError(400, str(error), param="messages") from error
        except TimeoutError as error:
            raise ApiError(504, f"no reply in {REQUEST_TIMEOUT_S:g} s") from error
        finally:
            self.clock.start()
        self._is_out_of_tokens = False
        return self._note(asked, turn, self._episode.histories.read(turn, asked.tools))

    def _place(self, asked: ChatRequest) -> Place:
        """Where the turn of a request begins. Raises RenderError, OutOfTokens.

        It continues a reply if all up to the last reply of the history is as it was.
        """
        histories = self._episode.histories
        most = MAX_CHARS_PER_TOKEN * histories.renderer.context_tokens
        if sum(len(message.content) for message in asked.messages) > most:
            raise OutOfTokens(f"the messages have more than {most} characters")
        if asked.tools and (refusal := histories.parser.refusal):
            raise RenderError(refusal)
        found, end = self._find(asked, asked.replied), len(asked.messages)
        if found is None:
            return self._episode.place(None, [], self._given(asked, 0, end), asked.tools)
        rest = self._given(asked, asked.replied, end)
        if histories.is_rendered:
            earlier = self._given(asked, 0, asked.replied)
            return self._episode.place(found.turn, earlier, rest, asked.tools)
        if rest and rest[0]["role"] == "tool":
            rest = [*found.faults, *rest]
        return self._episode.place(found.turn, [], rest, asked.tools)

    def _given(self, asked: ChatRequest, begin: int, end: int) -> list[GivenMessage]:
        """Messages for the chat template. Raises RenderError.

        Where it renders replies again, they are the policy's, with the faults behind them.
        """
        histories, turns = self._episode.histories, []
        for number in range(begin, end):
            message = asked.messages[number]
            if histories.is_rendered and message.role == "assistant":
                # The thoughts of a reply, which programs do not repeat.
                if known := self._find(asked, number + 1):
                    turns.append(histories.message(known.turn, known.found))
                    continue
            if histories.is_rendered and message.role == "tool":
                if answered := self._find(asked, number):
                    turns += answered.faults
            turns.append(message.turn(histories.call_form))
        return turns

    def _find(self, asked: ChatRequest, end: int) -> _Reply | None:
        """The reply that ends this number of messages; None: they end otherwise."""
        known = self._replies.get(asked.keys[end], ())
        # Replies may be alike: one without a successor comes first.
        return next((one for one in known if not one.turn.successors), known[-1] if known else None)

    def _note(self, asked: ChatRequest, turn: Turn, found: ParsedReply) -> Answer:
        """The answer of a turn, by which later requests find it."""
        calls, faults, content = found.calls, found.faults, found.content
        if asked.max_calls is not None:
            refused = [f"{one.name}: call one tool at a time" for one in calls[asked.max_calls :]]
            calls, faults = calls[: asked.max_calls], [*faults, *refused]
        if faults and not calls:
            # Nothing goes unseen: the client has no call to answer.
            content = self._episode.histories.renderer.decode(turn.reply_ids)
        made = tuple(ToolCall(one.name, one.arguments, one.id or self._new_id()) for one in calls)
        message = Message("assistant", content, made)
        key = message.key(asked.keys[-1])
        returned = found._replace(calls=list(made), faults=faults, content=content)
        # With their ids: a template that writes these has to write the same each time.
        told: list[GivenMessage] = [
            {"role": "tool", "content": f"Error: {fault}", "tool_call_id": self._new_id()}
            for fault in faults
        ]
        self._replies.setdefault(key, []).append(_Reply(turn, returned, told))
        assert turn.reply is not None
        return Answer(
            message, found.reasoning, "tool_calls" if made else turn.reply.finish_reason,
            len(turn.prompt), len(turn.reply_ids), f"chatcmpl-{secrets.token_hex(8)}",
            asked.model or MODEL, int(time.time()),
        )  # fmt: skip

    def _new_id(self) -> str:
        """An id of a tool call; Mistral's templates want nine characters."""
        self._called += 1
        return f"call{self._called:05d}"


async def _wait(future: asyncio.Future[Outcome]) -> Outcome:
    return await future


def invalid_key() -> ApiError:
    """The refusal of a key that opens nothing."""
    text = "the key is of no running episode: a key is valid while its episode runs"
    return ApiError(401, text, code="invalid_api_key")
