"""Run a function under N gloo ranks on this host, each rank a process of its own.

`run_ranks(function, 2, argument)` returns the ranks' results in order. The function lives at
module level of a test file, gets torchrun's environment variables (RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, MASTER_PORT) and returns anything that torch.save can write. Ranks are forked from one
server process that has imported torch, megatron-core and each test file that ran ranks before, so a
call costs a fraction of a second; the server ends with pytest.

On a host with CUDA each rank is started anew instead, and imports everything itself: libraries talk
to the driver while they are imported, and a forked process cannot use a driver that its parent has
talked to. So there the server imports none of them, and a rank has more time.
"""

import atexit
import faulthandler
import functools
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch

from megatron_rl.backend.cpu import sglang as sglang_cpu
from megatron_rl.backend.environment import ranks_environment
from megatron_rl.protocol.process import die_with_parent
from tests.ports import free_port

ROOT = Path(__file__).resolve().parent.parent
PRELOAD = (
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.distributed",
    "megatron.core.pipeline_parallel",
    "safetensors.torch",
    # Two seconds of a core for each rank that reads a tokenizer.
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
)
START_TIMEOUT_S = 200.0
FORKED_S, ANEW_S = 200.0, 300.0
"""What ranks have at most, if the caller does not say: forked ones, and those started anew."""
STACK_S = 0.2
"""For a rank that is late to say where it is."""
_server: "RankServer | None" = None


class RanksFailed(AssertionError):
    """A rank raised, died or missed the deadline; the text has every rank's traceback."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float | None = None,
    env: dict[str, str] | None = None,
    forks: bool | None = None,
) -> list[Any]:
    """Return [function(*args) on rank 0, on rank 1, ...].

    `env` adds environment variables to the server's, or to the caller's where ranks do not fork.
    forks: default: where there is no CUDA. When one rank fails the others are killed at once.
    """
    global _server
    forks = may_fork() if forks is None else forks
    timeout_s = (FORKED_S if forks else ANEW_S) if timeout_s is None else timeout_s
    # It ends with the thread that started it, which may not have been the main one.
    if _server is None or _server.has_ended:
        _server = RankServer()
        atexit.register(stop_server)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        torch.save(args, Path(folder) / "args.pt")
        job = {
            "target": [function.__module__, function.__qualname__],
            "folder": folder,
            "world_size": world_size,
            "timeout_s": timeout_s,
            "env": env or {},
            "path": sys.path,
            "forks": forks,
            "environ": {} if forks else anew_environment(),
        }
        try:
            failures = _server.run(job, timeout_s + 10)
        except BaseException:
            stop_server()
            raise
        if failures:
            raise RanksFailed("\n".join(failures))
        return [
            torch.load(Path(folder) / f"{rank}.pt", weights_only=False)
            for rank in range(world_size)
        ]


@functools.cache
def may_fork() -> bool:
    """Whether ranks can be forked from a process that has imported everything."""
    return sglang_cpu.is_needed()


def own_environment() -> dict[str, str]:
    """The caller's, with this tree's modules before all others, and a thread for each process."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def anew_environment() -> dict[str, str]:
    """That of ranks that the launcher starts on GPUs: what they import depends on it."""
    own = own_environment()
    return own | ranks_environment("cuda", 1, given=own)


def stop_server() -> None:
    """End the server process; the next run_ranks starts another."""
    global _server
    if _server is not None:
        _server.close()
        _server = None


class RankServer:
    """The process that ranks are forked from; one job at a time, JSON lines over its pipes."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.distributed"],
            cwd=ROOT,
            env=own_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read(START_TIMEOUT_S)

    def run(self, job: dict[str, Any], timeout_s: float) -> list[str]:
        """Return the failures of the job's ranks; none when all succeeded."""
        self._stdin.write(json.dumps(job) + "\n")
        self._stdin.flush()
        return self._read(timeout_s)

    @property
    def has_ended(self) -> bool:
        """Whether another one is needed."""
        return self._process.poll() is not None

    @property
    def _stdin(self) -> TextIO:
        assert self._process.stdin is not None
        return self._process.stdin

    def _read(self, timeout_s: float) -> list[str]:
        assert self._process.stdout is not None
        if not wait([self._process.stdout], timeout_s):
            raise RanksFailed(f"the rank server did not answer in {timeout_s} s")
        line = self._process.stdout.readline()
        if not line:
            raise RanksFailed("the rank server died")
        return json.loads(line)

    def close(self) -> None:
        """Kill the server; its ranks get SIGTERM with it."""
        self._process.kill()
        self._process.wait(60)


