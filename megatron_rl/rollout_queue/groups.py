"""Groups of scored rollouts, and the book of training groups: open, in a batch, or dropped.

Used by the rollout queue. `group_end.py` decides which groups are dropped.
"""

import collections
import dataclasses
import hashlib
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from megatron_rl.protocol.prompt import LengthRule
from megatron_rl.protocol.queue_state import UnfinishedGroup
from megatron_rl.protocol.rollout import TurnReturn, given_ranges
from megatron_rl.protocol.rollout_files import RolloutRecord
from megatron_rl.protocol.types import Prompt, Rollout, Sampling, ScoredRollout
from megatron_rl.rollout_queue.admission import UntrainedGroup
from megatron_rl.rollout_queue.tally import RolloutTally

NO_VERSION = -1
"""Version of tokens that no policy of the run sampled."""
_EQUAL_REWARDS = 1e-9


def are_equal(rewards: Sequence[float]) -> bool:
    """Whether all rewards are equal, up to rounding."""
    return max(rewards) - min(rewards) < _EQUAL_REWARDS


@dataclasses.dataclass(frozen=True)
class Origin:
    """The generator and times of a completion, in monotonic seconds."""

    generator: str
    leased_at: float
    done_at: float


@dataclasses.dataclass
class Group:
    """The completions of one prompt. Dictionaries are by index inside the group."""

    number: int
    prompt: Prompt
    sampling: Sampling
    size: int
    opened_version: int
    stage: int = 0
    """The stage whose rules sample and judge the group."""
    length_rule: LengthRule | None = None
    """None: the rule of evaluations."""
    draw: int = 0
    """Number of prompts that were drawn for training before this one."""
    evaluation: str = ""
    """Label of its evaluation; empty for training."""
    draws_by: str = ""
    """Name from which the seeds of its completions are made; "": engines draw without seeds."""
    needs_classes: bool = False
    """The group is complete only with classes of equal answers."""
    zero_variance_on: Literal["reward", "verdict"] = "reward"
    """The quantity that is equal for all completions of a zero-variance group."""
    is_abandoned: bool = False
    """The group was dropped or is not needed: later messages about it are ignored."""
    scored: dict[int, ScoredRollout] = dataclasses.field(default_factory=dict)
    origins: dict[int, Origin] = dataclasses.field(default_factory=dict)
    """Origin of the latest completion."""
    scored_at: dict[int, float] = dataclasses.field(default_factory=dict)
    """When the score arrived, in monotonic seconds."""
    lost: dict[int, str] = dataclasses.field(default_factory=dict)
    """Reason of a completion that could not be graded or trained on."""
    learns_gold: bool = False
    """Training replaces the answers of well-formed completions by the reference answer."""
    replacements: Counter[int] = dataclasses.field(default_factory=Counter)
    """Replacements of completions that could not be graded."""
    classes: dict[int, int] = dataclasses.field(default_factory=dict)
    """Class of equal answers of a scored rollout; -1: no answer."""

    def sampling_of(self, indices: Sequence[int]) -> Sampling:
        """How to sample these completions.

        With seeds a completion that is asked for again gets the same tokens from the same weights.
        A replacement of one that could not be graded gets others.
        """
        if not self.draws_by:
            return self.sampling
        names = [f"{self.draws_by}/{index}/{self.replacements[index]}" for index in indices]
        return msgspec.structs.replace(self.sampling, draw_seeds=tuple(map(_seed_of, names)))

    def add(self, scored: ScoredRollout, now: float) -> None:
        """Add a rollout that is scored now; each index is added once."""
        index = scored.rollout.index
        assert index not in self.scored and 0 <= index < self.size
        self.scored[index] = scored
        self.scored_at[index] = now

    @property
    def is_scored(self) -> bool:
        return len(self.scored) + len(self.lost) == self.size

    @property
    def is_complete(self) -> bool:
        """Whether every rollout is scored or lost, and classes are known if needed."""
        return self.is_scored and (not self.needs_classes or len(self.classes) == len(self.scored))

    @property
    def has_zero_variance(self) -> bool:
        """Whether all advantages are 0: see `has_equal_returns`, or all verdicts are equal."""
        if self.zero_variance_on == "verdict":
            return len({scored.score.is_correct for scored in self.ordered}) == 1
        return has_equal_returns(self.rewards, self.turn_returns)

    @property
    def turn_returns(self) -> list[list[TurnReturn]]:
        """As `returns_of_replies`."""
        return returns_of_replies([scored.rollout for scored in self.ordered], self.rewards)

    @property
    def rewards(self) -> list[float]:
        return [scored.score.reward for scored in self.ordered]

    @property
    def ordered(self) -> list[ScoredRollout]:
        return [self.scored[index] for index in sorted(self.scored)]


