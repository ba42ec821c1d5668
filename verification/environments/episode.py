"""The host's end of one episode: turns of the policy, the environment's clock, its processes' end.

Runs on the generator's event loop. `EpisodeProcess.run` is one task, which waits for:

| event | does |
|---|---|
| a message of the environment | starts `answer` or `judge`, or takes the outcome |
| an `answer`, a verdict | sends it |
| the environment's own time, while none of them runs | gives the environment up |
| cancellation | the same |

Whatever ends it, `end` has the keeper kill all processes of the episode, and waits for that.
"""

import asyncio
import json
import logging
import os
import re
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from typing import Any

from verification.environments.keeper import WHERE
from verification.environments.outcome_check import BadOutcome, check_end
from verification.environments.policy import (
    MAX_WAITING,
    EpisodeInput,
    JudgeInput,
    Outcome,
    PolicyLimit,
    Reply,
    Say,
    ToGrade,
    TooLong,
    Verdict,
    is_message,
    pack,
    read_message,
)
from verification.environments.settings import EnvironmentFailed, EnvironmentSettings

MAX_LIMITS = 256
"""Refused turns after which an environment is given up that goes on asking."""
END_TIMEOUT_S = 10.0
"""Time for the keeper to end all processes. Then the whole environment is started anew."""
CANCEL_TIMEOUT_S = 5.0
"""Time for cancelled answers to end."""
STOPPED_LOOK_S = 1.0
"""Time between two looks at a stopped clock."""
MAX_REPORT_BYTES = 1 << 16
MAX_REASON_CHARS = 1000
MAX_TEMPERATURE, MAX_DRAW = 100.0, 1 << 48
"""Of a request to the judge."""
_PLACE = re.compile(r"most recent call first\):\n\s*(File .*)")

Answer = Callable[[Say], Awaitable[Reply]]
Judge = Callable[[JudgeInput], Awaitable[Verdict]]
_NO_CHAT = -1
"""Stands for the chat of a request to the judge."""

log = logging.getLogger(__name__)


class Clock:
    """The environment's own time: it runs while no turn of the policy does.

    `EpisodeProcess` stops it for its own turns. Whoever gives turns by another way, such as a
    proxy, calls `stop` and `start` around them.
    """

    def __init__(self, settings: EnvironmentSettings) -> None:
        self._turn_timeout_s = settings.turn_timeout_s
        self._left_s = settings.episode_timeout_s
        self._since_s = time.monotonic()
        self._turns = 0

    def begin(self) -> None:
        """The environment begins, after it waited for its process."""
        self._since_s = time.monotonic()

    def stop(self) -> None:
        """A turn of the policy begins; several may run at once."""
        if self._turns == 0:
            self._left_s -= time.monotonic() - self._since_s
        self._turns += 1

    def start(self) -> None:
        """A turn of the policy has ended."""
        self._turns -= 1
        self._since_s = time.monotonic()

    def left_s(self) -> float | None:
        """Time left to the environment; None while the clock is stopped."""
        if self._turns:
            return None
        used_s = time.monotonic() - self._since_s
        return max(0.0, min(self._turn_timeout_s, self._left_s) - used_s)


