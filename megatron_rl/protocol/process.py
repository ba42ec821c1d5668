"""How every process starts and ends: logging, signals, exit code.

Used by the entry of every process. An error that a person can mend is a line, not a traceback; a
process whose launcher died ends itself.
"""

import ctypes
import faulthandler
import logging
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from megatron_rl.config.errors import ConfigError, InputError
from megatron_rl.protocol.background import handle_in_background
from megatron_rl.protocol.failure import write_failure
from megatron_rl.protocol.frames import WireError
from megatron_rl.protocol.wire import DeadlineExceeded, TurnedAway

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
READY_FILE_VARIABLE = "MEGATRON_RL_READY_FILE"
"""Environment variable: the file by which a restartable role tells the launcher it was ready."""
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that end a process in good order. SIGHUP: the terminal is gone, but for `nohup`."""
ORPHAN_END_S = 12.0
"""What a process has to end itself once its launcher has died. The next launcher waits longer."""
_PR_SET_PDEATHSIG = 1


class TrainingStopped(RuntimeError):
    """The trainer stops the run; the text says what it saw and what to look at."""


class Interrupted(SystemExit):
    """One of ENDING_SIGNALS arrived."""


def verifier_name(index: int) -> str:
    """Name of a verifier in its log, to the queue, and to the launcher; index: of its host."""
    return f"verifier-{index}" if index else "verifier"


def die_with_parent() -> None:
    """Ask Linux to send SIGTERM to this process when the process that started it dies."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class _Progress:
    """How far this process is."""

    has_started = False


def note_started() -> None:
    """From here on an error is a failure of the run, exit code 1: no input is refused any more."""
    _Progress.has_started = True


def _code_of(error: Exception) -> int:
    # Who is turned away has done nothing for this run.
    if _Progress.has_started and not isinstance(error, TurnedAway):
        return EXIT_FAILED
    return EXIT_BAD_INPUT


def note_ready() -> None:
    """Tell the launcher, if there is one, that this process is ready to work."""
    note_started()
    path = os.environ.get(READY_FILE_VARIABLE)
    if path:
        Path(path).touch()


def raise_file_limit(needed: int, what: str) -> None:
    """Let this process open as many files and sockets as the system allows it.

    needed: how many it opens at least; what: the reason, for the message. Raises InputError.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise InputError(
            f"this process may open {hard} files and sockets, and {what} needs {needed}; raise the "
            "hard limit of the node (`ulimit -Hn`, LimitNOFILE in systemd, nofile in limits.conf)"
        )


def set_up_logging(role: str, log_dir: Path | None = None, *, in_background: bool = False) -> None:
    """Log to stderr, and to `log_dir/<role>.log` when a folder is given.

    in_background: a thread writes, so that the caller never waits for the disk.

    On SIGUSR1 the process writes the stacks of its threads to stderr, and continues.
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


def _interrupt(launcher: int | None, number: int, frame: object) -> None:
    if launcher is not None and os.getppid() != launcher:
        # Nobody is left who would kill it: at the end of its time it writes where it is, and exits.
        faulthandler.dump_traceback_later(ORPHAN_END_S, exit=True)
    raise Interrupted(128 + number)


@contextmanager
def failures_noted() -> Iterator[None]:
    """Note for the launcher an error that leaves the block; see `failure.py`.

    Put it around work whose surroundings close connections to other processes: the first note of a
    process stays.
    """
    try:
        yield
    except (ConfigError, InputError, WireError) as error:
        write_failure(_code_of(error), str(error))
        raise
    except (DeadlineExceeded, TrainingStopped) as error:
        write_failure(EXIT_FAILED, str(error))
        raise
    except (SystemExit, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException:
        write_failure(EXIT_FAILED, traceback.format_exc())
        raise


def run_main(role: str, main: Callable[[], None]) -> int:
    """Run `main` and return the exit code: 0, 1 (our failure), 2 (bad input), 128 + signal.

    Bad input is an error before `note_started`; a full disk in the middle of a run is a failure.

    ENDING_SIGNALS raise Interrupted inside `main`, so that context managers close what they
    opened; a second signal is not awaited. Once its launcher has died it has ORPHAN_END_S for that.
    """
    launcher = None
    if os.environ.get("MEGATRON_RL_LAUNCHED"):
        launcher = os.getppid()
        die_with_parent()
    for number in ENDING_SIGNALS:
        # A process under `nohup` outlives its terminal.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, partial(_interrupt, launcher))
    log = logging.getLogger(role)
    try:
        with failures_noted():
            main()
    except Interrupted as stop:
        assert isinstance(stop.code, int)
        log.info("ended by signal %d", stop.code - 128)
        return stop.code
    except (ConfigError, InputError, WireError) as error:
        log.error("%s", error)
        return _code_of(error)
    except (DeadlineExceeded, TrainingStopped) as error:
        log.error("%s", error)
        return EXIT_FAILED
    return 0


def run_rank(role: str, main: Callable[[], None]) -> int:
    """`run_main` for a process of a group; after an error the process ends before this returns.

    The interpreter would wait for threads, and for process groups whose peers wait in turn.
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