def has_equal_returns(
    rewards: Sequence[float], turn_returns: Sequence[Sequence[TurnReturn]]
) -> bool:
    """Whether all that advantages compare is equal, up to rounding.

    Compared are all rewards; where an environment rewards replies, the returns of replies at the
    same turn index instead, whatever their lengths, of the members that got so far.
    """
    if not turn_returns:
        return are_equal(rewards)
    values: collections.defaultdict[int, list[float]] = collections.defaultdict(list)
    for one in itertools.chain(*turn_returns):
        values[one.number].append(one.value)
    return all(map(are_equal, values.values()))


def returns_of_replies(
    members: Sequence[Rollout | RolloutRecord], rewards: Sequence[float]
) -> list[list[TurnReturn]]:
    """By member of a group: the returns of its replies. [] if the environment rewards none.

    A member without such rewards, which a limit has ended, earned its reward at its end.
    """
    if not any(one.turn_returns for one in members):
        return []
    return [
        one.turn_returns or whole_returns(one, reward)
        for one, reward in zip(members, rewards, strict=True)
    ]


def whole_returns(rollout: Rollout | RolloutRecord, reward: float) -> list[TurnReturn]:
    """Returns of the replies of a rollout whose reward comes at its end."""
    turns = rollout.conversation
    if turns and turns[0].asked_before >= 0:
        return [TurnReturn(one.asked_before, one.end - one.start, reward) for one in turns]
    # A record of an earlier release: the order of tokens is that of asking within one chat alone.
    spans = rollout.spans
    # Given tokens are between replies.
    edges = [0, *itertools.chain(*given_ranges(spans)), spans[-1].end]
    replies = zip(edges[::2], edges[1::2], strict=True)
    return [TurnReturn(n, end - start, reward) for n, (start, end) in enumerate(replies)]


def _seed_of(name: str) -> int:
    """A seed below 2**53, as messages take it."""
    digest = hashlib.sha256(name.encode(errors="backslashreplace")).digest()
    return int.from_bytes(digest[:8], "big") >> 11


@dataclasses.dataclass
class DroppedGroups:
    """Counts of the groups and completions dropped since the last batch, without rollouts."""

    tally: RolloutTally = dataclasses.field(default_factory=RolloutTally)
    """Of the scored rollouts."""
    reasons: Counter[str] = dataclasses.field(default_factory=Counter)
    """Groups by reason."""
    completions: Counter[str] = dataclasses.field(default_factory=Counter)
    """Completions by reason."""
    unfinished: list[UnfinishedGroup] = dataclasses.field(default_factory=list)
    """The groups, for a checkpoint: no metrics have counted them yet."""

    def add(self, group: Group, reason: str) -> None:
        self.tally.add(group.ordered, group.prompt.task)
        self.reasons[reason] += 1
        self.unfinished.append(unfinished_of(group))


