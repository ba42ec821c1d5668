"""Runs environments of this folder for tests, and finds their processes."""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar

from verification.environments.episode import Answer
from verification.environments.host import EnvironmentHost
from verification.environments.policy import EpisodeInput, Reply, Say
from verification.environments.settings import EnvironmentSettings

T = TypeVar("T")

FOLDER = str(Path(__file__).parent)
PATIENCE_S = 60.0


def settings(folder: Path, **changes: Any) -> EnvironmentSettings:
    """Settings for tests; the log is a file in `folder`."""
    return EnvironmentSettings(
        **{"paths": (FOLDER,), "log_path": str(folder / "log"), "turn_timeout_s": PATIENCE_S}
        | changes
    )


def prompt(**fields: Any) -> EpisodeInput:
    """A prompt."""
    return EpisodeInput(
        **{"id": "7", "task": "test", "messages": [{"role": "user", "content": "go"}]} | fields
    )


def replies(*texts: str, said: list[Say] | None = None) -> Answer:
    """A policy that says these texts in turn. said: gets the requests."""
    left = list(texts)

    async def answer(say: Say) -> Reply:
        if said is not None:
            said.append(say)
        text = left.pop(0)
        return Reply(text, text, tokens_left=len(left))

    return answer


class Running:
    """A host on an event loop of its own, for several tests."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.folder = folder
        self._runner = asyncio.Runner()
        self.host = EnvironmentHost(settings(folder, **changes))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.wait(self.host.close())
        self._runner.close()
        assert processes(self.folder) == []

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine, in time."""

        async def body() -> T:
            return await asyncio.wait_for(coroutine, PATIENCE_S)

        return self._runner.run(body())

    def play(self, target: str, policy: Answer | None = None, /, **fields: Any) -> Any:
        """The end of one episode, with these fields of its prompt."""
        return self.wait(self.host.run(target, prompt(**fields), policy or replies()))


def run(
    folder: Path, target: str, answer: Answer | None = None, *, task: EpisodeInput | None = None,
    **changes: Any,
) -> Any:  # fmt: skip
    """The end of one episode, under a host of its own."""
    with Running(folder, **changes) as running:
        return running.wait(running.host.run(target, task or prompt(), answer or replies()))


def processes(folder: Path) -> list[int]:
    """Living processes of hosts whose log is in `folder`."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"child.py" in line and str(folder / "log").encode() in line:
            found.append(int(pid))
    return found


def is_alive(pid: int) -> bool:
    """Whether a process exists that is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until(holds: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Wait for a claim to hold."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
