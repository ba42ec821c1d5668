"""Start and end of every process: logging, signals, exit code.

Used by the entry of every process. An error that a person can fix is one line, not a traceback. A
process whose launcher died ends itself.
"""

import atexit
import ctypes
import faulthandler
import gc
import logging
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_rl.config.errors import ConfigError, InputError, printable_lines
from megatron_rl.protocol.background import handle_in_background
from megatron_rl.protocol.failure import write_failure
from megatron_rl.protocol.frames import WireError
from megatron_rl.protocol.wire import DeadlineExceeded, TurnedAway

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
READY_FILE_VARIABLE = "MEGATRON_RL_READY_FILE"
"""Environment variable: a file that a restartable role creates when it is ready."""
DONE = "done"
"""Content of the ready file of a role whose work is on the disk."""
RESTARTED_VARIABLE = "MEGATRON_RL_RESTARTED"
"""Environment variable that the launcher sets to 1 for a role that it starts again."""
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that end a process in good order. SIGHUP: the terminal is gone, without `nohup`."""
LEAVING_SIGNAL = signal.SIGUSR2
"""Has a generator or verifier finish or give back what it holds, and end with exit code 0."""
ORPHAN_END_S = 12.0
"""Limit for a process to end after its launcher died. The next launcher waits longer."""
_PR_SET_PDEATHSIG = 1


class TrainingStopped(RuntimeError):
    """The trainer stops the run; the text says what it saw and what to look at."""


class Interrupted(SystemExit):
    """One of ENDING_SIGNALS arrived."""


def verifier_name(index: int) -> str:
    """Name of the verifier of a node; index: of the node."""
    return f"verifier-{index}" if index else "verifier"


def die_with_parent() -> None:
    """Make Linux send SIGTERM to this process when its parent dies."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class _Progress:
    has_started = False
    launcher: int | None = None
    """Process id of the launcher that started this process, if one did."""


def note_started() -> None:
    """All input is accepted: later errors are failures of the run, exit code 1."""
    _Progress.has_started = True


def _explain(error: BaseException) -> tuple[int, str]:
    """(exit code, text) of an error; without a text it is not one that a person can fix."""
    if isinstance(error, ConfigError | InputError | WireError):
        # A process that is turned away has done nothing for this run.
        has_failed = _Progress.has_started and not isinstance(error, TurnedAway)
        return EXIT_FAILED if has_failed else EXIT_BAD_INPUT, str(error)
    if isinstance(error, DeadlineExceeded | TrainingStopped):
        return EXIT_FAILED, str(error)
    return EXIT_FAILED, ""


def note_ready() -> None:
    """Tell the launcher, if any, that this process is ready to work."""
    note_started()
    path = os.environ.get(READY_FILE_VARIABLE)
    if path:
        Path(path).touch()


def note_done() -> None:
    """Tell the launcher, if any, that all work is on the disk: a death ends nothing any more."""
    if path := os.environ.get(READY_FILE_VARIABLE):
        Path(path).write_text(DONE)


def raise_file_limit(needed: int, what: str) -> None:
    """Raise this process's limit of open files and sockets to the hard limit.

    needed: minimum number; what: the reason, for the message. Raises InputError.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise InputError(
            f"this process may open {hard} files and sockets, and {what} needs {needed}; raise the "
            "hard limit of the node (`ulimit -Hn`, LimitNOFILE in systemd, nofile in limits.conf)"
        )


def set_up_logging(role: str, log_dir: Path | None = None, *, in_background: bool = False) -> None:
    """Log to stderr, and to `log_dir/<role>.log` if a folder is given.

    in_background: a thread writes, so that the caller never waits for the disk. SIGUSR1 prints the
    stacks of all threads to stderr.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(log_dir / f"{role}.log"))
    line = logging.Formatter(f"%(asctime)s {role} %(levelname)s %(name)s: %(message)s")
    for handler in handlers:
        handler.setFormatter(line)
    if in_background:
        handlers = [handle_in_background(handlers)]
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def limit_end() -> None:
    """Call on each of ENDING_SIGNALS: without its launcher a process has ORPHAN_END_S to end.

    Then it prints its stacks and exits, because no launcher is left to kill it.
    """
    if _Progress.launcher is not None and os.getppid() != _Progress.launcher:
        faulthandler.dump_traceback_later(ORPHAN_END_S, exit=True)


def _interrupt(number: int, frame: object) -> None:
    limit_end()
    raise Interrupted(128 + number)


@contextmanager
def failures_noted() -> Iterator[None]:
    """Note an error that leaves the block for the launcher; see `failure.py`.

    Use it inside blocks that close connections to other processes. The first note of a process
    stays.
    """
    try:
        yield
    except (SystemExit, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        code, text = _explain(error)
        write_failure(code, text or traceback.format_exc())
        raise


def run_main(role: str, main: Callable[[], None]) -> int:
    """Run `main` and return the exit code: 0, 1 (our failure), 2 (bad input), 128 + signal.

    An error is bad input only before `note_started`. ENDING_SIGNALS raise Interrupted inside
    `main`, so that context managers close what they opened, within ORPHAN_END_S if the launcher
    died.
    """
    if os.environ.get("MEGATRON_RL_LAUNCHED"):
        _Progress.launcher = os.getppid()
        die_with_parent()
    # The interpreter's last collections would visit each object of torch: a second of a core.
    atexit.register(gc.freeze)
    for number in ENDING_SIGNALS:
        # A process under `nohup` outlives its terminal.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupt)
    log = logging.getLogger(role)
    try:
        with failures_noted():
            main()
    except Interrupted as stop:
        assert isinstance(stop.code, int)
        log.info("ended by signal %d", stop.code - 128)
        return stop.code
    except (ConfigError, InputError, WireError, DeadlineExceeded, TrainingStopped) as error:
        log.error("%s", printable_lines(str(error)))
        return _explain(error)[0]
    return 0


def run_rank(role: str, main: Callable[[], None]) -> int:
    """`run_main` for a rank; after an error it ends the process at once.

    A normal exit would wait for threads, and for process groups whose peers wait in turn.
    """
    code = EXIT_FAILED
    try:
        code = run_main(role, main)
    finally:
        if code:
            if sys.exc_info()[1] is not None:
                traceback.print_exc()
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return code
