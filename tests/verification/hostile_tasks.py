"""Tasks that misbehave, named by tests as `tests.verification.hostile_tasks:<function>`."""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

from megatron_rl.protocol.types import Score, ScoreRequest
from verification.score import RewardRules


def obey(request: ScoreRequest, rules: RewardRules) -> Score:
    """A well-behaved task of a user: full reward when the text holds the answer."""
    is_right = request.answer in request.text
    return Score(float(is_right), {"correct": float(is_right)}, "correct" if is_right else "no")


def hang(request: ScoreRequest, rules: RewardRules) -> Score:
    """Never returns, and ignores polite signals."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        pass


def exit_at_once(request: ScoreRequest, rules: RewardRules) -> Score:
    """Leaves without a word."""
    os._exit(7)


def kill_itself(request: ScoreRequest, rules: RewardRules) -> Score:
    """Dies as by the kernel's memory killer."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def segfault(request: ScoreRequest, rules: RewardRules) -> Score:
    """Crashes in C."""
    ctypes.string_at(0)
    raise AssertionError("unreachable")


def die_once(request: ScoreRequest, rules: RewardRules) -> Score:
    """Dies the first time; request.entry names the file that remembers it."""
    marker = Path(request.entry)
    if marker.exists():
        return obey(request, rules)
    marker.touch()
    os._exit(1)


def raise_error(request: ScoreRequest, rules: RewardRules) -> Score:
    """Has a bug."""
    raise KeyError("a bug in the user's reward")


def eat_memory(request: ScoreRequest, rules: RewardRules) -> Score:
    """Asks for more memory than the limit."""
    return Score(float(len(bytearray(64 << 30))), {}, "correct")


def return_nothing(request: ScoreRequest, rules: RewardRules) -> None:
    """Breaks the contract of tasks."""


def leave_grandchild(request: ScoreRequest, rules: RewardRules) -> Score:
    """Starts a process that outlives it, writes its pid to request.entry, then hangs."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(request.entry).write_text(str(child.pid))
    return hang(request, rules)


def list_open_files(request: ScoreRequest, rules: RewardRules) -> Score:
    """Reports what the grading process has open, as the reason."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.lexists(path):
            targets.append(os.readlink(path).split(":")[0])
    return Score(0.0, {}, " ".join(sorted(targets)))
