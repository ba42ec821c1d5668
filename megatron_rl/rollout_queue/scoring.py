"""Score requests: which verifier grades which rollout, and what is asked again.

Used by the rollout queue. Verifiers see text and reference answers only.
"""

import collections
import dataclasses
import logging

from megatron_rl.protocol.config import QueueConfig
from megatron_rl.protocol.reward_config import LANES, RewardConfig
from megatron_rl.protocol.types import (
    Rollout,
    ScoreDone,
    ScoredRollout,
    ScoreFailed,
    ScoreRequest,
    VerifierReady,
)
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.rollout_queue.leases import AttemptsExhausted
from megatron_rl.rollout_queue.peers import Peers

log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Pending:
    group: Group
    rollout: Rollout
    request: ScoreRequest
    lane: str
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
        self._lane_of_task = {name: task.lane for name, task in reward.all_tasks.items()}
        self._verifiers = {lane: Peers("verifier") for lane in LANES}
        """By lane: who is there, with how much room in that lane."""
        self._pending: dict[int, _Pending] = {}
        self._waiting = {lane: collections.deque[int]() for lane in LANES}
        self._next_id = 0
        self.late_scores = 0
        """Scores of requests that had been given to another verifier."""

    def announce(self, name: str, ready: VerifierReady, now: float) -> None:
        """Take in a verifier's state."""
        for lane, capacity in ready.capacity.items():
            lost = self._verifiers[lane].announce(
                name, capacity=capacity, session=ready.session, version=-1, now=now
            )
            self._lose(lost, f"verifier {name} restarted")

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
        lane = self._lane_of_task[prompt.task]
        self._pending[request.request_id] = _Pending(group, rollout, request, lane)
        self._waiting[lane].append(request.request_id)

    def next_request(self, now: float) -> tuple[str, ScoreRequest] | None:
        """A verifier with room and what to ask it; None when nothing waits or all are full."""
        for lane, waiting in self._waiting.items():
            if not waiting:
                continue
            found = self._verifiers[lane].find_room(1)
            if found is None:
                continue
            pending = self._pending[waiting.popleft()]
            pending.attempts += 1
            pending.verifier = found[0].name
            pending.asked_at = now
            self._verifiers[lane].hand_out(pending.verifier, pending.request.request_id, 1)
            return pending.verifier, pending.request
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
        for verifiers in self._verifiers.values():
            silent = verifiers.drop_silent(now, config.heartbeat_timeout_s)
            self._lose(silent, "its verifier fell silent")
        for request_id, pending in list(self._pending.items()):
            if pending.verifier and now - pending.asked_at > config.score_timeout_s:
                self._verifiers[pending.lane].give_back(pending.verifier, request_id)
                self._repeat(request_id, f"no answer for {config.score_timeout_s:.0f} s")

    def drop_verifier(self, name: str) -> None:
        """Forget a verifier that cannot be reached."""
        for verifiers in self._verifiers.values():
            self._lose(verifiers.drop(name), f"verifier {name} is gone")

    def _return(self, name: str, request_id: int, now: float) -> bool:
        for verifiers in self._verifiers.values():
            verifiers.hear(name, now)
        pending = self._pending.get(request_id)
        if pending is None or pending.verifier != name:
            return False
        self._verifiers[pending.lane].give_back(name, request_id)
        return True

    def _lose(self, request_ids: list[int], why: str) -> None:
        for request_id in request_ids:
            self._repeat(request_id, why)

    def _repeat(self, request_id: int, why: str) -> None:
        pending = self._pending[request_id]
        pending.verifier = ""
        if pending.attempts >= self._config.max_attempts:
            raise AttemptsExhausted(
                f"grading a completion of prompt {pending.group.prompt.id!r} was tried "
                f"{pending.attempts} times (queue.max_attempts); last: {why}"
            )
        log.warning("asking for the score of prompt %r again: %s", pending.group.prompt.id, why)
        self._waiting[pending.lane].append(request_id)

    @property
    def outstanding(self) -> int:
        """Rollouts without a score."""
        return len(self._pending)

    @property
    def verifiers(self) -> list[str]:
        """Names of the live verifiers."""
        return list(dict.fromkeys(name for lane in self._verifiers.values() for name in lane.names))

    def describe(self, now: float) -> str:
        """One line on what is open where."""
        unasked = sum(len(waiting) for waiting in self._waiting.values())
        lanes = ", ".join(
            f"{lane}: {verifiers.describe(now)}"
            for lane, verifiers in self._verifiers.items()
            if verifiers.outstanding or self._waiting[lane]
        )
        names = ", ".join(self.verifiers) or "no verifier"
        return (
            f"{len(self._pending)} scores awaited ({unasked} not yet asked for); verifiers: "
            f"{lanes or names}"
        )
