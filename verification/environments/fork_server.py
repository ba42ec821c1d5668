"""Imports a user's module once and forks a process per episode; and what runs in that process.

Runs in the environment's processes, under any Python from 3.9 (`child.py`). One thread each.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import importlib
import inspect
import json
import mmap
import os
import random
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from verification.environments.keeper import Keeper, become_reaper, kill, processes
from verification.environments.opening import check_call
from verification.environments.outcome_check import BadOutcome, check_end
from verification.environments.policy import (
    EpisodeInput,
    Outcome,
    Policy,
    PolicyLimit,
    ToGrade,
    pack,
    read_message,
)
from verification.environments.text_game import text_game_episode

MAX_LOG_BYTES = 1 << 24
"""Size at which the log moves to NAME.1."""
MAX_REASON = 600
"""Characters of a reported error."""
MAX_DATAGRAM_BYTES = 4096
_FOLDER = os.path.dirname(os.path.abspath(__file__))
_NO_USER_CODE = (_FOLDER, os.path.dirname(os.path.abspath(asyncio.__file__)))

Episode = Callable[[EpisodeInput, Policy], Coroutine[Any, Any, "Outcome | ToGrade"]]


class ForkServer:
    """Forks episodes of one environment."""

    def __init__(
        self, control: socket.socket, *, target: str, log_path: str, memory_bytes: int,
        max_message_bytes: int,
    ) -> None:  # fmt: skip
        self._control = control
        self._target = target
        self._log_path = log_path
        self._memory_bytes = memory_bytes
        self._max_message_bytes = max_message_bytes
        self._has_told = mmap.mmap(-1, 1)
        """Shared by all episodes: whether the log says that one of them forked and returned."""
        self._keepers: set[int] = set()
        """Children that keep an episode."""

    def run(self) -> None:
        """Import the module, then serve until the host closes the socket."""
        try:
            form, episode = load(self._target)
            # What each episode would do anew, such as an import of seconds.
            if prepare := getattr(episode, "prepare", None):
                prepare()
        except BaseException as error:  # noqa: BLE001  Whatever a module raises is reported.
            traceback.print_exc()
            lines = traceback.format_exception(type(error), error, error.__traceback__, -1)
            self._control.send(_encode({"failed": "".join(lines).strip()[-MAX_REASON:]}))
            return
        self._episode = episode
        faulthandler.enable(all_threads=False)
        become_reaper()
        # Handlers of the user's module must not reap what this process and keepers wait for.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Children share pages until a write; the collector writes to all but frozen objects.
        gc.collect()
        gc.freeze()
        helpers = set(self._children())
        self._control.send(_encode({"ready": form}))
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        while True:
            if poller.poll(1000):
                body, descriptors, _, _ = socket.recv_fds(self._control, MAX_DATAGRAM_BYTES, 2)
                if not body:
                    return
                self._fork(json.loads(body)["label"], descriptors)
            if self._reap():
                for pid in set(self._children()) - helpers - self._keepers:
                    kill(pid, os.getpid())

    def _fork(self, label: str, descriptors: list[int]) -> None:
        """Fork the keeper of an episode. descriptors: the sockets of its messages, and LIFE."""
        messages, life = (socket.socket(fileno=descriptor) for descriptor in descriptors)
        with messages, life:
            with contextlib.suppress(FileNotFoundError):
                if os.path.getsize(self._log_path) > MAX_LOG_BYTES:
                    os.replace(self._log_path, self._log_path + ".1")
            try:
                pid = os.fork()
            except OSError as error:
                # The host sees both sockets close.
                sys.stderr.write(f"cannot fork a process for {label}: {error}\n")
                return
            if pid == 0:
                self._control.close()
                keeper = Keeper(life, label, self._log_path)
                keeper.keep(lambda: self._run_episode(messages), [messages])
            self._keepers.add(pid)

    def _reap(self) -> bool:
        """Reap ended children; True if a keeper was killed, which leaves its processes to us."""
        is_killed = False
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                is_killed |= pid in self._keepers and status != 0
                self._keepers.discard(pid)
        return is_killed

    def _children(self) -> list[int]:
        own = os.getpid()
        return [pid for pid, parent in processes() if parent == own]

    def _run_episode(self, messages: socket.socket) -> None:
        # The keeper asks by this signal where a hung episode is; see also `_play`.
        faulthandler.register(signal.SIGUSR1, all_threads=False)
        # 1, not 0: the kernel starts the node's core collector for 0, but never for 1.
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = self._memory_bytes
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        own = os.getpid()
        nowhere = os.open(os.devnull, os.O_RDWR)
        # A process that the episode forks, such as by multiprocessing, has no part in its messages.
        to_child = messages.fileno()
        os.register_at_fork(after_in_child=lambda: os.dup2(nowhere, to_child, False))

        async def episode(prompt: EpisodeInput, policy: Policy) -> Outcome | ToGrade:
            try:
                return await self._episode(prompt, policy)
            finally:
                if os.getpid() != own:
                    self._end_forked()

        asyncio.run(_play(messages, episode, self._max_message_bytes))

    def _end_forked(self) -> NoReturn:
        """End a process that an episode forked, and that returned from it as the episode does."""
        if not self._has_told[0]:
            self._has_told[0] = 1
            with contextlib.suppress(OSError):
                sys.stderr.write(
                    f"{self._target} forked and its child returned: end the child by os._exit, as "
                    "multiprocessing does\n"
                )
                sys.stderr.flush()
        os._exit(0)


def load(target: str) -> tuple[str, Episode]:
    """(form, episode) of "module:name". form: "function", "text_game" or "tools".

    Raises what the import raises, and TypeError for anything else than an environment, or one that
    a run could not call.
    """
    module_name, _, name = target.partition(":")
    found: Any = importlib.import_module(module_name)
    for part in name.split("."):
        found = getattr(found, part)
    if inspect.isclass(found):
        if hasattr(found, "reset") and hasattr(found, "step"):
            is_bound = not inspect.isfunction(inspect.getattr_static(found, "step"))
            check_call(found.step, f"{target}.step", *([] if is_bound else ["self"]), "text")
            return "text_game", text_game_episode(found)
    elif callable(found) and (
        inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(type(found).__call__)
    ):
        check_call(found, target, "prompt", "policy")
        return getattr(found, "form", "function"), found
    raise TypeError(
        f"{target} is a {type(found).__name__}: expected an async function of (prompt, policy), "
        "a class with reset and step, or what tools_episode(...) returns"
    )


async def _play(messages: socket.socket, episode: Episode, max_bytes: int) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=messages)
    prompt = EpisodeInput(**(await read_message(reader, max_bytes))["task"])
    # Forks of one process would all draw the same numbers.
    random.seed(prompt.seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(prompt.seed % (1 << 32))
    policy = Policy(reader, writer, url=prompt.url, key=prompt.key)
    receiving = asyncio.ensure_future(policy.receive(max_bytes))
    # Without the host nothing is left to do.
    receiving.add_done_callback(lambda _: os._exit(1))
    loop = asyncio.get_running_loop()
    running = asyncio.current_task()
    loop.add_signal_handler(signal.SIGUSR2, lambda: _print_place(running))
    writer.write(pack(await _last_message(episode, prompt, policy)))
    # Until the host ends this process: asyncio.run would first wait for tasks of the user.
    await receiving


async def _last_message(episode: Episode, prompt: EpisodeInput, policy: Policy) -> dict[str, Any]:
    """Run the user's code; the message of what came of it."""
    try:
        end = check_end(await episode(prompt, policy))
    except BadOutcome as error:
        return {"failed": "bad_outcome", "reason": str(error)[:MAX_REASON]}
    except BaseException as error:  # noqa: BLE001  Whatever an environment raises is reported.
        limit = _limit(error)
        if limit is not None:
            return {"outcome": vars(Outcome(0.0, limit))}
        traceback.print_exc()
        return {"failed": "exception", "reason": _describe(error)}
    return {"to_grade" if isinstance(end, ToGrade) else "outcome": vars(end)}


