"""Grading: which verifier grades which rollout, and which requests are repeated.

Used by the rollout queue. Verifiers see only text and reference answers. A group with
`needs_classes` also needs classes of equal answers. All right answers are one class by definition;
a verifier compares the others with each other (`verification/classes.py`).
"""

import bisect
import collections
import dataclasses
import logging
from collections.abc import Collection

import msgspec

from megatron_rl.config.reward import RewardConfig
from megatron_rl.config.tree import QueueConfig
from megatron_rl.protocol.types import (
    NO_ANSWER,
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
from megatron_rl.rollout_queue.drop_reasons import (
    CLASSES_NOT_GRADED,
    CLASSES_UNGRADABLE,
    GroupFailure,
    ScoreFailure,
)
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.rollout_queue.peers import Peer, Verifiers

log = logging.getLogger(__name__)

_RIGHT = 0
"""Class of the right answers; the classes of a request come after it."""


@dataclasses.dataclass
class _Request:
    group: Group
    rollout: Rollout | None
    """The rollout to grade; None for a request for the classes of the group."""
    message: ScoreRequest | ClassRequest
    pools: frozenset[str]
    """Worker pools in which it needs room."""
    attempts: int = 0
    losses: int = 0
    """Times that a verifier restarted, fell silent or never got it. A loss is not an attempt."""
    position: int = 0
    """Grows with each request and retry, so that retries wait behind fresh requests. A lost request
    keeps its position."""
    failed_by: frozenset[str] = frozenset()
    """Verifiers that could not grade it."""
    verifier: str = ""
    """The verifier that grades it; empty while it waits."""
    asked_at: float = 0.0
    first_asked_at: float | None = None


class Scoring:
    """Requests for scores and classes, and the verifiers that answer.

    Open groups bound the number of requests. Verifiers have room by worker pool, so math answers
    never wait for programs.
    """

    def __init__(self, config: QueueConfig, reward: RewardConfig) -> None:
        self._config = config
        self._pools_of_task = {
            name: frozenset(step.pool for step in reward.steps_of(name))
            for name in reward.all_tasks
        }
        self._reward = reward
        self._verifiers = Verifiers()
        self._requests: dict[int, _Request] = {}
        # By combination of worker pools, so that a request waits only for the pools that it needs.
        self._waiting: collections.defaultdict[frozenset[str], collections.deque[int]]
        self._waiting = collections.defaultdict(collections.deque)
        self._next_id = 0
        self._next_position = 0
        self._failures: list[GroupFailure | ScoreFailure] = []

    def announce(self, name: str, ready: VerifierReady, now: float) -> None:
        """Update a verifier's state, and repeat the requests that it never got."""
        self._lose(self._verifiers.note_ready(name, ready, now), f"verifier {name} restarted")
        if ready.requests is None:
            return
        lost = self._verifiers.find_lost(name, set(ready.requests), now)
        for request_id in lost:
            self._verifiers.free(name, request_id, self._requests[request_id].pools)
        self._lose(lost, f"a message of it was lost between {name} and the queue")

    def submit(self, group: Group, rollout: Rollout) -> None:
        prompt = group.prompt
        message = ScoreRequest(
            request_id=self._next_id,
            task=prompt.task,
            answer=prompt.answer,
            entry=prompt.entry,
            text=rollout.graded_text,
            completion_tokens=len(rollout.token_ids),
            is_finished=rollout.finish_reason != "length",
            problem=prompt.question,
            language=prompt.language,
            seed=group.sampling.seed,
            prompt_tail=rollout.prompt_tail,
            length_rule=group.length_rule,
            other_answers=prompt.other_answers,
        )
        self._put(_Request(group, rollout, message, self._pools_of_task[prompt.task]))

    def submit_classes(self, group: Group) -> None:
        message = _class_request(self._next_id, group, self._reward)
        pools = frozenset({self._reward.class_step(group.prompt.task).pool})
        self._put(_Request(group, None, message, pools))

    def _put(self, request: _Request) -> None:
        self._requests[self._next_id] = request
        self._enqueue(self._next_id)
        self._next_id += 1

    def _enqueue(self, request_id: int) -> None:
        request = self._requests[request_id]
        request.position = self._next_position
        self._next_position += 1
        self._waiting[request.pools].append(request_id)

    def next_request(self, now: float) -> tuple[str, ScoreRequest | ClassRequest] | None:
        """A verifier with room and its request; None when nothing waits or all are full."""
        found = [self._next_of(pools) for pools in self._waiting]
        # By position, so that no combination starves another one that shares a worker pool.
        _, request_id, name = min(filter(None, found), default=(0, 0, ""))
        if not name:
            return None
        request = self._requests[request_id]
        self._waiting[request.pools].remove(request_id)
        request.attempts += 1
        request.verifier, request.asked_at = name, now
        if request.first_asked_at is None:
            request.first_asked_at = now
        self._verifiers.take(name, request_id, request.pools)
        return name, request.message

    def _next_of(self, pools: frozenset[str]) -> tuple[int, int, str] | None:
        """(position, request id, verifier) of the first request that a verifier can take."""
        waiting = self._waiting[pools]
        roomiest = self._verifiers.find_room(pools) if waiting else None
        if roomiest is None:
            return None
        rooms: dict[frozenset[str], str | None] = {frozenset(): roomiest}
        for request_id in waiting:
            request = self._requests[request_id]
            if request.failed_by not in rooms:
                rooms[request.failed_by] = self._verifiers.find_room(pools, request.failed_by)
            name = rooms[request.failed_by]
            if name is not None:
                return request.position, request_id, name
        return None

    def take_score(
        self, name: str, done: ScoreDone, now: float
    ) -> tuple[Group, ScoredRollout] | None:
        """The scored rollout and its group; None when another verifier was asked meanwhile."""
        request = self._take(name, done, now)
        if request is None:
            return None
        assert request.rollout is not None
        return request.group, ScoredRollout(request.rollout, done.score)

    def take_classes(self, name: str, done: ClassDone, now: float) -> Group | None:
        """The group, which has its classes now; None when they are no longer needed."""
        request = self._take(name, done, now)
        if request is None or request.group.is_abandoned:
            return None
        _set_classes(request.group, done.classes)
        return request.group

    def _take(self, name: str, done: ScoreDone | ClassDone, now: float) -> _Request | None:
        """The answered request; None when another verifier was asked meanwhile.

        Raises WireError for an answer to another question, and keeps the request.
        """
        request = self._requests.get(done.request_id)
        if request is not None and request.verifier == name:
            _check_answer(name, request.message, done)
        if not self._return(name, done.request_id, now):
            return None
        return self._requests.pop(done.request_id)

    def take_failure(self, name: str, failure: ScoreFailed, now: float) -> bool:
        """Repeat a failed request, up to the limits; False when another verifier has it."""
        if not self._return(name, failure.request_id, now):
            return False
        self._fail(failure, name, now)
        return True

    def expire(self, now: float) -> None:
        """Repeat requests to silent verifiers, and requests without an answer for too long."""
        config = self._config
        silent = self._verifiers.drop_silent(now, config.heartbeat_timeout_s)
        self._lose(silent, "its verifier fell silent")
        for request_id, request in list(self._requests.items()):
            if request.verifier and now - request.asked_at > config.score_timeout_s:
                self._verifiers.free(request.verifier, request_id, request.pools)
                why = f"no answer for {config.score_timeout_s:.0f} s"
                self._fail(ScoreFailed(request_id, why), request.verifier, now)

    def hand_back(self, name: str, kept: Collection[int]) -> bool:
        """Ask others for all but the `kept` requests of a verifier; forget it if it keeps none."""
        held = self._verifiers[name].handed_out
        for request_id in sorted(held.keys() - kept):
            request = self._requests[request_id]
            self._verifiers.free(name, request_id, request.pools)
            request.attempts -= 1
            request.verifier = ""
            if request.group.is_abandoned:
                del self._requests[request_id]
            else:
                self._put_back(request_id)
        if not held:
            self._verifiers.drop(name)
        return not held

    def drop_verifier(self, name: str) -> None:
        self._lose(self._verifiers.drop(name), f"verifier {name} is gone")

    def _return(self, name: str, request_id: int, now: float) -> bool:
        self._verifiers.hear(name, now)
        request = self._requests.get(request_id)
        if request is None or request.verifier != name:
            return False
        self._verifiers.free(name, request_id, request.pools)
        return True

    def _lose(self, request_ids: list[int], why: str) -> None:
        for request_id in request_ids:
            request = self._requests[request_id]
            request.attempts -= 1
            request.losses += 1
            if self._may_repeat(ScoreFailed(request_id, why)):
                self._put_back(request_id)

    def _put_back(self, request_id: int) -> None:
        """Queue a request at its old position."""
        waiting = self._waiting[self._requests[request_id].pools]
        bisect.insort(waiting, request_id, key=lambda n: self._requests[n].position)

    def _fail(self, failure: ScoreFailed, verifier: str, now: float) -> None:
        request = self._requests[failure.request_id]
        failure = msgspec.structs.replace(failure, reason=f"{verifier} failed: {failure.reason}")
        if self._may_repeat(failure, tried_for_s=now - (request.first_asked_at or 0.0)):
            request.failed_by |= {verifier}
            self._enqueue(failure.request_id)

    def _may_repeat(self, failure: ScoreFailed, tried_for_s: float = 0.0) -> bool:
        """Take a request back from its verifier; returns whether to repeat it."""
        request = self._requests[failure.request_id]
        request.verifier = ""
        group, config = request.group, self._config
        is_late = tried_for_s >= config.score_patience_s
        is_lost = request.losses >= config.max_lost_attempts
        is_tried = request.attempts >= config.max_attempts
        if not (group.is_abandoned or is_late or is_lost or is_tried):
            what = "score" if request.rollout else "classes"
            why = failure.reason
            log.warning("asking for the %s of prompt %r again: %r", what, group.prompt.id, why)
            return True
        del self._requests[failure.request_id]
        if not group.is_abandoned:
            tried = f"grading was tried {request.attempts} times (expert.queue.max_attempts)"
            if is_lost:
                tried = f"verifiers lost it {request.losses} times (expert.queue.max_lost_attempts)"
            if is_late:
                tried += f" in {tried_for_s:.0f} s (expert.queue.score_patience_s)"
            detail = f"{tried}; last: {failure.reason}"
            self._give_up(request, failure.kind, detail, is_late=is_late)
        return False

    def _give_up(self, request: _Request, kind: str, detail: str, *, is_late: bool) -> None:
        group, rollout = request.group, request.rollout
        if rollout is None:
            reason = CLASSES_NOT_GRADED if kind == NOT_GRADED else CLASSES_UNGRADABLE
            self._failures.append(GroupFailure(group, reason, detail))
        else:
            self._failures.append(ScoreFailure(group, rollout, kind, detail, is_late))

    def give_up_evaluation(self, why: str) -> None:
        """Fail all requests of an overdue evaluation as NOT_GRADED."""
        for request_id, request in list(self._requests.items()):
            if not request.group.evaluation:
                continue
            if request.verifier:
                self._verifiers.free(request.verifier, request_id, request.pools)
            else:
                self._waiting[request.pools].remove(request_id)
            del self._requests[request_id]
            self._give_up(request, NOT_GRADED, why, is_late=True)

    def cancel(self, group: Group) -> None:
        """Forget the waiting requests of a group; a verifier first answers those that it has."""
        for waiting in self._waiting.values():
            for request_id in [n for n in waiting if self._requests[n].group is group]:
                waiting.remove(request_id)
                del self._requests[request_id]

    def pop_failures(self) -> list[GroupFailure | ScoreFailure]:
        """Completions, and groups whose classes failed, since the last call."""
        failures, self._failures = self._failures, []
        return failures

    @property
    def outstanding(self) -> int:
        return len(self._requests)

    @property
    def verifiers(self) -> list[str]:
        return self._verifiers.names

    @property
    def peers(self) -> list[Peer]:
        return self._verifiers.all

    def describe(self, now: float) -> str:
        unasked = sum(len(waiting) for waiting in self._waiting.values())
        return (
            f"{len(self._requests)} scores awaited ({unasked} not yet asked for); verifiers: "
            f"{self._verifiers.describe(now)}"
        )


# --- classes of equal answers -------------------------------------------------------------------


def find_without_asking(group: Group) -> bool:
    """Whether a scored group has the classes that it needs; sets them without answers to compare.

    Conversations that their environment scored have none: evaluations without others have no vote.
    """
    if group.evaluation and all(one.rollout.score is not None for one in group.ordered):
        group.needs_classes = False
    if not group.is_complete and not _to_compare(group):
        _set_classes(group, [])
    return group.is_complete


def _class_request(request_id: int, group: Group, reward: RewardConfig) -> ClassRequest:
    """The request for the classes of the answers of a scored group that are not right."""
    prompt = group.prompt
    rollouts = [group.scored[index].rollout for index in _to_compare(group)]
    is_own = ":" in reward.all_tasks[prompt.task].compare
    return ClassRequest(
        request_id,
        prompt.task,
        texts=[rollout.graded_text for rollout in rollouts],
        prompt_tails=[rollout.prompt_tail for rollout in rollouts],
        problem=prompt.question,
        entry=prompt.entry if is_own else "",
    )


def _check_answer(
    verifier: str, request: ScoreRequest | ClassRequest, done: ScoreDone | ClassDone
) -> None:
    """Raise WireError for an answer to another question."""
    if isinstance(request, ScoreRequest):
        if isinstance(done, ClassDone):
            raise WireError(f"{verifier} answered a request for a score with classes")
    elif isinstance(done, ScoreDone):
        raise WireError(f"{verifier} answered a request for classes with a score")
    elif len(done.classes) != len(request.texts):
        raise WireError(
            f"{verifier} sent {len(done.classes)} classes of the {len(request.texts)} answers of "
            f"request {done.request_id}"
        )
    elif max(done.classes, default=0) >= len(request.texts):
        text = f"{done.classes!r:.200}"
        raise WireError(f"{verifier} sent classes {text} of request {done.request_id}")


def _set_classes(group: Group, found: list[int]) -> None:
    """Set the classes of a group. found: those of its answers to compare."""
    classes = {i: _RIGHT if one.score.is_correct else NO_ANSWER for i, one in group.scored.items()}
    for index, one in zip(_to_compare(group), found, strict=True):
        classes[index] = NO_ANSWER if one == NO_ANSWER else _RIGHT + 1 + one
    group.classes = classes


def _to_compare(group: Group) -> list[int]:
    """Members with an answer that is not right."""
    wrong = [one.rollout for one in group.ordered if not one.score.is_correct]
    return [rollout.index for rollout in wrong if rollout.score is None]
