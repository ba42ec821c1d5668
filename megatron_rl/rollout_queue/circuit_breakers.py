"""Circuit breakers that end a run: for grading, and for failing groups. Pure.

Used by the rollout queue.

`CircuitBreaker` ends a run in which almost no completion of a kind can be graded. One ungradable
completion is only dropped and counted, because a model may learn to write some. If many unrelated
prompts have them and almost no completion is graded, the fault is our own. A kind is a task, or the
tasks that need the same worker pools: good grades of other tasks say nothing about a broken
compiler. The breaker counts the last expert.queue.breaker_window_groups groups of each kind, each
with the same weight. It ends the run when

- on average expert.queue.breaker_share of the completions of a group cannot be graded, and
- such groups have expert.queue.breaker_min_prompts different prompts (or all prompts of a smaller
  run, in as many groups), and
- at least twice that number of completions were judged.

NOT_GRADED completions do not count: an overloaded node is not a broken verifier.
"""

import collections
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.config.reward import RewardConfig
from megatron_rl.config.tree import QueueConfig
from megatron_rl.protocol.types import NOT_GRADED
from megatron_rl.rollout_queue.diagnosis import Finding
from megatron_rl.rollout_queue.drop_reasons import (
    CLASSES_NOT_GRADED,
    CLASSES_UNGRADABLE,
    ENVIRONMENT_FAILED,
    GroupFailure,
    ScoreFailure,
    TooManyFailures,
)
from megatron_rl.rollout_queue.groups import Group

_COMPLETIONS_A_PROMPT = 2
"""Minimum judged completions per prompt of expert.queue.breaker_min_prompts."""
_TROUBLE_SHARE, _TROUBLE_MIN = 0.1, 8
"""Completions without a grade are reported from this share and this number on."""
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
        """Completions that show whether grading works."""
        return self.scored + self.ungradable


class CircuitBreaker:
    """Counts completions with and without a grade, by task and by worker pools."""

    def __init__(self, config: QueueConfig, reward: RewardConfig, *, prompts: int) -> None:
        """prompts: number of prompts of the run."""
        self._config = config
        self._prompts = prompts
        self._kinds = {task: _kinds_of(task, reward) for task in reward.all_tasks}
        self._pools = {
            task: steps[0].pool if (steps := reward.steps_of(task)) else ""
            for task in reward.all_tasks
        }
        self._environments = reward.environments
        self._windows: dict[str, collections.OrderedDict[int, _Counts]] = {}
        """By kind: the last groups by number, sorted by the time of their last completion."""
        self._last: dict[str, tuple[ScoreFailure, Path]] = {}
        """By task: the last failure, and the file that records it."""

    def note_scored(self, group: Group) -> None:
        for counts in self._counts_of(group):
            counts.scored += 1

    def note_failed(self, failure: ScoreFailure, record: Path) -> None:
        """A completion cannot be graded; `record` is its file. Raises TooManyFailures."""
        task = failure.group.prompt.task
        self._last[task] = failure, record
        for counts in self._counts_of(failure.group):
            if failure.reason == NOT_GRADED:
                counts.not_graded += 1
            else:
                counts.ungradable += 1
        if failure.reason != NOT_GRADED:
            for kind in self._kinds[task]:
                self._check(kind, failure, record)

    def _counts_of(self, group: Group) -> Iterator[_Counts]:
        """The counts of a group in each of its windows, where it becomes the newest."""
        for kind in self._kinds[group.prompt.task]:
            window = self._windows.setdefault(kind, collections.OrderedDict())
            yield window.setdefault(group.number, _Counts(group.prompt.id))
            window.move_to_end(group.number)
            if len(window) > self._config.breaker_window_groups:
                window.popitem(last=False)

    def _check(self, kind: str, failure: ScoreFailure, record: Path) -> None:
        groups = [counts for counts in self._windows[kind].values() if counts.judged]
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
            f"each. {self._advice(failure, record)}. Then repeat the run's command: it resumes "
            "from its newest checkpoint"
        )

    def _advice(self, failure: ScoreFailure, record: Path) -> str:
        if failure.reason == ENVIRONMENT_FAILED:
            return "Read logs/environments-*.log, the output of environments"
        return (
            "Read the verifier's log and run `megatron-rl doctor` to find what is missing; "
            f"`megatron-rl verify {record}` grades them again"
        )

    def find_trouble(self) -> Finding | None:
        """The likely fault and fix of the task with the largest share of lost completions."""
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
        if failure.reason == ENVIRONMENT_FAILED:
            return Finding(
                ENVIRONMENT_FAILED,
                f"{head} Cause: the environment {self._environments[task]!r} fails. Fix: read the "
                "generators' logs and logs/environments-*.log",
            )
        if counts.not_graded >= counts.ungradable:
            return Finding(
                NOT_GRADED,
                f"{head} Cause: the host had no time to grade them. Fix: end other work on the "
                f"verifier's node, give it a node for itself or more cores, lower "
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
        for counts in self._windows[_task_kind(task)].values():
            total.scored += counts.scored
            total.ungradable += counts.ungradable
            total.not_graded += counts.not_graded
        return total


def _kinds_of(task: str, reward: RewardConfig) -> tuple[str, str]:
    if environment := reward.environments.get(task):
        return _task_kind(task), f"environment {environment!r}"
    pools = sorted({step.pool for step in reward.steps_of(task)})
    return _task_kind(task), f"worker pool {' and '.join(map(repr, pools))}"


def _task_kind(task: str) -> str:
    return f"task {task!r}"


def _share_lost(counts: _Counts) -> float:
    """Share of completions without a grade; 0 if too few to report."""
    lost = counts.ungradable + counts.not_graded
    share = lost / (lost + counts.scored)
    return share if lost >= _TROUBLE_MIN and share >= _TROUBLE_SHARE else 0.0


def _shown(failure: ScoreFailure) -> str:
    """The error text in printable characters, since it may quote a completion."""
    return repr(failure.detail[:_SHOWN_CHARS])


class FailureCount:
    """Failed groups minus completed groups, so that a few hard prompts do not end the run."""

    def __init__(self, max_failed_groups: int) -> None:
        self._limit = max_failed_groups
        self._excess = 0

    def note_completed(self) -> None:
        self._excess = max(0, self._excess - 1)

    def note_failed(self, failure: GroupFailure) -> None:
        """Count a failed group, unless time to grade was missing. Raises TooManyFailures."""
        if failure.reason == CLASSES_NOT_GRADED:
            return
        self._excess += 1
        if self._excess >= self._limit:
            raise TooManyFailures(
                f"{self._excess} groups failed beyond those completed "
                f"(expert.queue.max_failed_groups = {self._limit}); the last one, "
                f"{failure.group.prompt.id!r}, as {failure.reason}: {failure.detail!r}. Look into "
                "the logs of generators, and of verifiers where classes of answers are missing "
                f"({CLASSES_UNGRADABLE})"
            )
