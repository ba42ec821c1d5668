"""The generator's end of the socket to its vLLM process: requests, and orders with their answers.

Used by `vllm_engine.py`; `vllm_server.py` is the other end.

Concurrency, all on the caller's event loop: as in `sglang_direct.py`; each `ask` waits for its
answer, a lost connection, or its deadline.
"""

import asyncio
import itertools

from generation.engine import EngineError, EngineTimeout
from generation.sglang_direct import DirectRequests
from generation.vllm_messages import READY, Answer, Ask, Ends, Order, told_decoder


class VLLMChannel(DirectRequests):
    """Requests and orders to one vLLM process."""

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
        """Have an order obeyed. Raises EngineError."""
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
        # None: it came after its deadline.
        future = self._answers.get(message.number)
        if future is not None and not future.done():
            future.set_result(message.error)

    def connection_lost(self, error: Exception | None) -> None:
        """Wake all who wait: nothing more will come."""
        super().connection_lost(error)
        for future in self._answers.values():
            if not future.done():
                future.set_result(self._lost)