def _serve() -> None:
    die_with_parent()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if may_fork():
        for name in PRELOAD:
            importlib.import_module(name)
    # Whatever a rank prints must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps([]), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_run_job(json.loads(line))), file=answers, flush=True)


def _run_job(job: dict[str, Any]) -> list[str]:
    start = _start_rank
    if job["forks"]:
        start = _fork_rank
        # Here, where it is done once: what a test file imports takes a rank two seconds.
        _import_target(job)
    port = free_port()
    pids = {start(job, rank, port): rank for rank in range(job["world_size"])}
    deadline = time.monotonic() + job["timeout_s"]
    failures: list[str] = []
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank = pids.pop(pid)
            if status:
                failures.append(_failure(Path(job["folder"]), rank, status))
        elif time.monotonic() > deadline:
            failures.append(
                f"ranks {sorted(pids.values())} missed the {job['timeout_s']} s deadline"
            )
            failures += [_stack(Path(job["folder"]), pid, rank) for pid, rank in pids.items()]
            break
        else:
            time.sleep(0.005)
        if failures and not _others_failing(pids, deadline):
            break
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return failures


def _stack(folder: Path, pid: int, rank: int) -> str:
    """Where a rank is, as it says within a moment."""
    os.kill(pid, signal.SIGUSR1)
    time.sleep(STACK_S)
    report = folder / f"{rank}.stack"
    return f"rank {rank}: {report.read_text() if report.exists() else 'has not begun'}"


def _others_failing(pids: dict[int, int], deadline: float) -> bool:
    """Wait a moment for the other ranks, whose own error may be the cause; True if one ended."""
    until = min(time.monotonic() + 0.5, deadline)
    while pids and time.monotonic() < until:
        for pid in pids:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return True
        time.sleep(0.02)
    return False


def _failure(folder: Path, rank: int, status: int) -> str:
    report = folder / f"{rank}.error"
    text = report.read_text() if report.exists() else f"wait status {status}, no traceback"
    return f"rank {rank}: {text}"


def _import_target(job: dict[str, Any]) -> None:
    sys.path[:] = job["path"]
    importlib.import_module(job["target"][0])


def _environment(job: dict[str, Any], rank: int, port: int) -> dict[str, str]:
    return job["env"] | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job["world_size"]),
        "LOCAL_WORLD_SIZE": str(job["world_size"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _start_rank(job: dict[str, Any], rank: int, port: int) -> int:
    """Start a rank as a process of its own."""
    needed = json.dumps({name: job[name] for name in ("target", "folder", "path")})
    # Not Popen: it would reap its children, which `_run_job` waits for.
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "tests.distributed", needed, str(rank)],
        job["environ"] | _environment(job, rank, port),
        # Not the server's own input.
        file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
    )


def _fork_rank(job: dict[str, Any], rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.environ.update(_environment(job, rank, port))
    _be_rank(job, rank)


def _be_rank(job: dict[str, Any], rank: int) -> NoReturn:
    die_with_parent()
    folder = Path(job["folder"])
    exit_code = 1
    stack = (folder / f"{rank}.stack").open("w")
    faulthandler.register(signal.SIGUSR1, stack)
    try:
        # What a forked rank has inherited takes no time again.
        _import_target(job)
        module, name = job["target"]
        function = getattr(sys.modules[module], name)
        args = torch.load(folder / "args.pt", weights_only=False)
        torch.save(function(*args), folder / f"{rank}.pt")
        exit_code = 0
    finally:
        if exit_code:
            (folder / f"{rank}.error").write_text(traceback.format_exc())
        # Such as the manager that Megatron's own checkpoints start.
        for child in multiprocessing.active_children():
            child.kill()
        # Skips the destructors of process groups, which may wait for ranks that left.
        os._exit(exit_code)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        _be_rank(json.loads(sys.argv[1]), int(sys.argv[2]))
    _serve()
