"""Score requests: which verifier grades which rollout, and what is asked again.

Used by the rollout queue. Verifiers see text and reference answers only.
"""

import collections
import dataclasses
import logging

from megatron_rl.config.reward import RewardConfig
from megatron_rl.config.tree import QueueConfig
from megatron_rl.protocol.types import (
    UNGRADABLE,
    Rollout,
    ScoreDone,
    ScoredRollout,
    ScoreFailed,
    ScoreRequest,
    VerifierReady,
)
from megatron_rl.rollout_queue.failures import GroupFailure
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.rollout_queue.verifiers import Verifiers

log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Pending:
    group: Group
    rollout: Rollout
    request: ScoreRequest
    lanes: frozenset[str]
    """Lanes in which it needs room."""
    attempts: int = 0
    verifier: str = ""
    """Who grades it; empty while it waits."""
    asked_at: float = 0.0


class Scoring:
    """Rollouts without a score, and the verifiers that grade them.

    Its size is bounded by the leases: each pending request is a completion of an open group.
    Verifiers have room by lane, so that answers never wait behind programs.
    """

    def __init__(self, config: QueueConfig, reward: RewardConfig) -> None:
        self._config = config
        self._lanes_of_task = {
            name: frozenset(step.lane for step in reward.steps_of(name))
            for name in reward.all_tasks
        }
        self._verifiers = Verifiers()
        self._pending: dict[int, _Pending] = {}
        # One line for each combination of lanes, so that nothing waits for room that it needs not.
        self._waiting = {lanes: collections.deque[int]() for lanes in self._lanes_of_task.values()}
        self._next_id = 0
        self._failures: list[GroupFailure] = []
        self.late_scores = 0
        """Scores of requests that had been given to another verifier."""

    def announce(self, name: str, ready: VerifierReady, now: float) -> None:
        """Take in a verifier's state."""
        self._lose(self._verifiers.announce(name, ready, now), f"verifier {name} restarted")

    def submit(self, group: Group, rollout: Rollout) -> None:
        """Queue a rollout for grading."""
        prompt = group.prompt
        request = ScoreRequest(
            request_id=self._next_id,
            task=prompt.task,
            answer=prompt.answer,
            entry=prompt.entry,
            text=rollout.text,
            completion_tokens=len(rollout.token_ids),
            is_finished=rollout.finish_reason != "length",
            problem=prompt.question,
            language=prompt.language,
            seed=group.sampling.seed,
            prompt_tail=rollout.prompt_tail,
        )
        self._next_id += 1
        lanes = self._lanes_of_task[prompt.task]
        self._pending[request.request_id] = _Pending(group, rollout, request, lanes)
        self._waiting[lanes].append(request.request_id)

    def next_request(self, now: float) -> tuple[str, ScoreRequest] | None:
        """A verifier with room and what to ask it; None when nothing waits or all are full."""
        # The oldest first, since lines may share a lane and one must not starve the other.
        lines = [lanes for lanes, waiting in self._waiting.items() if waiting]
        for lanes in sorted(lines, key=lambda lanes: self._waiting[lanes][0]):
            name = self._verifiers.find_room(lanes)
            if name is None:
                continue
            pending = self._pending[self._waiting[lanes].popleft()]
            pending.attempts += 1
            pending.verifier = name
            pending.asked_at = now
            self._verifiers.hand_out(name, pending.request.request_id, lanes)
            return name, pending.request
        return None

    def take_score(
        self, name: str, done: ScoreDone, now: float
    ) -> tuple[Group, ScoredRollout] | None:
        """The scored rollout and its group; None when another verifier was asked meanwhile."""
        if not self._return(name, done.request_id, now):
            self.late_scores += 1
            return None
        pending = self._pending.pop(done.request_id)
        return pending.group, ScoredRollout(pending.rollout, done.score)

    def take_failure(self, name: str, failure: ScoreFailed, now: float) -> None:
        """Queue a rollout that a verifier failed to grade once more."""
        if self._return(name, failure.request_id, now):
            self._repeat(failure.request_id, f"{name} failed: {failure.reason}")

    def expire(self, now: float) -> None:
        """Give up requests to silent verifiers, and those unanswered for too long."""
        config = self._config
        silent = self._verifiers.drop_silent(now, config.heartbeat_timeout_s)
        self._lose(silent, "its verifier fell silent")
        for request_id, pending in list(self._pending.items()):
            if pending.verifier and now - pending.asked_at > config.score_timeout_s:
                self._verifiers.give_back(pending.verifier, request_id)
                self._repeat(request_id, f"no answer for {config.score_timeout_s:.0f} s")

    def drop_verifier(self, name: str) -> None:
        """Forget a verifier that cannot be reached."""
        self._lose(self._verifiers.drop(name), f"verifier {name} is gone")

    def _return(self, name: str, request_id: int, now: float) -> bool:
        self._verifiers.hear(name, now)
        pending = self._pending.get(request_id)
        if pending is None or pending.verifier != name:
            return False
        self._verifiers.give_back(name, request_id)
        return True

    def _lose(self, request_ids: list[int], why: str) -> None:
        for request_id in request_ids:
            self._repeat(request_id, why)

    def _repeat(self, request_id: int, why: str) -> None:
        pending = self._pending[request_id]
        pending.verifier = ""
        group = pending.group
        if group.is_abandoned:
            del self._pending[request_id]
        elif pending.attempts >= self._config.max_attempts:
            del self._pending[request_id]
            tried = f"grading was tried {pending.attempts} times (queue.max_attempts)"
            self._failures.append(GroupFailure(group, UNGRADABLE, f"{tried}; last: {why}"))
        else:
            log.warning("asking for the score of prompt %r again: %s", group.prompt.id, why)
            self._waiting[pending.lanes].append(request_id)

    def cancel(self, group: Group) -> None:
        """Forget what nobody was asked for yet of a group; what was asked for comes back first."""
        for waiting in self._waiting.values():
            for request_id in [n for n in waiting if self._pending[n].group is group]:
                waiting.remove(request_id)
                del self._pending[request_id]

    def pop_failures(self) -> list[GroupFailure]:
        """Groups of which a completion could not be graded since the last call."""
        failures, self._failures = self._failures, []
        return failures

    @property
    def outstanding(self) -> int:
        """Rollouts without a score."""
        return len(self._pending)

    @property
    def verifiers(self) -> list[str]:
        """Names of the live verifiers."""
        return self._verifiers.names

    def describe(self, now: float) -> str:
        """One line on what is open where."""
        unasked = sum(len(waiting) for waiting in self._waiting.values())
        return (
            f"{len(self._pending)} scores awaited ({unasked} not yet asked for); verifiers: "
            f"{self._verifiers.describe(now)}"
        )
