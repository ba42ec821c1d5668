"""Tasks of a process that ends with the first of them; a signal as one of them.

Used by generators, followers and the scorer.
"""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any


async def end_with_first(*coroutines: Coroutine[Any, Any, Any]) -> Any:
    """Run all until the first ends, then cancel the others; its result, or its exception."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return [task.result() for task in done][0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def interrupted() -> int:
    """Number of the first SIGTERM or SIGINT that arrives."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[int] = loop.create_future()

    def note(number: int) -> None:
        if not arrived.done():
            arrived.set_result(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, note, number)
    return await arrived
