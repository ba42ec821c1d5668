"""A value head: learns the value of a prompt by regression, where no group of completions tells it.

Used by trainer ranks. The value is linear in the reference's hidden state after the prompt, so it
costs no separate pass. Every rank of the world holds the same head.
Source: DRO (arXiv 2405.19107), section 3.2, which trains a second network in its place.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_rl.trainer.model.collate import MicroBatch


class ValueHead:
    """V(prompt) = w . features, trained by AdamW on the mean of (target - V)^2 / 2."""

    def __init__(
        self,
        hidden: int,
        lr: float,
        device: torch.device,
        add_up: Callable[[Tensor], Any] = dist.all_reduce,
    ) -> None:
        """hidden: size of the features without the constant. add_up: sums over ranks in place."""
        self._weights = torch.zeros(hidden + 1, device=device)
        self._optimizer = torch.optim.AdamW([self._weights], lr=lr, weight_decay=0.0)
        # The sum of the gradient, and the number of sequences in it.
        self._sums = torch.zeros(hidden + 2, dtype=torch.float64, device=device)
        self._add_up = add_up
        self._has_begun = False

    def values(self, features: Tensor) -> Tensor:
        """[sequences] of features [sequences, hidden + 1], as `prompt_features` makes them."""
        return features @ self._weights

    def begin(self, rewards: Tensor) -> None:
        """Set the value of all prompts to the mean reward, before the first update of a run.

        With values of 0 every completion would exceed its expectation, and become likelier for a
        while. rewards: [sequences] of this rank's share. Collective; later calls do nothing.
        """
        if self._has_begun:
            return
        self._has_begun = True
        total = torch.stack([rewards.double().sum(), rewards.new_tensor(len(rewards)).double()])
        self._add_up(total)
        self._weights[-1] = total[0] / total[1].clamp_min(1)

    def clear(self) -> None:
        """Forget the sequences added since the last step."""
        self._sums.zero_()

    def add(self, features: Tensor, residuals: Tensor, is_counted: Tensor) -> None:
        """Add sequences to the next step; only one rank of the world may add each sequence.

        residuals: [sequences] float, target - value. is_counted: [sequences] bool.
        """
        residuals = residuals.masked_fill(~is_counted, 0)
        self._sums[:-1] -= (residuals[:, None] * features).sum(0)
        self._sums[-1] += is_counted.sum()

    def step(self) -> None:
        """One step on the added sequences; collective over all ranks."""
        self._weights.grad = self.gradient().to(self._weights.dtype)
        self._optimizer.step()
        self.clear()

    def gradient(self) -> Tensor:
        """[hidden + 1] float64: the mean over the sequences added on all ranks. Collective."""
        total = self._sums.clone()
        self._add_up(total)
        return total[:-1] / total[-1].clamp_min(1)

    def state(self) -> dict[str, Any]:
        """For a checkpoint, on the host; the same on every rank."""
        moments = self._optimizer.state.get(self._weights, {})
        return {
            "weights": self._weights.cpu().clone(),
            "moments": {name: value.detach().cpu().clone() for name, value in moments.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a state."""
        self._has_begun = True
        self._weights.copy_(state["weights"])
        moments = {name: value.clone() for name, value in state["moments"].items()}
        for name in moments.keys() - {"step"}:
            moments[name] = moments[name].to(self._weights.device)
        if moments:
            self._optimizer.state[self._weights] = moments


def prompt_features(selected: Tensor, batch: MicroBatch) -> Tensor:
    """[sequences, hidden + 1] float32: normalised states that predict the first tokens, and a 1.

    selected: [completion tokens of this context rank, hidden]; collective over context ranks.
    """
    firsts = first_tokens(batch.target_ends)
    states = selected.detach().float()
    if batch.places is None:
        found = states[firsts]
    else:
        is_first = torch.isin(batch.places, firsts)
        found = states.new_zeros(len(firsts), states.shape[1])
        found[torch.searchsorted(firsts, batch.places[is_first])] = states[is_first]
        dist.all_reduce(found, group=parallel_state.get_context_parallel_group())
    directions = torch.nn.functional.normalize(found, dim=1)
    return torch.cat([directions, directions.new_ones(len(firsts), 1)], 1)


def first_tokens(ends: Tensor) -> Tensor:
    """[sequences]: the first completion token of each, where `ends` is one after the last."""
    return torch.cat([ends.new_zeros(1), ends[:-1]])
