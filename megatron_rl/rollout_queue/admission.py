"""When a group may be opened, leased and trained on. Pure; used by the rollout queue.

Terms:

- `synced` is the policy version of the last WeightsSynced message. Step k trains on batch k and
  ends with version k + 1.
- `opened_version` of a group is the synced version when it was opened. In strict mode only
  generators with that version get leases, so no token is older. Otherwise a generator may lag, and
  a token may be older by up to `max_staleness`.
- The deadline of a group is `opened_version + max_staleness`: the last batch in which its staleness
  is within the bound.
- A group is *untrained* from its opening until the version made from it is synced, or until it is
  dropped.

Why the strict mode guarantees staleness <= max_staleness (G groups a batch, s = max_staleness):
call a set of untrained groups *timely* at step k when no deadline is before k and, for every
j >= k, those with deadline <= j number at most (j - k + 1) * G: they fit into the batches k .. j.

1. Opening keeps the set timely. Between WeightsSynced(v) and WeightsSynced(v + 1) a new group
   has the latest deadline of all, v + s, so only j >= v + s gets tighter; `may_open_group` keeps
   the untrained groups, the batch in training included, within (s + 1) * G, the room of v .. v + s.
2. Dropping zero-variance groups only shrinks the set.
3. `choose_batch` forms batch k only if what remains is timely at step k + 1.
4. It never waits forever: when all are complete, taking those with the earliest deadlines leaves a
   timely set timely (the exchange argument of earliest-deadline-first with unit jobs).

A set timely at k + 1 holds no group with deadline <= k, so every group is trained in time. It is
not enough to wait for the groups due in batch k: if two batches' worth of slow groups are due in
the batches k and k + 1, newer groups could fill k and leave too many for k + 1.

With stages (`schedule.py`) a batch holds groups of one stage, and the argument holds for each stage
with its own batches, G and s. A stage that begins with batch f may open groups under an earlier
version v, but only for the batches f .. v + s, and no more than its remaining batches take
(`TrainingGroups.due_stage`). So in 1. new groups still have the latest deadline of their stage. A
stage that a plateau ends keeps as many batches as its open groups fill.
"""

from collections.abc import Iterable
from typing import NamedTuple


class UntrainedGroup(NamedTuple):
    """Sorts groups in the order of training, so the order of the fields matters."""

    opened_version: int
    number: int
    """Grows in the order of opening."""
    is_complete: bool


def may_open_group(untrained: int, *, max_staleness: int, prompts_per_batch: int) -> bool:
    """Whether there is room for one more untrained group in (max_staleness + 1) batches."""
    return untrained < (max_staleness + 1) * prompts_per_batch


def is_group_needed(waiting: int, *, next_step: int, steps: int, prompts_per_batch: int) -> bool:
    """Whether the batches from `next_step` on need more groups than the `waiting` ones."""
    return waiting < (steps - next_step) * prompts_per_batch


class LeaseRules(NamedTuple):
    """Which generators may take which groups now."""

    synced: int
    max_staleness: int
    is_strict: bool
    evaluators: frozenset[str] = frozenset()
    """Generators that only evaluate; if empty, all generators train and evaluate."""
    evaluated: int = -1
    """Version that the evaluators hold."""

    def oldest_version(self, *, is_evaluation: bool) -> int:
        """Lowest policy version with which a generator gets completions of a group.

        The rule applies when the completion is leased: later than the opening, so `synced` may only
        be newer. An evaluation measures exactly the synced version, or that of the evaluators.
        """
        if is_evaluation and self.evaluators:
            return self.evaluated
        lag = 0 if self.is_strict or is_evaluation else self.max_staleness
        return max(self.synced - lag, 0)


def choose_batch(
    groups: Iterable[UntrainedGroup],
    *,
    step: int,
    prompts_per_batch: int,
    max_staleness: int,
    is_strict: bool,
) -> list[int] | None:
    """Numbers of the groups of batch `step`, oldest complete ones first; None to wait.

    groups: untrained groups that are in no batch yet.
    """
    groups = sorted(groups)
    chosen = [group for group in groups if group.is_complete][:prompts_per_batch]
    if len(chosen) < prompts_per_batch:
        return None
    if is_strict:
        taken = {group.number for group in chosen}
        deadlines = sorted(
            group.opened_version + max_staleness for group in groups if group.number not in taken
        )
        if not _is_timely(deadlines, step + 1, prompts_per_batch):
            return None
    return [group.number for group in chosen]


def _is_timely(deadlines: list[int], step: int, prompts_per_batch: int) -> bool:
    """Whether groups with these ascending deadlines fit into the batches from `step` on."""
    return all(
        position < (deadline - step + 1) * prompts_per_batch
        for position, deadline in enumerate(deadlines)
    )
