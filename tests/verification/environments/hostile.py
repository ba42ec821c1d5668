"""Environments that misbehave. Loaded by its path."""

import asyncio
import ctypes
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

from verification.environments import Outcome, PolicyLimit


async def hang(prompt, policy):  # noqa: ANN001, ANN201
    """Blocks for ever, and ignores polite signals."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(600)


async def wait(prompt, policy):  # noqa: ANN001, ANN201
    """Awaits for ever."""
    await _wait_for_nobody()


async def _wait_for_nobody():  # noqa: ANN202
    await asyncio.Event().wait()


async def swallow(prompt, policy):  # noqa: ANN001, ANN201
    """Never reads what the host sends, and asks for ever."""
    chat = policy.chat([])
    while True:
        try:
            await chat.say()
        except PolicyLimit:
            pass


async def ask_much(prompt, policy):  # noqa: ANN001, ANN201
    """Asks for a thousand turns at once, past the limit of our code."""
    policy._room = asyncio.Semaphore(1000)
    await asyncio.gather(*(policy.chat([]).say(max_tokens=1) for _ in range(1000)))


async def abort(prompt, policy):  # noqa: ANN001, ANN201
    """Aborts in the middle of a turn."""
    turn = asyncio.ensure_future(policy.chat([]).say())
    await asyncio.sleep(0.01)
    os.abort()
    await turn


async def crash(prompt, policy):  # noqa: ANN001, ANN201
    """Reads address 0."""
    ctypes.string_at(0)


async def leave(prompt, policy):  # noqa: ANN001, ANN201
    """Ends its process as if all were well."""
    os._exit(0)


async def exit(prompt, policy):  # noqa: ANN001, ANN201, A001
    """Raises SystemExit."""
    sys.exit(3)


async def fail(prompt, policy):  # noqa: ANN001, ANN201
    """Raises."""
    return Outcome(1 / len(prompt.answer), "never")


async def fail_together(prompt, policy):  # noqa: ANN001, ANN201
    """Two tasks raise, one of them in a group of its own."""
    inner = ExceptionGroup("of one task", [ZeroDivisionError("first")])
    raise ExceptionGroup("of two tasks", [inner, KeyError("second")])


async def eat(prompt, policy):  # noqa: ANN001, ANN201
    """Allocates more than allowed."""
    return Outcome(float(len(bytearray(8 << 30))), "eaten")


async def print_much(prompt, policy):  # noqa: ANN001, ANN201
    """Prints two megabytes."""
    for number in range(20_000):
        print(f"{number:100}")
    return Outcome(1.0, "printed")


async def send(prompt, policy):  # noqa: ANN001, ANN201
    """Writes the entry to the host's socket, past our code, again and again."""
    while True:
        policy._writer.write(bytes.fromhex(prompt.entry))
        await policy._writer.drain()


async def return_it(prompt, policy):  # noqa: ANN001, ANN201
    """Returns what the entry evaluates to."""
    return eval(prompt.entry)


def _daemon(folder):  # noqa: ANN001, ANN202
    """Start a process that leaves its family and session, ignores signals and sleeps."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            (Path(folder) / str(os.getpid())).touch()
            os.execvp("sleep", ["sleep", "300"])
        os._exit(0)


def _start_daemons(folder, count):  # noqa: ANN001, ANN202
    for _ in range(count):
        _daemon(folder)
    while len(os.listdir(folder)) < count:
        time.sleep(0.002)


async def fork(prompt, policy):  # noqa: ANN001, ANN201
    """Leaves 20 processes behind."""
    _start_daemons(prompt.entry, 20)
    return Outcome(1.0, "forked")


async def multiply(prompt, policy):  # noqa: ANN001, ANN201
    """Each process forks others until there are 20."""
    folder = Path(prompt.entry)
    while len(os.listdir(folder)) < 20:
        if os.fork() == 0:
            (folder / str(os.getpid())).touch()
    while True:
        time.sleep(1)


async def fork_and_go_on(prompt, policy):  # noqa: ANN001, ANN201
    """The child goes on as the entry says, such as by waiting for the reply to its parent."""
    turn = asyncio.ensure_future(policy.chat([]).say())
    await asyncio.sleep(0)
    if os.fork() == 0:
        if prompt.entry == "listens":
            await turn
        if prompt.entry == "raises":
            raise PolicyLimit("of a child")
        if prompt.entry == "awaits":
            await asyncio.sleep(0)
        if prompt.entry == "asks":
            await policy.chat([]).say()
        return Outcome(7.0, "child")
    # The child has time to do what it does.
    time.sleep(0.3)
    await asyncio.to_thread(time.sleep, 0.1)
    try:
        await turn
    except PolicyLimit as limit:
        return Outcome(1.0, limit.reason)


async def ask_processes(prompt, policy):  # noqa: ANN001, ANN201
    """Works in forked processes of multiprocessing."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=queue.put, args=(0.25,))
    process.start()
    reward = queue.get()
    process.join()
    return Outcome(reward, f"exit_{process.exitcode}")


async def kill_keeper(prompt, policy):  # noqa: ANN001, ANN201
    """Leaves processes behind and kills the one that would end them."""
    _start_daemons(prompt.entry, 3)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


async def kill_server(prompt, policy):  # noqa: ANN001, ANN201
    """Leaves processes behind and kills the fork server."""
    _start_daemons(prompt.entry, 3)
    keeper = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(") ")[2].split()
    os.kill(int(keeper[1]), signal.SIGKILL)
    time.sleep(600)


async def kill_later(prompt, policy):  # noqa: ANN001, ANN201
    """Leaves processes behind and hangs."""
    _start_daemons(prompt.entry, 3)
    time.sleep(600)


async def named(prompt, policy):  # noqa: ANN001, ANN201
    """The environment that the prompt's task names: all share one fork server."""
    return await globals()[prompt.task](prompt, policy)
