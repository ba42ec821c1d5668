"""A circuit breaker of grading: ends a run in which next to nothing of a kind can be graded. Pure.

Used by the rollout queue. One completion that cannot be graded is dropped and counted, and a model
may well learn to write such ones. It is our own fault, and the run's end, when they come of many
unrelated prompts, and hardly any other comes. So it counts in *groups*, each with the same weight,
however many attempts it burns, and apart for each task, and for the tasks that need the same worker
pools: what is graded well elsewhere says nothing about a compiler that is broken.

Of each kind the last expert.queue.breaker_window_groups groups count. The run ends when

- the completions that cannot be graded are expert.queue.breaker_share of a group on average, and
- there are some in groups of expert.queue.breaker_min_prompts different prompts (of as many
  groups, where a run has fewer prompts and all of them fail), and
- twice as many completions as that have come, since the first few decide nothing.

Completions that the host had no time for (NOT_GRADED) count neither way: an overloaded host is no
broken verifier, and may have time again. `find_trouble` says what is wrong and what to do.
"""

import collections
import dataclasses
from pathlib import Path

from megatron_rl.config.reward import RewardConfig
from megatron_rl.config.tree import QueueConfig
from megatron_rl.protocol.types import NOT_GRADED, Prompt
from megatron_rl.rollout_queue.diagnosis import Finding
from megatron_rl.rollout_queue.failures import ScoreFailure, TooManyFailures
from megatron_rl.rollout_queue.groups import Group

_COMPLETIONS_A_PROMPT = 2
"""Of so many for each prompt of expert.queue.breaker_min_prompts a verdict is made."""
_TROUBLE_SHARE, _TROUBLE_MIN = 0.1, 8
"""From here on completions without a grade are told of."""
_SHOWN_CHARS = 300


@dataclasses.dataclass
class _Counts:
    """Completions of one group."""

    prompt_id: str
    scored: int = 0
    ungradable: int = 0
    not_graded: int = 0

    @property
    def judged(self) -> int:
        """Those that tell whether grading works."""
        return self.scored + self.ungradable