class EpisodeProcess:
    """A forked episode. messages: socket of its frames; life: of its keeper."""

    def __init__(
        self, messages: socket.socket, life: socket.socket, settings: EnvironmentSettings
    ) -> None:
        self._messages = messages
        self._life = life
        self._settings = settings
        self._writer: asyncio.StreamWriter | None = None
        self._limits = 0
        self._waiting: dict[asyncio.Task[Reply | Verdict], tuple[int, int]] = {}
        """Running answers, with the numbers of their requests and chats."""
        self._turns: dict[int, int] = {}
        """Answered turns by chat."""
        self.has_ended = False
        """Whether its processes are known to be gone."""

    async def run(
        self, task: EpisodeInput, answer: Answer, clock: Clock, judge: Judge | None = None
    ) -> Outcome | ToGrade:
        """How it ended; call `end` afterwards. Raises EnvironmentFailed, and as `answer` does."""
        reader, writer = await asyncio.open_unix_connection(sock=self._messages)
        self._writer = writer
        timed = replace(task, turn_timeout_s=self._settings.turn_timeout_s)
        writer.write(pack({"task": asdict(timed)}))
        clock.begin()
        reading = asyncio.ensure_future(self._read(reader))
        try:
            while True:
                left_s = clock.left_s()
                done, _ = await asyncio.wait(
                    {reading, *self._waiting},
                    # A clock that another stopped starts without a sign.
                    timeout=STOPPED_LOOK_S if left_s is None else left_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not done and clock.left_s() == 0:
                    raise EnvironmentFailed(
                        "the environment took longer than expert.environments.turn_timeout_s "
                        "between two requests, or than episode_timeout_s in all, and was killed",
                        "hang",
                    )
                for finished in [task for task in self._waiting if task in done]:
                    writer.write(self._reply(finished))
                    clock.start()
                if reading in done:
                    message = reading.result()
                    if "say" in message:
                        self._start(message, answer)
                    elif "judge" in message:
                        self._start_judge(message, judge)
                    else:
                        return _read_end(message)
                    clock.stop()
                    reading = asyncio.ensure_future(self._read(reader))
        finally:
            tasks = {reading, *self._waiting}
            for unfinished in tasks:
                unfinished.cancel()
            ended, _ = await asyncio.wait(tasks, timeout=CANCEL_TIMEOUT_S)
            for task_ in ended:
                # asyncio complains about errors that nobody looked at.
                task_.cancelled() or task_.exception()

    async def end(self, *, is_hung: bool = False) -> str:
        """Kill all processes of the episode; how it ended, and its last words."""
        try:
            # Sends never wait: nobody else writes to this socket.
            if is_hung:
                self._life.send(WHERE)
            self._life.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # The keeper is gone already.
        try:
            report = await read_report(self._life, END_TIMEOUT_S)
        finally:
            self._life.close()
            # Not earlier: the environment exits when this closes, and shows nothing then.
            if self._writer is not None:
                self._writer.transport.abort()
            else:
                self._messages.close()
        self.has_ended = report is not None
        if report is None:
            log.error("an environment's processes did not end in %g s", END_TIMEOUT_S)
            return f"unknown: its processes did not end in {END_TIMEOUT_S:g} s"
        return describe_end(report)

    async def _read(self, reader: asyncio.StreamReader) -> dict[str, Any]:
        try:
            return await read_message(reader, self._settings.max_message_bytes)
        except TooLong as error:
            raise EnvironmentFailed(f"the environment sent {error}", "flood") from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EnvironmentFailed("the environment's process ended", "crash") from error
        except (ValueError, RecursionError) as error:
            raise _malformed(error) from error

    def _start(self, message: dict[str, Any], answer: Answer) -> None:
        """Start the answer to a request."""
        self._check_room()
        number, say = _read_say(message)
        if any(chat == say.chat for _, chat in self._waiting.values()):
            raise _malformed(f"two turns of chat {say.chat} at once")
        if say.parent is not None and (
            say.chat in self._turns or not 0 < say.parent_turns <= self._turns.get(say.parent, 0)
        ):
            raise _malformed(f"a fork of turn {say.parent_turns} of chat {say.parent}")
        self._waiting[asyncio.ensure_future(answer(say))] = number, say.chat

    def _start_judge(self, message: dict[str, Any], judge: Judge | None) -> None:
        self._check_room()
        if judge is None:
            raise EnvironmentFailed(
                "it asks the judge, and there is none: give expert.scorer.judge=FOLDER", "exception"
            )
        number, asked = _read_judge(message)
        self._waiting[asyncio.ensure_future(judge(asked))] = number, _NO_CHAT

    def _check_room(self) -> None:
        if len(self._waiting) >= MAX_WAITING:
            raise EnvironmentFailed(f"it sent over {MAX_WAITING} requests at once", "flood")

    def _reply(self, finished: asyncio.Task[Reply | Verdict]) -> bytes:
        """Frame for a finished answer."""
        number, chat = self._waiting.pop(finished)
        if chat == _NO_CHAT:
            return pack(dict(asdict(finished.result()), judged=number))
        try:
            frame = pack(dict(asdict(finished.result()), reply=number))
            self._turns[chat] = self._turns.get(chat, 0) + 1
            return frame
        except PolicyLimit as limit:
            self._limits += 1
            if self._limits > MAX_LIMITS:
                raise EnvironmentFailed(
                    f"it asked for turns after {MAX_LIMITS} were refused: {limit}", "flood"
                ) from limit
            return pack({"limit": number, "reason": limit.reason})


def _read_say(message: dict[str, Any]) -> tuple[int, Say]:
    """(number, request) of a message. Raises EnvironmentFailed."""
    fields = dict(message)
    try:
        number = fields.pop("say")
        say = Say(**fields)
    except TypeError as error:
        raise _malformed(error) from error
    counts = [number, say.chat, say.parent_turns]
    counts += [count for count in (say.parent, say.max_tokens) if count is not None]
    if not (
        all(type(count) is int and count >= 0 for count in counts)
        and isinstance(say.messages, list)
        and all(map(is_message, say.messages))
        and isinstance(say.tools, list)
        and all(isinstance(tool, dict) for tool in say.tools)
    ):
        raise _malformed("a request of another form")
    return number, say


def _read_judge(message: dict[str, Any]) -> tuple[int, JudgeInput]:
    """(number, request to the judge) of a message. Raises EnvironmentFailed."""
    fields = dict(message)
    try:
        number = fields.pop("judge")
        asked = JudgeInput(**fields)
    except TypeError as error:
        raise _malformed(error) from error
    if not (
        all(type(count) is int and count >= 0 for count in (number, asked.max_tokens, asked.draw))
        and type(asked.temperature) in (int, float)
        and 0 <= asked.temperature <= MAX_TEMPERATURE
        and asked.draw < MAX_DRAW
        and isinstance(asked.messages, list)
        and all(map(is_message, asked.messages))
        and isinstance(asked.verdicts, list)
        and all(isinstance(verdict, str) for verdict in asked.verdicts)
    ):
        raise _malformed("a request to the judge of another form")
    return number, asked


def _read_end(message: dict[str, Any]) -> Outcome | ToGrade:
    """What an episode's last message says. Raises EnvironmentFailed."""
    if "failed" in message:
        is_bad = message["failed"] == "bad_outcome"
        reason = str(message.get("reason"))[:MAX_REASON_CHARS]
        raise EnvironmentFailed(reason, "bad_outcome" if is_bad else "exception")
    try:
        if "to_grade" in message:
            return check_end(ToGrade(**message["to_grade"]))
        return check_end(Outcome(**message["outcome"]))
    except BadOutcome as error:
        raise EnvironmentFailed(str(error)[:MAX_REASON_CHARS], "bad_outcome") from error
    except (KeyError, TypeError) as error:
        raise _malformed(error) from error


def _malformed(error: object) -> EnvironmentFailed:
    reason = f"the environment sent a malformed message: {error}"
    return EnvironmentFailed(reason[:MAX_REASON_CHARS], "crash")


async def read_report(life: socket.socket, timeout_s: float | None) -> bytes | None:
    """A keeper's report, once it has closed the socket; None if it did not in time."""
    loop = asyncio.get_running_loop()
    report = b""
    try:
        async with asyncio.timeout(timeout_s):
            while len(report) < MAX_REPORT_BYTES:
                part = await loop.sock_recv(life, MAX_REPORT_BYTES)
                if not part:
                    break
                report += part
    except TimeoutError:
        return None
    except ConnectionResetError:
        pass
    return report


def describe_end(report: bytes) -> str:
    """How a kept process ended, and its last words, as far as its keeper reported it."""
    if not report:
        return "unknown: its keeper ended without a report, as a killed one does"
    try:
        found = json.loads(report)
        code, tail = os.waitstatus_to_exitcode(found["status"]), found["tail"]
    except (ValueError, TypeError, KeyError):
        return f"unknown: its keeper's report is unreadable: {report[:100]!r}"
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    place = _PLACE.findall(tail)
    lines = tail.strip().splitlines()
    words = place[-1] if place else lines[-1] if lines else "nothing"
    return f"{how}; its last words: {words}"[:MAX_REASON_CHARS]
