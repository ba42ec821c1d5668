"""Score requests: which verifier grades which rollout, and what is asked again.

Used by the rollout queue. Verifiers see text and reference answers only. Requests for the classes
of a group's answers wait, fail and are asked again like those for a score; `classes.py` words them.
"""

import bisect
import collections
import dataclasses
import logging

import msgspec

from megatron_rl.config.reward import RewardConfig
from megatron_rl.config.tree import QueueConfig
from megatron_rl.protocol.types import (
    NOT_GRADED,
    ClassDone,
    ClassRequest,
    Rollout,
    ScoreDone,
    ScoredRollout,
    ScoreFailed,
    ScoreRequest,
    VerifierReady,
)
from megatron_rl.protocol.wire import WireError
from megatron_rl.rollout_queue.classes import class_failure, class_request, take_classes
from megatron_rl.rollout_queue.failures import GroupFailure, ScoreFailure
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.rollout_queue.verifiers import Verifiers

log = logging.getLogger(__name__)

ABSENT_S = 5.0
"""A request that heartbeats of its verifier do not name for this long was lost on the way."""


@dataclasses.dataclass
class _Pending:
    group: Group
    rollout: Rollout | None
    """What is to be graded; None where the classes of the group are asked for."""
    request: ScoreRequest | ClassRequest
    pools: frozenset[str]
    """Worker pools in which it needs room."""
    attempts: int = 0
    losses: int = 0
    """Times a verifier took it along."""
    turn: int = 0
    """Grows with each request and each retry: the lowest is asked next, so that no retry comes
    before a fresh one. What a verifier loses keeps its turn: nobody has tried it to the end."""
    failed_by: frozenset[str] = frozenset()
    """Verifiers that could not grade it."""
    verifier: str = ""
    """Who grades it; empty while it waits."""
    asked_at: float = 0.0
    absent_since: float | None = None
    """Since when heartbeats of its verifier do not name it; None: they do."""
    first_asked_at: float | None = None


