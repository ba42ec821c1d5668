"""What an environment sees: its prompt, chats with the policy, and the outcome that it returns.

Runs in the environment's process, under any Python from 3.9, so it imports only the standard
library. The host (`host.py`) uses the same types and frames. A frame is four bytes of length,
big-endian, and a JSON object:

| frame | sent by | means |
|---|---|---|
| {"task": {...}} | host, first | the `EpisodeInput` |
| {"say": number, ...} | environment | a `Say`: one turn of the policy |
| {"reply": number, ...} | host | the `Reply` to the `Say` of that number |
| {"limit": number, "reason": ...} | host | the policy reached a limit instead |
| {"judge": number, ...} | environment | a `JudgeInput` |
| {"judged": number, ...} | host | the `Verdict` of the request of that number |
| {"outcome": {...}} | environment, last | the `Outcome` |
| {"to_grade": {...}} | environment, last | the `ToGrade` instead |
| {"failed": kind, "reason": ...} | environment, last | why there is none |
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

MAX_WAITING = 64
"""Turns of one episode at once; the environment's further requests wait."""
_LENGTH = struct.Struct(">I")


@dataclass(frozen=True)
class EpisodeInput:
    """The prompt of an episode. `random` and `numpy.random` are seeded with its seed."""

    id: str
    task: str
    messages: list[dict[str, Any]]
    """Messages {"role", "content"} to begin with."""
    answer: str = ""
    entry: Any = None
    """JSON of the prompt's own, such as a data set's entry."""
    seed: int = 0
    url: str = ""
    """Address of an OpenAI-compatible endpoint to the policy, for programs; "" for none."""
    key: str = ""
    """Key of this episode for the endpoint."""
    turn_timeout_s: float = 0.0
    """Seconds that the environment may take between two of its requests; 0: unknown."""


@dataclass(frozen=True)
class Outcome:
    """End of an episode. reward: finite; reason: a short name to count by, such as "solved"."""

    reward: float
    reason: str
    parts: dict[str, float] = field(default_factory=dict)
    """Parts of the reward by name, for metrics. What they leave of it is "environment"."""
    turn_rewards: list[float] = field(default_factory=list)
    """Reward of each reply, in the order of asking, with the reward as their sum. A reply then
    learns from its own reward and from later ones; without it from the reward of the episode."""
    turn_returns: list[float] = field(default_factory=list)
    """What each reply learns from, in the order of asking, instead of turn_rewards: for replies of
    several sides, such as those of a debate, whose gains are not each other's."""


@dataclass(frozen=True)
class ToGrade:
    """End of an episode of a task with `compare`: the verifier grades the text.

    It grades as it would a completion, by the task's format check and comparison.
    """

    text: str
    """Usually a reply's `text`."""


class Unavailable(Exception):
    """What the environment needs is not there, such as a service: the episode has no outcome.

    It is retried, and earns no reward. A tool that raises this fails the episode; any other
    exception of a tool is a message to the policy.
    """


class JudgeRefused(Exception):
    """The judge cannot answer these messages, because they are too long for it or malformed."""


class PolicyLimit(Exception):
    """The policy reached a limit, of tokens or turns. Uncaught, it ends the episode with reward 0.

    The turn did not happen: its chat is as before the call, messages that wait to be sent included.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Call:
    """A tool call of the policy."""

    name: str
    arguments: dict[str, Any]
    id: str = ""
    """As the policy wrote it, for templates that repeat it; "": it wrote none that they take."""


@dataclass(frozen=True)
class Reply:
    """One turn of the policy."""

    text: str
    """All that the policy wrote."""
    content: str
    """The text without reasoning and tool calls."""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """Malformed tool calls, each with what is wrong: tell the policy."""
    finish_reason: str = "stop"
    """"stop", or "length" for a turn that ended at its limit of tokens."""
    tokens_left: int = 0
    """Tokens that the chat may still grow by."""


@dataclass(frozen=True)
class Say:
    """Request of one turn."""

    chat: int
    """Number of the chat within the episode."""
    parent: int | None
    """Of the first turn of a fork: the chat that it shares the first `parent_turns` turns with."""
    parent_turns: int
    """Replies of the parent, and the messages before each, that the fork shares."""
    messages: list[dict[str, Any]]
    """Messages since the chat's last reply; of a chat's first turn all, or since the fork."""
    tools: list[dict[str, Any]]
    """JSON schemas of the chat's tools; only on the first turn of a chat without parent."""
    max_tokens: int | None


@dataclass(frozen=True)
class JudgeInput:
    """Request to the judge."""

    messages: list[dict[str, Any]]
    verdicts: list[str]
    """Whole replies whose logprobs are wanted; []: the judge writes its reply."""
    max_tokens: int
    temperature: float = 0.0
    """Of a written reply; 0: greedy."""
    draw: int = 0  # Equal requests with another draw may have another reply.


@dataclass(frozen=True)
class Verdict:
    """The judge's answer."""

    logprobs: list[float]
    """Of each verdict."""
    text: str
    """What the judge wrote."""
    refusal: str = ""
    """Why there is no answer; "" if there is one."""


