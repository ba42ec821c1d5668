"""Router replay: the trainer's routers take the generators' choices of experts. In trainer ranks.

Trainer and generator round differently, so their routers choose other experts for some tokens, and
the importance ratio of such a token measures rounding rather than the policy. With the generator's
choices the trainer still computes the experts' probabilities itself: gradients reach its routers.
Source: arXiv 2510.11370. Megatron's own replay (transformer/moe/router_replay.py) does the work.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from megatron_rl.weights.layout.slices import Share

UNKNOWN = -1
"""A position without a recorded choice; it predicts nothing."""


def routers_of(chunk: torch.nn.Module) -> list[tuple[int, RouterReplay]]:
    """(layer of the whole model from 0, its router's replay) for each layer of the chunk."""
    return [
        (module.layer_number - 1, module.router_replay)
        for module in chunk.modules()
        if isinstance(module, TopKRouter) and module.router_replay is not None
    ]


class _Choices:
    """Choices of one layer; its router reads them by its only call: `to(device)`."""

    def __init__(self, narrow: Tensor) -> None:
        """narrow: [positions, topk] of any integers, UNKNOWN where none is recorded."""
        self._narrow = narrow

    def to(self, device: torch.device) -> Tensor:
        """[positions, topk] int64 experts; where none is recorded, any that differ."""
        # Widened on the device: the host would wait for a copy that changes the dtype.
        wide = self._narrow.to(device, non_blocking=True).to(torch.int64)
        anywhere = torch.arange(wide.shape[1], device=device)
        return torch.where(wide == UNKNOWN, anywhere, wide)


@contextmanager
def replayed(
    chunk: torch.nn.Module,
    choices: Tensor | None,
    *,
    topk: int,
    share: Share,
    pin: Callable[[Tensor], Tensor],
) -> Iterator[None]:
    """The chunk's routers take `choices` within the block, and when it is recomputed afterwards.

    choices: [positions, layers x topk] of any integers in host memory, UNKNOWN where none is
    recorded; None: the routers choose. share: this rank's part of the positions under sequence
    parallelism. pin: `Backend.pin`. The choices of the chunk's layers are on the model's device
    only during this forward pass, in their own dtype; only those of the running layer become int64.
    """
    routers = routers_of(chunk)
    if choices is None or not routers:
        yield
        return
    own = share.of(len(choices))
    by_layer = choices[own.start : own.stop].unflatten(1, (-1, topk)).transpose(0, 1)
    kept = pin(by_layer[[layer for layer, _ in routers]].contiguous())
    here = kept.to(next(chunk.parameters()).device, non_blocking=True)
    for place, (_, replay) in enumerate(routers):
        if torch.is_grad_enabled():
            # For the recomputation of this microbatch, which may follow many others.
            replay.set_target_indices(_Choices(kept[place]))
        replay.target_topk_idx = _Choices(here[place])
        replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    try:
        yield
    finally:
        # Until the next forward pass routers run only in recomputation, in the order of the forward
        # passes of the microbatches.
        for _, replay in routers:
            replay.target_topk_idx = None
            replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)


def forget_choices(chunks: Iterable[torch.nn.Module]) -> None:
    """Drop all choices, which stay in Megatron's lists without recomputation."""
    for chunk in chunks:
        for _, replay in routers_of(chunk):
            replay.clear_indices()
            replay.clear_router_replay_action()
