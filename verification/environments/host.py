"""Runs episodes of environments on this node, in processes of their own.

Runs on the generator's event loop, and never blocks it. Each call of `run` is a task of the caller.

| `run` waits for | woken by |
|---|---|
| one of `max_episodes` slots | the end of another episode's processes |
| the environment's fork server | its first datagram, or `start_timeout_s` |
| the episode | `EpisodeProcess.run` |
| the end of its processes | their keeper |
"""

import asyncio
from contextlib import AbstractAsyncContextManager

from verification.environments.episode import Answer, Clock, EpisodeProcess, Judge
from verification.environments.fork_client import ForkClient
from verification.environments.policy import EpisodeInput, Outcome, ToGrade
from verification.environments.settings import EnvironmentFailed, EnvironmentSettings


class EnvironmentHost(AbstractAsyncContextManager["EnvironmentHost"]):
    """Episodes of all environments of a node."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        self._settings = settings
        self._clients: dict[str, ForkClient] = {}
        self._slots = asyncio.Semaphore(settings.max_episodes)
        self._endings: set[asyncio.Task[str]] = set()
        """Episodes whose processes are being ended."""
        self._is_closed = False

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def run(
        self, target: str, task: EpisodeInput, answer: Answer, *,
        clock: Clock | None = None, judge: Judge | None = None,
    ) -> Outcome | ToGrade:  # fmt: skip
        """The end of one episode of "module:name".

        answer: takes one turn of the policy. It returns a Reply, or raises PolicyLimit, which the
            environment may catch and which otherwise is the outcome, with reward 0. Several calls
            run at once if the environment asks for turns of several chats.
        judge: answers requests to the judge; None: there is none.
        clock: of this episode, for turns that the policy takes by another way than `answer`.
        Raises EnvironmentFailed for what the environment did wrong, and what else `answer` raises.
        To cancel this call kills the episode.
        """
        await self._slots.acquire()
        try:
            if self._is_closed:
                raise EnvironmentFailed("the host is closed", "start")
            client = self._clients.setdefault(target, ForkClient(target, self._settings))
            process = await client.fork(f"{target} {task.id}")
        except BaseException:
            self._slots.release()
            raise
        failure: EnvironmentFailed | None = None
        try:
            outcome = await process.run(task, answer, clock or Clock(self._settings), judge)
        except EnvironmentFailed as error:
            failure = error
        finally:
            is_hung = failure is not None and failure.kind == "hang"
            ending = asyncio.ensure_future(self._end(client, process, is_hung=is_hung))
            self._endings.add(ending)
            words = await asyncio.shield(ending)
        if failure is None:
            client.note_end()
            return outcome
        if failure.kind in ("crash", "hang"):
            raise EnvironmentFailed(f"{failure.reason} ({words})", failure.kind) from failure
        raise failure

    async def close(self) -> None:
        """End all processes; calls of `run` raise EnvironmentFailed."""
        self._is_closed = True
        await asyncio.gather(*(client.close() for client in self._clients.values()))
        if self._endings:
            await asyncio.gather(*self._endings)

    async def _end(self, client: ForkClient, process: EpisodeProcess, *, is_hung: bool) -> str:
        try:
            return await process.end(is_hung=is_hung)
        finally:
            if not process.has_ended:
                client.end_server()
            self._slots.release()
            self._endings.discard(asyncio.current_task())
