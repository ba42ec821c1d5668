"""Errors with which the launcher of a node ends because of another node.

Used by the launchers of a run's nodes.
"""

import logging

from megatron_rl.observe.deaths import RoleDied
from megatron_rl.observe.heartbeat import FolderTaken
from megatron_rl.protocol.process import Interrupted
from megatron_rl.protocol.wire import DeadlineExceeded

log = logging.getLogger(__name__)


class NodeLost(DeadlineExceeded):
    """Another node of the run is gone; the text names it and the cause."""


class NodeFailed(DeadlineExceeded):
    """Another node has left the run because a role there failed; the text names both."""


def has_role_failed(error: BaseException) -> bool:
    """Whether a launcher ends for a role of the run; not for a lost node or another launcher."""
    if isinstance(error, NodeLost | FolderTaken):
        return False
    return isinstance(error, RoleDied | DeadlineExceeded)


def end_after(lost: str, signal: int, *, has_failed: bool = False) -> BaseException:
    """The error with which a node ends after another one, so that both have one exit code.

    signal: that ended the other node; 0: none. has_failed: a role of the other node failed.
    """
    if signal:
        log.warning("%s", lost)
        return Interrupted(128 + signal)
    return NodeFailed(lost) if has_failed else NodeLost(lost)


def signal_of(error: BaseException) -> int:
    """The signal that ended the launcher; 0: none."""
    return int(error.code or 0) - 128 if isinstance(error, Interrupted) else 0


def text_of(error: BaseException) -> str:
    """What other nodes are told."""
    if isinstance(error, Interrupted):
        return f"it was ended by signal {signal_of(error)}"
    return str(error) or type(error).__name__
