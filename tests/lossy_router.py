"""The messages of every link, and a ROUTER that loses the first one of each kind it is told to."""

from collections.abc import Callable
from typing import Any

from megatron_rl.protocol.endpoints import BATCHES, ENDPOINTS, Endpoint, names_of
from megatron_rl.protocol.types import AnyMessage, Hold
from megatron_rl.protocol.wire import Router

_ORDERS = {"Hold": ["Hold(True)", "Hold(False)"]}
"""Each value is a separate order."""


def _kinds(endpoint: Endpoint) -> list[str]:
    names = [*names_of(endpoint.router_hears), *names_of(endpoint.dealer_hears)]
    # The launcher ends a process that outlives the loss of its Stop.
    left_out = () if endpoint is BATCHES else ("Stop",)
    return [kind for name in names if name not in left_out for kind in _ORDERS.get(name, [name])]


LINKS = {endpoint.name: _kinds(endpoint) for endpoint in ENDPOINTS}
"""What may be lost, by endpoint."""


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
