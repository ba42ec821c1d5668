"""Whether a complete group is trained on, and from what: its rewards, or the reference answer.

Used by the rollout queue.
"""

import logging

from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.protocol.types import ScoredRollout
from megatron_rl.rollout_queue.groups import ZERO_VARIANCE, Group, GroupBook
from megatron_rl.rollout_queue.ungraded import DropObservers

log = logging.getLogger(__name__)


class Selection:
    """Looks at each training group as it becomes complete."""

    def __init__(self, cfg: AlgorithmConfig, book: GroupBook, tellers: DropObservers) -> None:
        self._gold = cfg.gold.groups
        self._drops_zero_variance = cfg.zero_variance_groups == "drop"
        self._book = book
        self._tellers = tellers

    def reason_to_drop(self, group: Group) -> str:
        """Why a group is not trained on; empty when it is, as `group.learns_gold` then says. Asked
        again of a group that waited for its classes, it says the same.

        Well-formed completions that have no place for the reference answer are left out of a group
        that learns it, recorded and counted.
        """
        if self._may_learn_gold(group) and any(map(has_gold, group.ordered)):
            group.learns_gold = True
            self._leave_out_without_gold(group)
            return ""
        return ZERO_VARIANCE if group.has_zero_variance and self._drops_zero_variance else ""

    def _may_learn_gold(self, group: Group) -> bool:
        if self._gold == "unrewarded":
            return not any(scored.score.is_correct for scored in group.ordered)
        return self._gold == "all"

    def _leave_out_without_gold(self, group: Group) -> None:
        for scored in group.ordered:
            gold = scored.rollout.gold
            if gold is None or not scored.score.is_well_formed or has_gold(scored):
                continue
            self._tellers.recorder.write_left_out(group, scored, gold.fault)
            self._tellers.activity.add_left_out(gold.fault)
            self._book.count_left_out(gold.fault)
            index = scored.rollout.index
            group.lost[index] = gold.fault
            del group.scored[index]


def has_gold(scored: ScoredRollout) -> bool:
    """Whether a completion can be trained on with the reference answer in the place of its own."""
    gold = scored.rollout.gold
    return gold is not None and len(gold.token_ids) > 0 and scored.score.is_well_formed
