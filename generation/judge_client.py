"""Requests of environments to the judge in the scorer process.

Used by generators. A restarted scorer has lost its requests, so the client repeats a request
without an answer; a slow scorer recognises the repetition.

| task | waits for | ends |
|---|---|---|
| `ask` (n) | room, then its answer; repeats the request | with the answer, or at its deadline |
| `_receive` | the next message | when the client closes |
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Self

from generation.async_sockets import AsyncDealer
from megatron_rl.config.tree import Config
from megatron_rl.protocol.endpoints import SCORER
from megatron_rl.protocol.keys import load_keys
from megatron_rl.protocol.limits import INT32_MAX
from megatron_rl.protocol.prompt import ChatMessage
from megatron_rl.protocol.scorer_messages import Judged, JudgeRefused, JudgeRequest
from megatron_rl.protocol.wire import DeadlineExceeded, WireError
from verification.environments.policy import JudgeInput, Verdict
from verification.environments.settings import EnvironmentFailed

MOST_OPEN = 256
"""Requests at once; the scorer bounds how many of them its engine runs."""
ASK_AGAIN_S = 10.0
"""A request without an answer is repeated after this time."""
_LOOK_S = 1.0


class JudgeClient:
    """A generator's connection to the judge. Its failures are no fault of the policy."""

    def __init__(self, dealer: AsyncDealer, *, answer_within_s: float) -> None:
        """answer_within_s: the longest wait for an answer."""
        self._dealer = dealer
        self._room = asyncio.Semaphore(MOST_OPEN)
        self._answer_within_s = answer_within_s
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Judged | JudgeRefused]] = {}

    @asynccontextmanager
    async def receiving(self) -> AsyncIterator[Self]:
        """The client, which receives answers until the block ends; then the socket is closed."""
        task = asyncio.create_task(self._receive())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._dealer.close()

    async def ask(self, asked: JudgeInput) -> Verdict:
        """The judge's answer. Raises EnvironmentFailed if there is none in time."""
        messages = [ChatMessage(one["role"], one["content"]) for one in asked.messages]
        texts = [*asked.verdicts, *(one.role + one.content for one in messages)]
        try:
            "".join(texts).encode()
        except UnicodeEncodeError as error:
            # Such as half of a surrogate pair that the policy spelled.
            return Verdict([], "", f"a message to the judge is no text: {error}")
        number, most = next(self._numbers), min(asked.max_tokens, INT32_MAX)
        request = JudgeRequest(
            number, messages, asked.verdicts, most, asked.temperature, asked.draw
        )
        async with self._room:
            self._waiting[number] = asyncio.get_running_loop().create_future()
            try:
                answer = await self._answer(request)
            finally:
                del self._waiting[number]
        if isinstance(answer, JudgeRefused):
            return Verdict([], "", answer.reason)
        return Verdict(list(answer.logprobs), answer.reply)

    async def _answer(self, request: JudgeRequest) -> Judged | JudgeRefused:
        future = self._waiting[request.request_id]
        deadline = time.monotonic() + self._answer_within_s
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                self._dealer.send(request)
            except DeadlineExceeded:
                pass  # As good as lost.
            except WireError as error:
                raise EnvironmentFailed(f"the judge: {error}", "judge") from error
            done, _ = await asyncio.wait({future}, timeout=min(ASK_AGAIN_S, left_s))
            if done:
                return future.result()
        raise EnvironmentFailed(
            f"the judge gave no answer in {self._answer_within_s:.0f} s "
            "(expert.scorer.answer_within_s): see logs/scorer-0.log",
            "judge",
        )

    async def _receive(self) -> None:
        """Hand answers to those who wait for them; nonsense fails all that wait."""
        while True:
            try:
                message = await self._dealer.next_message(_LOOK_S)
            except WireError as error:
                failure = EnvironmentFailed(f"the judge: {error}", "judge")
                for future in self._waiting.values():
                    if not future.done():
                        future.set_exception(failure)
                continue
            if isinstance(message, Judged | JudgeRefused):
                future = self._waiting.get(message.request_id)
                # Asked twice, answered twice: the first answer counts.
                if future is not None and not future.done():
                    future.set_result(message)


def open_judge(config: Config, name: str, address: str) -> AbstractAsyncContextManager[JudgeClient]:
    """The judge's client. name: of the generator; address: of the scorer's node."""
    ports = config.ports
    dealer = AsyncDealer(
        ports.scorer_at(address), f"{name}-judge", load_keys(ports.keys_dir),
        endpoint=SCORER, label=ports.label,
    )  # fmt: skip
    return JudgeClient(dealer, answer_within_s=config.scorer.answer_within_s).receiving()
