"""vLLM's CPU build as an engine: one process with vLLM's interpreter, asked over a Unix socket.

Used by the generator process. vLLM is not imported here; `vllm_server.py` runs in the child. The
child counts versions itself, at its step boundaries. It restarts requests that had no token before
a weight sync, so that no code here waits for the end of a pause.

Concurrency, all on the caller's event loop:

| task               | waits for                    | woken by  | closed by  |
|--------------------|------------------------------|-----------|------------|
| each `generate`    | its completions              | the child | its caller |
| the weight methods | one answer, with a deadline  | the child | -          |
| `failed`           | the child's exit             | the child | its caller |
| the child          | requests and orders          | us        | `close`    |
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing

from generation.child import ServerChild
from generation.engine import Completion, EngineError, EngineSetup, EngineTimeout
from generation.sglang_direct import DirectRequests, direct_request, read_ended
from generation.vllm_command import (
    installed_release,
    refuse_gpu,
    refuse_model,
    server_command,
    server_environment,
    write_job,
)
from generation.vllm_messages import READY, Answer, Ask, Ends, Order, PauseNow, told_decoder
from megatron_rl.protocol.types import LeaveGroup, Receive, Resume, Sampling


class VLLMChannel(DirectRequests):
    """Requests and orders to one vLLM process over a socket; `vllm_server.py` is the other end.

    Each `ask` waits for its answer, a lost connection, or its deadline.
    """

    peer = "vLLM's process"
    decoder = told_decoder

    def __init__(self) -> None:
        super().__init__()
        self._asked = itertools.count(READY + 1)
        self._answers: dict[int, asyncio.Future[str]] = {}

    async def ready(self, timeout_s: float) -> None:
        """Wait until the model is loaded. Raises TimeoutError, and EngineError."""
        await self._answer(READY, timeout_s)

    async def ask(self, order: Order, timeout_s: float) -> None:
        """Send an order and wait for its answer. Raises EngineError."""
        number = next(self._asked)
        self._send(Ask(number, order))
        try:
            await self._answer(number, timeout_s)
        except TimeoutError as error:
            name = type(order).__name__
            raise EngineTimeout(f"{name}: vLLM did not answer in {timeout_s:.0f} s") from error

    async def _answer(self, number: int, timeout_s: float) -> None:
        future = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        try:
            error = await asyncio.wait_for(future, timeout_s)
        finally:
            del self._answers[number]
        if error:
            raise EngineError(error)

    # --- called by the event loop ---------------------------------------------------------------

    def _take(self, message: Ends | Answer) -> None:
        if isinstance(message, Ends):
            super()._take(message.completions)
            return
        # None: the answer came after its deadline.
        future = self._answers.get(message.number)
        if future is not None and not future.done():
            future.set_result(message.error)

    def connection_lost(self, error: Exception | None) -> None:
        """Wake all waiting callers: no answer will come."""
        super().connection_lost(error)
        for future in self._answers.values():
            if not future.done():
                future.set_result(self._lost)


RECEIVE_MARGIN_S = 5.0
"""Seconds more than the receiver has: it keeps the order's deadline, and reports what was late."""


class VLLMEngine:
    """`Engine` over one vLLM process."""

    name = "vllm"
    world_size = 1
    ffn_multiple = 1
    expert_parallel = 1

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        self.engine_version = installed_release()
        self.version = setup.version
        self._child = ServerChild(setup.log_path)
        self._channel = VLLMChannel()

    async def start(self) -> None:
        """Start the process and wait until its model is loaded."""
        setup = self._setup
        refuse_gpu()
        refuse_model(setup.model)
        await self._channel.open()
        job = write_job(setup, self._channel.path)
        environment = server_environment(job, setup.log_path)
        await self._child.start(server_command(job), environment, nice=setup.nice)
        ready = asyncio.create_task(self._channel.ready(setup.start_timeout_s))
        died = asyncio.create_task(self._child.exited())
        try:
            await asyncio.wait({ready, died}, return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                raise EngineError(f"vLLM failed to start: {died.result()}")
            await ready
        except TimeoutError as error:
            raise EngineError(
                f"vLLM was not ready in {setup.start_timeout_s:.0f} s "
                f"(expert.generator.start_timeout_s); {self._child.log_tail()}"
            ) from error
        finally:
            for task in (ready, died):
                task.cancel()
            await asyncio.gather(ready, died, return_exceptions=True)

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, indices: list[int]
    ) -> AsyncIterator[Completion]:
        """Yield completions as they finish. `sampling.seed` has no effect, as with SGLang."""
        setup = self._setup
        request = direct_request(setup, prompt_ids, sampling, prefix_key="")
        deadline = asyncio.get_running_loop().time() + setup.request_timeout_s
        try:
            async with aclosing(self._channel.generate(request, indices, deadline)) as answers:
                async for index, ended in answers:
                    yield read_ended(ended, index, "vLLM")
        except TimeoutError as error:
            raise EngineError(
                "a completion took longer than expert.generator.request_timeout_s="
                f"{setup.request_timeout_s:.0f}"
            ) from error

    async def pause(self) -> None:
        """Stop between two tokens; requests stay, and so does their KV cache unless recomputed."""
        await self._ask(PauseNow(self._setup.recomputes_kv_cache))

    async def receive(self, order: Receive) -> None:
        await self._ask(order, order.deadline_s + RECEIVE_MARGIN_S)

    async def resume(self, version: int) -> None:
        await self._ask(Resume(version))
        self.version = version

    async def leave_group(self) -> None:
        await self._ask(LeaveGroup())

    async def _ask(self, order: Order, timeout_s: float | None = None) -> None:
        await self._channel.ask(order, timeout_s or self._setup.weights_timeout_s)

    async def failed(self) -> str:
        return f"vLLM died: {await self._child.exited()}"

    async def close(self) -> None:
        """Kill the process."""
        await self._child.close()
        await self._channel.close()
