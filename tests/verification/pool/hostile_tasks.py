"""Comparisons that misbehave, named as `tests.verification.pool.hostile_tasks:<function>`."""

import asyncio
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megatron_rl.protocol.types import ScoreRequest


def obey(answer: str, request: ScoreRequest) -> bool:
    """A well-behaved comparison of a user."""
    return answer == request.answer


def hang(answer: str, request: ScoreRequest) -> bool:
    """Never returns, and ignores polite signals."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        pass


def exit_at_once(answer: str, request: ScoreRequest) -> bool:
    """Leaves without a word."""
    os._exit(7)


def kill_itself(answer: str, request: ScoreRequest) -> bool:
    """Dies as by the kernel's memory killer."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def segfault(answer: str, request: ScoreRequest) -> bool:
    """Crashes in C."""
    ctypes.string_at(0)
    raise AssertionError("unreachable")


def die_once(answer: str, request: ScoreRequest) -> bool:
    """Dies the first time; request.entry names the file that remembers it."""
    marker = Path(request.entry)
    if marker.exists():
        return obey(answer, request)
    marker.touch()
    os._exit(1)


def raise_error(answer: str, request: ScoreRequest) -> bool:
    """Has a bug."""
    raise KeyError("a bug in the user's reward")


def eat_memory(answer: str, request: ScoreRequest) -> bool:
    """Asks for more memory than the limit."""
    return len(bytearray(64 << 30)) > 0


def return_nothing(answer: str, request: ScoreRequest) -> None:
    """Breaks the contract of tasks."""


def leave_grandchild(answer: str, request: ScoreRequest) -> bool:
    """Starts a process that outlives it, writes its pid to request.entry, then hangs."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(request.entry).write_text(str(child.pid))
    return hang(answer, request)


def list_open_files(answer: str, request: ScoreRequest) -> bool:
    """Writes what the grading process has open into the file request.entry."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.lexists(path):
            targets.append(os.readlink(path).split(":")[0])
    Path(request.entry).write_text(" ".join(sorted(targets)))
    return True


def recurse(answer: str, request: ScoreRequest) -> bool:
    """Uses up Python's stack."""
    return recurse(answer, request)


def half(answer: str, request: ScoreRequest) -> float:
    """An extra reward of a user: how much of the limit of two characters is used."""
    return len(answer) / 2


def raising(answer: str, request: ScoreRequest) -> float:
    """An extra reward with a bug."""
    return {}[answer]


def not_a_number(answer: str, request: ScoreRequest) -> float:
    """An extra reward that breaks its contract."""
    return float("nan")


def astronomic(answer: str, request: ScoreRequest) -> float:
    """An extra reward at the limit."""
    return 1e24


def compute(answer: str, request: ScoreRequest) -> bool:
    """Right after request.entry seconds of CPU time."""
    end_s = time.process_time() + float(request.entry)
    while time.process_time() < end_s:
        pass
    return True


def sleep(answer: str, request: ScoreRequest) -> bool:
    """Right after request.entry seconds of sleep."""
    time.sleep(float(request.entry))
    return True


async def sleep_and_compare(answer: str, request: ScoreRequest) -> bool:
    """As a judge over HTTP that is awaited."""
    await asyncio.sleep(0.01)
    return answer == request.answer


async def half_later(answer: str, request: ScoreRequest) -> float:
    """As `half`."""
    await asyncio.sleep(0.01)
    return half(answer, request)


def hang_on_bombs(answer: str, request: ScoreRequest) -> bool:
    """Compares numbers, and hangs where either is no number."""
    if "bomb" in answer + request.answer:
        return hang(answer, request)
    return int(answer) == int(request.answer)


def wait(answer: str, request: ScoreRequest) -> bool:
    """Waits for a judge: not, once, or ever; request.entry is that word and a file of its own."""
    word, _, path = request.entry.partition(" ")
    if word == "ever" or (word == "once" and not Path(path).exists()):
        Path(path).touch()
        time.sleep(600)
    return obey(answer, request)


def hang_in_a_child(answer: str, request: ScoreRequest) -> bool:
    """Calls a program that computes without end."""
    subprocess.run([sys.executable, "-c", "while True: pass"])
    return True


def fork_and_return(answer: str, request: ScoreRequest) -> bool:
    """The child returns first, with the opposite verdict."""
    is_right = answer == request.answer
    if os.fork() == 0:
        return not is_right
    time.sleep(0.2)
    return is_right


def fork_and_raise(answer: str, request: ScoreRequest) -> bool:
    """The child raises."""
    if os.fork() == 0:
        sys.exit("the child is done")
    time.sleep(0.2)
    return answer == request.answer


async def fork_and_await(answer: str, request: ScoreRequest) -> bool:
    """The child returns first; then the parent needs its event loop, with a thread."""
    is_right = answer == request.answer
    if os.fork() == 0:
        return not is_right
    await asyncio.to_thread(time.sleep, 0.2)
    return is_right


def half_of_parent(answer: str, request: ScoreRequest) -> float:
    """An extra reward whose child returns another number."""
    if os.fork() == 0:
        return 1.0
    time.sleep(0.2)
    return 0.5


def obey_quietly(answer: str, request: ScoreRequest) -> bool:
    """As a user's comparison that does nothing else."""
    return answer == request.answer


def ask_processes(answer: str, request: ScoreRequest) -> bool:
    """Compares in forked processes of multiprocessing."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=lambda: queue.put(answer == request.answer))
    process.start()
    is_right = queue.get()
    process.join()
    return bool(is_right) and process.exitcode == 0
