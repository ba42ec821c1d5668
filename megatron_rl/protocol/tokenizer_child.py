"""Calls functions that need a tokenizer in a child process.

Used by the launcher, which keeps transformers and its threads out of a process that runs as long as
the run.
"""

from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.process import die_with_parent
from megatron_rl.protocol.render import forbid_torch
from megatron_rl.protocol.wire import DeadlineExceeded

Result = TypeVar("Result")


def call_in_child(
    function: Callable[..., Result], *arguments: Any, what: str, limit_s: float
) -> Result:
    """Call a function in a child process; function, arguments and result are pickled.

    what: describes the call in errors. Raises the function's InputError; DeadlineExceeded;
    RuntimeError if the child dies.
    """
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(sender, function, arguments))
    child.start()
    # Only the child has the sending end now, so its death ends the wait.
    sender.close()
    try:
        if not receiver.poll(limit_s):
            raise DeadlineExceeded(f"{what} took over {limit_s:.0f} s")
        found = receiver.recv()
    except EOFError as error:
        child.join(limit_s)
        raise RuntimeError(f"{what}: exit code {child.exitcode}") from error
    finally:
        child.kill()
        child.join()
        receiver.close()
    if isinstance(found, InputError):
        raise found
    return found


def _answer(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """In the child: send the result or the InputError."""
    die_with_parent()
    forbid_torch()
    try:
        sender.send(function(*arguments))
    except InputError as error:
        sender.send(error)