class Chat:
    """A conversation with the policy. `Policy.chat` makes one."""

    def __init__(
        self, policy: Policy, messages: Sequence[Mapping[str, Any]], *,
        tools: Sequence[Mapping[str, Any]] = (), parent: int | None = None, parent_turns: int = 0,
    ) -> None:  # fmt: skip
        self.number = next(policy.chat_numbers)
        self._policy = policy
        self._unsent = [_checked(dict(message)) for message in messages]
        self._tools = [dict(tool) for tool in tools]
        self._parent = parent
        self._parent_turns = parent_turns
        self._turns = 0
        self._is_saying = False

    def add(
        self, role: str, content: str, *, name: str | None = None, call_id: str | None = None
    ) -> None:
        """Add a message, which goes out with the next `say`.

        name, call_id: the tool whose result it is, and the id of its call.
        """
        message = _checked({"role": role, "content": content})
        own = {"name": name, "tool_call_id": call_id}
        self._unsent.append({**message, **{key: value for key, value in own.items() if value}})

    def fork(self) -> Chat:
        """A new chat that shares all turns and messages so far."""
        return Chat(
            self._policy,
            self._unsent,
            tools=self._tools,
            parent=self.number if self._turns else self._parent,
            parent_turns=self._turns or self._parent_turns,
        )

    async def say(self, *, max_tokens: int | None = None) -> Reply:
        """The policy's next turn. Raises PolicyLimit, also where max_tokens is below 1.

        Raises TypeError if max_tokens is not a whole number.

        After a call that was cancelled the chat is of no more use.
        """
        if self._is_saying:
            raise RuntimeError("an earlier say() of this chat has not ended: fork the chat first")
        if max_tokens is not None and type(max_tokens) is not int:
            raise TypeError(f"max_tokens={max_tokens!r}: expected a whole number, or None")
        self._is_saying = True
        sent = len(self._unsent)
        is_first = self._turns == 0
        say = Say(
            self.number,
            self._parent if is_first else None,
            self._parent_turns if is_first else 0,
            self._unsent[:sent],
            self._tools if is_first and self._parent is None else [],
            None if max_tokens is None else max(0, max_tokens),
        )
        try:
            reply = await self._policy.ask(say)
        except PolicyLimit:
            self._is_saying = False
            raise
        self._is_saying = False
        self._turns += 1
        del self._unsent[:sent]
        return reply


class Policy:
    """The model in training, as an environment sees it."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, url: str, key: str
    ) -> None:
        self.url = url
        self.key = key
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count()
        self.chat_numbers = itertools.count()
        self._room = asyncio.Semaphore(MAX_WAITING)
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    def chat(
        self, messages: Sequence[Mapping[str, Any]] = (), *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Chat:
        """A new chat. tools: JSON schemas of functions that the policy may call."""
        return Chat(self, messages, tools=tools)

    async def ask(self, say: Say) -> Reply:
        """Send a request and wait for its reply. Raises PolicyLimit."""
        reply: Reply = await self._request("say", asdict(say))
        return reply

    async def judge(
        self, messages: Sequence[Mapping[str, Any]], verdicts: Sequence[str]
    ) -> list[float]:
        """Logprobs of each verdict, such as "Yes" and "No", as the judge's whole reply.

        Raises JudgeRefused. A judge that fails fails the episode, without a reward.
        """
        if not verdicts:
            raise ValueError("the judge needs at least one verdict")
        return (await self._ask_judge(messages, list(verdicts), 0)).logprobs

    async def judge_reply(
        self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int, temperature: float = 0.0
    ) -> str:
        """What the judge writes; temperature 0: greedily. Raises as `judge`."""
        # The members of a group draw the same, as `random` is seeded.
        draw = random.getrandbits(48) if temperature else 0
        return (await self._ask_judge(messages, [], max_tokens, temperature, draw)).text

    async def _ask_judge(self, messages: Sequence[Mapping[str, Any]], *asked: Any) -> Verdict:
        request = JudgeInput([_checked(dict(one)) for one in messages], *asked)
        verdict: Verdict = await self._request("judge", asdict(request))
        if verdict.refusal:
            raise JudgeRefused(verdict.refusal)
        return verdict

    async def _request(self, kind: str, fields: dict[str, Any]) -> Any:
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        async with self._room:
            self._waiting[number] = future
            try:
                self._writer.write(pack({**fields, kind: number}))
                return await future
            finally:
                del self._waiting[number]

    async def receive(self, max_bytes: int) -> None:
        """Hand replies to those who wait for them, until the host closes."""
        while True:
            message = await read_message(self._reader, max_bytes)
            numbers = (message.get(kind) for kind in ("reply", "limit", "judged"))
            future = self._waiting.get(next(n for n in numbers if n is not None))
            if future is None or future.done():
                continue  # The environment cancelled its call.
            if "limit" in message:
                future.set_exception(PolicyLimit(message["reason"]))
            elif "judged" in message:
                del message["judged"]
                future.set_result(Verdict(**message))
            else:
                del message["reply"]
                calls = [Call(**call) for call in message.pop("calls")]
                future.set_result(Reply(calls=calls, **message))


def is_message(value: Any) -> bool:
    """Whether a value is a message: {"role": text, "content": text, ...}."""
    return isinstance(value, dict) and all(
        isinstance(value.get(name), str) for name in ("role", "content")
    )


def _checked(message: dict[str, Any]) -> dict[str, Any]:
    if not is_message(message):
        text = repr(message)[:200]
        raise TypeError(f"{text} is no message: expected texts under 'role' and 'content'")
    # A lone surrogate, which a tool may decode from what the policy wrote, is no text on the wire.
    content = message["content"].encode(errors="backslashreplace").decode()
    return {**message, "content": content}


def pack(message: Mapping[str, Any]) -> bytes:
    """Frame of a message. Raises TypeError or ValueError for what is no JSON."""
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body


class TooLong(ValueError):
    """A frame is longer than its reader allows."""


async def read_message(reader: asyncio.StreamReader, max_bytes: int) -> dict[str, Any]:
    """Next message. Raises asyncio.IncompleteReadError at the end, TooLong, or ValueError."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > max_bytes:
        raise TooLong(f"a message of {length} bytes, allowed are {max_bytes}")
    message = json.loads(await reader.readexactly(length))
    if not isinstance(message, dict):
        raise ValueError(f"a message that is a {type(message).__name__}, expected an object")
    return message