class GroupBook:
    """The training groups, from opening until the version trained on them is synced."""

    def __init__(self) -> None:
        self._untaken: dict[int, Group] = {}
        self._untaken_of: Counter[int] = Counter()
        """By stage."""
        self._ready: collections.defaultdict[int, set[int]] = collections.defaultdict(set)
        """By stage: numbers of the groups that wait only for a batch."""
        self._in_training: Counter[tuple[int, int]] = Counter()
        """Groups by the step that trains on them, and their stage."""
        self._dropped = DroppedGroups()
        self._abandoned: list[UnfinishedGroup] = []

    @property
    def untaken(self) -> int:
        """Number of groups that are in no batch yet."""
        return len(self._untaken)

    def untaken_of(self, stage: int) -> int:
        return self._untaken_of[stage]

    def ready_of(self, stage: int) -> int:
        """Number of groups of a stage that wait only for a batch."""
        return len(self._ready[stage])

    def note_ready(self, group: Group) -> None:
        """A group is complete and will be trained on."""
        ready = self._ready[group.stage]
        assert group.number in self._untaken and group.number not in ready
        ready.add(group.number)

    def untrained_of(self, stage: int) -> int:
        """Number of groups of a stage that count against the admission bound."""
        taken = sum(count for (_, of), count in self._in_training.items() if of == stage)
        return self.untaken_of(stage) + taken

    @property
    def complete(self) -> int:
        return sum(group.is_complete for group in self._untaken.values())

    def open(self, group: Group) -> None:
        self._untaken[group.number] = group
        self._untaken_of[group.stage] += 1

    def _pop(self, number: int) -> Group:
        group = self._untaken.pop(number)
        self._untaken_of[group.stage] -= 1
        self._ready[group.stage].discard(number)
        return group

    def drop(self, group: Group, reason: str) -> None:
        """Release a group that will not be trained on; `group_end.py` alone calls this."""
        self._pop(group.number)
        group.is_abandoned = True
        self._dropped.add(group, reason)

    def count_left_out(self, reason: str) -> None:
        self._dropped.completions[reason] += 1

    def candidates(self, stage: int = 0) -> list[UntrainedGroup]:
        """The groups of a stage in no batch, for `admission.choose_batch`."""
        return [
            UntrainedGroup(group.opened_version, group.number, group.is_complete)
            for group in self._untaken.values()
            if group.stage == stage
        ]

    def take(self, numbers: list[int], step: int) -> tuple[list[Group], DroppedGroups]:
        """Move groups into the batch of a step; returns them and what was dropped before it."""
        groups = [self._pop(number) for number in numbers]
        self._in_training.update((step, group.stage) for group in groups)
        dropped, self._dropped = self._dropped, DroppedGroups()
        return groups, dropped

    def finish_training(self, version: int) -> None:
        """A version is synced: the groups of the steps before it are trained."""
        for key in [key for key in self._in_training if key[0] < version]:
            del self._in_training[key]

    def unfinished(self) -> list[UnfinishedGroup]:
        """Groups that are neither trained on nor counted as dropped, sorted by number.

        Dropped groups count with the next batch. Abandoned groups are generated again when an ended
        run is resumed for more steps.
        """
        open_groups = [unfinished_of(group) for group in self._untaken.values()]
        groups = [*open_groups, *self._dropped.unfinished, *self._abandoned]
        return sorted(groups, key=lambda group: group.number)

    def abandon(self) -> list[Group]:
        """Remove and return the groups in no batch, at the end of training."""
        groups = [self._pop(number) for number in list(self._untaken)]
        for group in groups:
            group.is_abandoned = True
        self._abandoned += [unfinished_of(group) for group in groups]
        return groups


def unfinished_of(group: Group) -> UnfinishedGroup:
    """The record of a group in a checkpoint."""
    return UnfinishedGroup(group.number, group.prompt.id, group.stage, group.draw)


def has_gold(scored: ScoredRollout) -> bool:
    """Whether the reference answer can replace the answer of a completion."""
    gold = scored.rollout.gold
    return gold is not None and len(gold.token_ids) > 0 and scored.score.is_well_formed