class Scoring:
    """Rollouts without a score, groups without classes, and the verifiers that are asked.

    Its size is bounded by the leases: each pending request is a completion of an open group, or one
    for all those of a group that is scored.
    Verifiers have room by worker pool, so that answers never wait behind programs.
    """

    def __init__(self, config: QueueConfig, reward: RewardConfig) -> None:
        self._config = config
        self._pools_of_task = {
            name: frozenset(step.pool for step in reward.steps_of(name))
            for name in reward.all_tasks
        }
        self._reward = reward
        self._verifiers = Verifiers()
        self._pending: dict[int, _Pending] = {}
        # One line for each combination of worker pools, so that nothing waits for room that it
        # needs not.
        self._waiting: collections.defaultdict[frozenset[str], collections.deque[int]]
        self._waiting = collections.defaultdict(collections.deque)
        self._next_id = 0
        self._next_turn = 0
        self._failures: list[ScoreFailure] = []
        self._class_failures: list[GroupFailure] = []
        self.late_scores = 0
        """Scores of requests that had been given to another verifier."""

    def announce(self, name: str, ready: VerifierReady, now: float) -> None:
        """Take in a verifier's state, and ask again what it never got."""
        self._lose(self._verifiers.announce(name, ready, now), f"verifier {name} restarted")
        if ready.requests is not None:
            self._reconcile(name, set(ready.requests), now)

    def _reconcile(self, name: str, reported: set[int], now: float) -> None:
        absent = []
        for request_id, pending in self._pending.items():
            if pending.verifier != name:
                continue
            if request_id in reported:
                pending.absent_since = None
            elif pending.absent_since is None:
                # Perhaps the request is on its way still.
                pending.absent_since = now
            elif now - pending.absent_since >= ABSENT_S:
                absent.append(request_id)
        for request_id in absent:
            self._verifiers.give_back(name, request_id)
        self._lose(absent, f"a message of it was lost between {name} and the queue")

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
            length_rule=group.length_rule,
        )
        self._put(_Pending(group, rollout, request, self._pools_of_task[prompt.task]))

    def submit_classes(self, group: Group) -> None:
        """Queue the question which answers of a scored group are the same."""
        request = class_request(self._next_id, group, self._reward)
        pools = frozenset({self._reward.class_step(group.prompt.task).pool})
        self._put(_Pending(group, None, request, pools))

    def _put(self, pending: _Pending) -> None:
        self._pending[self._next_id] = pending
        self._enqueue(self._next_id)
        self._next_id += 1

    def _enqueue(self, request_id: int) -> None:
        """Let a request wait behind all others."""
        pending = self._pending[request_id]
        pending.turn = self._next_turn
        self._next_turn += 1
        self._waiting[pending.pools].append(request_id)

    def next_request(self, now: float) -> tuple[str, ScoreRequest | ClassRequest] | None:
        """A verifier with room and what to ask it; None when nothing waits or all are full."""
        found = [self._next_of_line(pools) for pools in self._waiting]
        # By turn, since lines may share a worker pool and one must not starve the other.
        _, request_id, name = min(filter(None, found), default=(0, 0, ""))
        if not name:
            return None
        pending = self._pending[request_id]
        self._waiting[pending.pools].remove(request_id)
        pending.attempts += 1
        pending.verifier = name
        pending.asked_at, pending.absent_since = now, None
        if pending.first_asked_at is None:
            pending.first_asked_at = now
        self._verifiers.hand_out(name, request_id, pending.pools)
        return name, pending.request

    def _next_of_line(self, pools: frozenset[str]) -> tuple[int, int, str] | None:
        """(turn, request, verifier) of the first in a line that a verifier has room for.

        One that waits for another verifier than those that have failed it is passed over.
        """
        line = self._waiting[pools]
        if not line or self._verifiers.find_room(pools) is None:
            return None
        rooms: dict[frozenset[str], str | None] = {}
        for request_id in line:
            pending = self._pending[request_id]
            if pending.failed_by not in rooms:
                rooms[pending.failed_by] = self._verifiers.find_room(pools, pending.failed_by)
            name = rooms[pending.failed_by]
            if name is not None:
                return pending.turn, request_id, name
        return None

    def take_score(
        self, name: str, done: ScoreDone, now: float
    ) -> tuple[Group, ScoredRollout] | None:
        """The scored rollout and its group; None when another verifier was asked meanwhile."""
        pending = self._take(name, done, now)
        if pending is None:
            return None
        if pending.rollout is None:
            raise WireError(f"{name} answered a request for classes with a score")
        return pending.group, ScoredRollout(pending.rollout, done.score)

    def take_classes(self, name: str, done: ClassDone, now: float) -> Group | None:
        """The group, which has its classes now; None when nobody waits for them any more."""
        pending = self._take(name, done, now)
        if pending is None or pending.group.is_abandoned:
            return None
        take_classes(name, pending.group, pending.request, done)
        return pending.group

    def _take(self, name: str, done: ScoreDone | ClassDone, now: float) -> _Pending | None:
        """What is answered; None, and counted, when another verifier was asked meanwhile."""
        if self._return(name, done.request_id, now):
            return self._pending.pop(done.request_id)
        self.late_scores += 1
        return None

    def take_failure(self, name: str, failure: ScoreFailed, now: float) -> bool:
        """Queue a rollout that a verifier failed to grade once more, up to the limits.

        False when another verifier was asked meanwhile.
        """
        if not self._return(name, failure.request_id, now):
            return False
        self._fail(failure, name, now)
        return True

    def expire(self, now: float) -> None:
        """Give up requests to silent verifiers, and those unanswered for too long."""
        config = self._config
        silent = self._verifiers.drop_silent(now, config.heartbeat_timeout_s)
        self._lose(silent, "its verifier fell silent")
        for request_id, pending in list(self._pending.items()):
            if pending.verifier and now - pending.asked_at > config.score_timeout_s:
                self._verifiers.give_back(pending.verifier, request_id)
                why = f"no answer for {config.score_timeout_s:.0f} s"
                self._fail(ScoreFailed(request_id, why), pending.verifier, now)

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
        """Ask again what a verifier took with it: nobody has tried it to the end."""
        for request_id in request_ids:
            pending = self._pending[request_id]
            pending.attempts -= 1
            pending.losses += 1
            if self._may_repeat(ScoreFailed(request_id, why)):
                line = self._waiting[pending.pools]
                bisect.insort(line, request_id, key=lambda n: self._pending[n].turn)

    def _fail(self, failure: ScoreFailed, verifier: str, now: float) -> None:
        pending = self._pending[failure.request_id]
        failure = msgspec.structs.replace(failure, reason=f"{verifier} failed: {failure.reason}")
        if self._may_repeat(failure, tried_for_s=now - (pending.first_asked_at or 0.0)):
            pending.failed_by |= {verifier}
            self._enqueue(failure.request_id)

    def _may_repeat(self, failure: ScoreFailed, tried_for_s: float = 0.0) -> bool:
        """Take a request back from its verifier; whether it is to be asked for again."""
        pending = self._pending[failure.request_id]
        pending.verifier = ""
        group, config = pending.group, self._config
        why = failure.reason
        is_late = tried_for_s >= config.score_patience_s
        is_lost = pending.losses >= config.max_lost_attempts
        is_tried = pending.attempts >= config.max_attempts
        if not (group.is_abandoned or is_late or is_lost or is_tried):
            what = "score" if pending.rollout else "classes"
            log.warning("asking for the %s of prompt %r again: %r", what, group.prompt.id, why)
            return True
        del self._pending[failure.request_id]
        if not group.is_abandoned:
            tried = f"grading was tried {pending.attempts} times (expert.queue.max_attempts)"
            if is_lost:
                tried = f"verifiers lost it {pending.losses} times (expert.queue.max_lost_attempts)"
            if is_late:
                tried += f" in {tried_for_s:.0f} s (expert.queue.score_patience_s)"
            self._give_up(pending, failure.kind, f"{tried}; last: {why}", is_late=is_late)
        return False

    def _give_up(self, pending: _Pending, kind: str, detail: str, *, is_late: bool) -> None:
        group, rollout = pending.group, pending.rollout
        if rollout is None:
            self._class_failures.append(class_failure(group, kind, detail))
        else:
            self._failures.append(ScoreFailure(group, rollout, kind, detail, is_late))

    def give_up_evaluation(self, why: str) -> None:
        """Ask no more for the scores of an evaluation: they come too late to count."""
        for request_id, pending in list(self._pending.items()):
            if not pending.group.evaluation:
                continue
            if pending.verifier:
                self._verifiers.give_back(pending.verifier, request_id)
            else:
                self._waiting[pending.pools].remove(request_id)
            del self._pending[request_id]
            self._give_up(pending, NOT_GRADED, why, is_late=True)

    def cancel(self, group: Group) -> None:
        """Forget what nobody was asked for yet of a group; what was asked for comes back first."""
        for waiting in self._waiting.values():
            for request_id in [n for n in waiting if self._pending[n].group is group]:
                waiting.remove(request_id)
                del self._pending[request_id]

    def pop_failures(self) -> list[ScoreFailure]:
        """Completions that were given up since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def pop_class_failures(self) -> list[GroupFailure]:
        """Groups whose classes were given up since the last call."""
        failures, self._class_failures = self._class_failures, []
        return failures

    @property
    def outstanding(self) -> int:
        """Rollouts without a score, and groups that wait for their classes."""
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