def _print_place(task: Any) -> None:
    """Print where the user's code waits, in the form of faulthandler."""
    place = ""
    waiting = task.get_coro()
    while getattr(waiting, "cr_frame", None) is not None:
        frame = waiting.cr_frame
        if os.path.dirname(frame.f_code.co_filename) not in _NO_USER_CODE:
            name = frame.f_code.co_name
            place = f'File "{frame.f_code.co_filename}", line {frame.f_lineno} in {name}'
        waiting = waiting.cr_await
    sys.stderr.write(f"Waiting (most recent call first):\n  {place}\n")


def _limit(error: BaseException) -> str | None:
    """Reason of a PolicyLimit, or of an exception group of nothing else."""
    if isinstance(error, PolicyLimit):
        return error.reason
    limits = [_limit(part) for part in getattr(error, "exceptions", ())]
    return limits[0] if limits and None not in limits else None


def _describe(error: BaseException) -> str:
    """An exception and the user's line that raised it; of an exception group each of its parts."""
    if parts := getattr(error, "exceptions", ()):
        return "; ".join(map(_describe, parts))[:MAX_REASON]
    text = "".join(traceback.format_exception_only(type(error), error)).strip()[-MAX_REASON:]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if os.path.dirname(frame.filename) not in _NO_USER_CODE
    ]
    if not frames:
        return text
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})"


def _encode(message: dict[str, str]) -> bytes:
    return json.dumps(message).encode()
