"""Experts that the generators chose, taken again by the trainer's routers. Runs in trainer ranks.

Trainer and generator round differently, so their routers choose other experts for some tokens, and
the importance ratio of such a token measures rounding rather than the policy. With the generator's
choices the trainer still computes the experts' probabilities itself: gradients reach its routers.
Source: arXiv 2510.11370. Megatron's own replay (transformer/moe/router_replay.py) does the work.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from megatron_rl.weights.layout.slices import Share

UNKNOWN = -1
"""A position that no choice is recorded for: nothing is predicted from it."""


def routers_of(chunk: torch.nn.Module) -> list[tuple[int, RouterReplay]]:
    """(layer of the whole model from 0, what replays in its router) of the chunk's layers."""
    return [
        (module.layer_number - 1, module.router_replay)
        for module in chunk.modules()
        if isinstance(module, TopKRouter) and module.router_replay is not None
    ]


class _Choices:
    """Choices of one layer, until its router takes them by its only call: `to(device)`."""

    def __init__(self, narrow: Tensor) -> None:
        """narrow: [positions, topk] of any integers, UNKNOWN where none is recorded."""
        self._narrow = narrow

    def to(self, device: torch.device) -> Tensor:
        """[positions, topk] int64: which experts, where none is recorded any different ones."""
        wide = self._narrow.to(device, torch.int64)
        anywhere = torch.arange(wide.shape[1], device=device)
        return torch.where(wide == UNKNOWN, anywhere, wide)


@contextmanager
def replayed(
    chunk: torch.nn.Module, choices: Tensor | None, *, topk: int, share: Share
) -> Iterator[None]:
    """Within it the chunk's routers take `choices`; so does what is recomputed of it afterwards.

    choices: [positions, layers x topk] of any integers and on any device, UNKNOWN where none is
    recorded; None: the routers choose. share: this rank's part of the positions under sequence
    parallelism. On the model's device they are only during this forward pass, as narrow as they
    came; only those of the layer that is running are widened.
    """
    if choices is None:
        yield
        return
    own = share.of(len(choices))
    kept = choices[own.start : own.stop].unflatten(1, (-1, topk))
    here = kept.to(next(chunk.parameters()).device, non_blocking=True)
    routers = routers_of(chunk)
    for layer, replay in routers:
        # Also what it takes when this microbatch is recomputed, perhaps after many others.
        replay.set_target_indices(_Choices(kept[:, layer]))
        replay.target_topk_idx = _Choices(here[:, layer])
        replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    try:
        yield
    finally:
        # Until the next forward pass, routers only run to recompute, microbatch after microbatch in
        # the order of their forward passes.
        for _, replay in routers:
            replay.target_topk_idx = None
            replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)


def forget_choices(chunks: Iterable[torch.nn.Module]) -> None:
    """Let go of all choices: without recomputation they stay in Megatron's lists."""
    for chunk in chunks:
        for _, replay in routers_of(chunk):
            replay.clear_indices()
            replay.clear_router_replay_action()
