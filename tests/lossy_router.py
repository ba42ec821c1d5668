"""The messages of every link, and a ROUTER that loses the first one of each kind it is told to."""

from collections.abc import Callable
from typing import Any

from megatron_rl.protocol.types import AnyMessage, Hold
from megatron_rl.protocol.wire import Router

LINKS = {
    "prompts": (
        "GeneratorReady", "Lease", "Cancel", "Hold(True)", "Hold(False)", "RolloutDone",
        "RolloutFailed",
    ),
    "verify": (
        "VerifierReady", "ScoreRequest", "ScoreDone", "ScoreFailed", "ClassRequest", "ClassDone",
    ),
    "batches": ("NextBatch", "RankBatch", "WeightsSynced", "SaveState", "QueueState", "Stop"),
    "weights": (
        "Hello", "Receive", "PassOn", "Load", "Fence", "Ping", "JoinGroup", "StartRequest",
        "MayStart", "Pause", "Release", "Reclaim", "Bucket", "Resume", "LeaveGroup", "Ack",
        "Failed",
    ),
    "nodes": ("NodeState", "RunPhase"),
    "scorer": ("LogprobRequest", "LogprobsDone", "LogprobsFailed"),
}  # fmt: skip
"""What may be lost. Stop of prompts, verify and scorer: the launcher ends what outlives it."""


def kind_of(message: AnyMessage) -> str:
    """Type of a message, with its value where each value is a separate order."""
    name = type(message).__name__
    return f"{name}({message.is_held})" if isinstance(message, Hold) else name


class Loss:
    """Which kinds are still to be lost, what was lost, and what was sent."""

    def __init__(self, losing: set[str], name_of: Callable[[Any], str] = kind_of) -> None:
        self.losing, self.name_of = losing, name_of
        self.lost = list[tuple[str, AnyMessage]]()
        """(peer, message)"""
        self.sent = list[tuple[str, AnyMessage]]()

    @property
    def kinds(self) -> list[str]:
        """Kinds that were lost, sorted."""
        return sorted(self.name_of(message) for _, message in self.lost)

    def takes(self, peer: str, message: AnyMessage) -> bool:
        """Whether this message is lost now."""
        if self.name_of(message) not in self.losing:
            return False
        self.losing.discard(self.name_of(message))
        self.lost.append((peer, message))
        return True


class LossyRouter(Router):
    """Loses messages in both directions."""

    def __init__(self, *args: Any, loss: Loss, **options: Any) -> None:
        super().__init__(*args, **options)
        self.loss = loss

    def send(self, peer: str, message: AnyMessage) -> bool:
        if self.loss.takes(peer, message):
            return True
        self.loss.sent.append((peer, message))
        return super().send(peer, message)

    def receive(self, timeout_s: float) -> tuple[str, AnyMessage] | None:
        while (received := super().receive(timeout_s)) is not None:
            if not self.loss.takes(*received):
                return received
        return None