class _Window:
    """The last groups of a kind, by the time of their last completion."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._groups: collections.OrderedDict[int, _Counts] = collections.OrderedDict()

    def of(self, group: Group) -> _Counts:
        """The counts of a group, which is now the newest."""
        counts = self._groups.setdefault(group.number, _Counts(group.prompt.id))
        self._groups.move_to_end(group.number)
        if len(self._groups) > self._size:
            self._groups.popitem(last=False)
        return counts

    @property
    def groups(self) -> list[_Counts]:
        """The counts, oldest first."""
        return list(self._groups.values())


class CircuitBreaker:
    """Counts what is graded and what is not, by task and by worker pools."""

    def __init__(self, config: QueueConfig, reward: RewardConfig, *, prompts: int) -> None:
        """prompts: how many the run has."""
        self._config = config
        self._prompts = prompts
        self._kinds = {task: _kinds_of(task, reward) for task in reward.all_tasks}
        self._pools = {task: reward.steps_of(task)[0].pool for task in reward.all_tasks}
        self._windows: dict[str, _Window] = {}
        self._last: dict[str, tuple[ScoreFailure, Path]] = {}
        """By task: what failed last, and where it is recorded."""

    def note_scored(self, group: Group) -> None:
        """A completion of a group is scored."""
        for window in self._windows_of(group.prompt):
            window.of(group).scored += 1

    def note_failed(self, failure: ScoreFailure, record: Path) -> None:
        """A completion cannot be graded, as `record` tells. Raises TooManyFailures."""
        group = failure.group
        self._last[group.prompt.task] = failure, record
        for window in self._windows_of(group.prompt):
            counts = window.of(group)
            if failure.reason == NOT_GRADED:
                counts.not_graded += 1
            else:
                counts.ungradable += 1
        if failure.reason != NOT_GRADED:
            for kind in self._kinds[group.prompt.task]:
                self._check(kind, failure, record)

    def _windows_of(self, prompt: Prompt) -> list[_Window]:
        size = self._config.breaker_window_groups
        kinds = self._kinds[prompt.task]
        return [self._windows.setdefault(kind, _Window(size)) for kind in kinds]

    def _check(self, kind: str, failure: ScoreFailure, record: Path) -> None:
        groups = [counts for counts in self._windows[kind].groups if counts.judged]
        failing = [counts for counts in groups if counts.ungradable]
        prompts = len({counts.prompt_id for counts in failing})
        judged = sum(counts.judged for counts in groups)
        share = sum(counts.ungradable / counts.judged for counts in groups) / len(groups)
        config, least = self._config, self._config.breaker_min_prompts
        is_widespread = prompts >= min(least, self._prompts) and len(failing) >= least
        is_known = judged >= _COMPLETIONS_A_PROMPT * least
        if not (is_widespread and is_known and share >= config.breaker_share):
            return
        raise TooManyFailures(
            f"almost no completion of {kind} can be graded: "
            f"{sum(counts.ungradable for counts in groups)} of {judged} failed in the last "
            f"{len(groups)} groups, of {prompts} different prompts; {share:.0%} of a group on "
            f"average (limits: expert.queue.breaker_share = {config.breaker_share:g}, "
            f"breaker_window_groups = {config.breaker_window_groups}, "
            f"breaker_min_prompts = {least}). The last one, of prompt "
            f"{failure.group.prompt.id!r}: {_shown(failure)}. {record} has the text and detail of "
            "each. Read the verifier's log and run `megatron-rl doctor` to find what is missing; "
            f"`megatron-rl verify {record}` grades them again. Then repeat the run's command: it "
            "resumes from its newest checkpoint"
        )

    def find_trouble(self) -> Finding | None:
        """What is wrong where much cannot be graded, and the fix; the worst task's."""
        found = [
            (share, task, counts)
            for task in self._last
            if (counts := self._sum_of_task(task)) and (share := _share_lost(counts))
        ]
        if not found:
            return None
        _, task, counts = max(found, key=lambda trouble: trouble[:2])
        failure, record = self._last[task]
        lost, pool = counts.ungradable + counts.not_graded, self._pools[task]
        head = (
            f"{lost} of {counts.scored + lost} completions of the last groups of task {task!r} "
            f"got no grade ({counts.ungradable} ungradable, {counts.not_graded} not_graded): they "
            f"are dropped, never wrong. The last one: {_shown(failure)}."
        )
        if counts.not_graded >= counts.ungradable:
            return Finding(
                NOT_GRADED,
                f"{head} Cause: the host had no time to grade them. Fix: end other work on the "
                f"verifier's host, give it one of its own or more cores, lower "
                f"verifier.{pool}.workers, or raise verifier.{pool}.timeout_s; see {record}.",
            )
        return Finding(
            "ungradable",
            f"{head} Cause: a fault in the verifier, in tests of the prompts or in a reward of "
            "your own, or a trick that the model has learned. Fix: look at 'text' and 'detail' "
            f"in {record}, and into the verifier's log.",
        )

    def _sum_of_task(self, task: str) -> _Counts:
        total = _Counts("")
        for counts in self._windows[_task_kind(task)].groups:
            total.scored += counts.scored
            total.ungradable += counts.ungradable
            total.not_graded += counts.not_graded
        return total


def _kinds_of(task: str, reward: RewardConfig) -> tuple[str, str]:
    pools = sorted({step.pool for step in reward.steps_of(task)})
    return _task_kind(task), f"worker pool {' and '.join(map(repr, pools))}"


def _task_kind(task: str) -> str:
    return f"task {task!r}"


def _share_lost(counts: _Counts) -> float:
    """Share of completions without a grade; 0 where they are too few to be told of."""
    lost = counts.ungradable + counts.not_graded
    share = lost / (lost + counts.scored)
    return share if lost >= _TROUBLE_MIN and share >= _TROUBLE_SHARE else 0.0


def _shown(failure: ScoreFailure) -> str:
    """What was said, in printable characters: a completion may have a hand in it."""
    return repr(failure.detail[:_SHOWN_CHARS])
