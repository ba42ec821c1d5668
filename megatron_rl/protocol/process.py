"""How every process starts and ends: logging, signals, exit code.

Used by the entry of every process. An error that a person can mend is a line, not a traceback; a
process whose launcher died ends itself.
"""

import ctypes
import faulthandler
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from megatron_rl.config.errors import ConfigError, InputError
from megatron_rl.protocol.failure import write_failure
from megatron_rl.protocol.frames import WireError
from megatron_rl.protocol.wire import DeadlineExceeded

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
    """The trainer refuses to go on; the text says what it saw and what to look at."""


class Interrupted(SystemExit):
    """One of ENDING_SIGNALS arrived."""


def verifier_name(index: int) -> str:
    """Name of a verifier in its log, to the queue, and to the launcher; index: of its host."""
    return f"verifier-{index}" if index else "verifier"


def die_with_parent() -> None:
    """Ask Linux to send SIGTERM to this process when the process that started it dies."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def note_ready() -> None:
    """Tell the launcher, if there is one, that this process is ready to work."""
    path = os.environ.get(READY_FILE_VARIABLE)
    if path:
        Path(path).touch()


def set_up_logging(role: str, log_dir: Path | None = None) -> None:
    """Log to stderr, and to `log_dir/<role>.log` when a folder is given.

    On SIGUSR1 the process writes the stacks of its threads to stderr, and goes on.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(log_dir / f"{role}.log"))
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s {role} %(levelname)s %(name)s: %(message)s",
        handlers=handlers,
        force=True,
    )
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
        write_failure(EXIT_BAD_INPUT, str(error))
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
        return EXIT_BAD_INPUT
    except (DeadlineExceeded, TrainingStopped) as error:
        log.error("%s", error)
        return EXIT_FAILED
    return 0
