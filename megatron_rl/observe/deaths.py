"""Explains the death of a role at the terminal.

Used by `supervisor.py`, in the launcher. A role may have several processes: torchrun and its ranks.
"""

import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.cli.command_line.command import PROGRAM
from megatron_rl.cli.command_line.printing import outlive_terminal
from megatron_rl.config.errors import printable
from megatron_rl.protocol.failure import Failure
from megatron_rl.protocol.process import EXIT_BAD_INPUT, EXIT_FAILED, Interrupted
from megatron_rl.protocol.wire import DeadlineExceeded

TAIL_LINES = 15
_LAST_BYTES = 1 << 20
SAME_COMMAND = "The same command"
"""Begins the last line of a run that ended early, which tells how to resume."""
CORRECTED_COMMAND = "The corrected command"
"""In its place after bad input, which would end the same command again."""
# torchrun prints the exit code of a failed rank, then its own traceback and a list of ranks.
_TORCHRUN_VERDICT = re.compile(r"failed \(exitcode: (-?\d+)\)")
_TORCHRUN_LISTED = re.compile(r"rank +: (\d+) \(local_rank: \d+\)\s+exitcode +: -(\d+) ")
# torchrun ends the remaining ranks with it.
_SIGTERM = 15


@dataclass(frozen=True)
class Ending:
    """Facts about a role that ended."""

    name: str
    exit_code: int
    """Exit code of the started process; -N when signal N ended it."""
    log_path: Path
    log_start: int
    """Bytes of the log from earlier sessions."""

    @property
    def code(self) -> int:
        """The exit code; -N when signal N ended a rank of torchrun, which ends with an error."""
        killed = _killed_ranks(_output_of(self))
        return -killed[0][1] if killed else self.exit_code


class RoleDied(RuntimeError):
    """The death of a role ends the run; the text shows the exit code and the first error."""

    def __init__(self, name: str, exit_code: int, text: str) -> None:
        super().__init__(text)
        self.name = name
        self.exit_code = exit_code


class RunFailed(RuntimeError):
    """An error ended the run after its first process had started."""


def until_death(work: Callable[[], None], last_words: Callable[[], str] = lambda: "") -> int:
    """Run `work`; exit code 0, or 1 after a death or a missed deadline.

    last_words: how to resume, logged after an error or signal. Input errors pass through: they are
    raised only before any process has started (exit code 2).
    """
    log = logging.getLogger(PROGRAM)
    try:
        with outlive_terminal():
            work()
    except Interrupted as stop:
        log.error("%s", f"ended by signal {int(str(stop.code)) - 128}. {last_words()}".rstrip())
        raise
    except (RoleDied, RunFailed, DeadlineExceeded) as error:
        is_input = isinstance(error, RoleDied) and error.exit_code == EXIT_BAD_INPUT
        advice, how = "", last_words()
        if is_input:
            advice = "Correct the input first: it would end the run again."
            how = how.replace(SAME_COMMAND, CORRECTED_COMMAND)
        for text in filter(None, [str(error), advice, how]):
            log.error("%s", text)
        return EXIT_FAILED
    return 0


def explain_death(
    ending: Ending,
    first: Failure | None,
    remark: str = "",
    memory: Callable[[int], str] = lambda exit_code: "",
) -> RoleDied:
    """The error to raise for a role that died.

    memory: says what lack of memory has to do with an exit code.

    first: the earliest failure noted by a process of the run. A process ended by a signal notes
    none, and then the failures of other processes count as consequences.
    """
    output, code, place = _output_of(ending), ending.exit_code, ""
    if code == EXIT_FAILED and (verdicts := _TORCHRUN_VERDICT.findall(output)):
        code = int(verdicts[-1])
    killed = _killed_ranks(output)
    if killed:
        (rank, number), first = killed[0], None
        code, place = -number, f" of rank {rank}"
    elif code < 0:
        first = None
    elif first is not None:
        code = first.exit_code
    how = "; ".join(filter(None, [how_it_ended(code) + place, memory(code), remark]))
    if first is None:
        shown, source = tail(output), f"The end of {ending.log_path}"
    else:
        shown = _last_lines(first.text)
        source = f"{first.who} failed first (all output: {ending.log_path})"
    lines = "\n".join(f"    {line}" for line in shown) or "    (nothing)"
    return RoleDied(ending.name, code, f"{ending.name} ended with {how}. {source}:\n{lines}")


def _output_of(ending: Ending) -> str:
    has_log = ending.log_path.exists()
    return last_output(ending.log_path, ending.log_start) if has_log else ""


def _killed_ranks(output: str) -> list[tuple[str, int]]:
    """(rank, signal) of the ranks that torchrun lists as killed by others."""
    listed = ((rank, int(number)) for rank, number in _TORCHRUN_LISTED.findall(output))
    return [(rank, number) for rank, number in listed if number != _SIGTERM]


def how_it_ended(exit_code: int) -> str:
    """`exit code N`, or `signal N` for a negative code."""
    return f"exit code {exit_code}" if exit_code >= 0 else f"signal {-exit_code}"


def tail(output: str) -> list[str]:
    """The last lines of a role's output, without the traceback of torchrun itself."""
    verdicts = list(_TORCHRUN_VERDICT.finditer(output))
    if verdicts:
        output = output[: output.rfind("\n", 0, verdicts[-1].start()) + 1]
    return _last_lines(output)


def _last_lines(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.strip()][-TAIL_LINES:]
    # Logs may contain text of a model.
    return [printable(line) for line in lines]


def last_output(log_path: Path, start: int) -> str:
    """At most _LAST_BYTES from the end of a log, after `start` bytes."""
    with log_path.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - _LAST_BYTES))
        return file.read(_LAST_BYTES).decode(errors="replace")
