"""Log of the mean of exp over the members of groups. Pure; used by trainer ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def log_mean_exp_of_others(values: Tensor, is_listed: Tensor) -> Tensor:
    """[groups, members]: of each member, over the listed ones of its group but itself.

    values: [groups, members] float64. Without others: not a number, or infinite.
    """
    members = values.shape[1]
    listed = values.masked_fill(~is_listed, -math.inf)
    counts = is_listed.double().sum(-1, keepdim=True)
    is_own = values.new_ones(members).diag().bool()
    # [groups, i, members]: without i.
    others = listed[:, None].expand(-1, members, -1).masked_fill(is_own, -math.inf)
    return others.logsumexp(-1) - (counts - 1).log()
