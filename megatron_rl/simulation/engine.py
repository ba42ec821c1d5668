"""A simulated engine: continuous batching in closed form between events. Pure.

Used by the simulation. One decoding iteration of B completions over a cache of K tokens takes
`base_s + per_running_s * B + per_kv_token_s * K` and adds one token to each. Between two changes of
the set of completions nothing else happens, so that n iterations take

    n (base_s + per_running_s B + per_kv_token_s K) + per_kv_token_s B n (n - 1) / 2

and tokens need no events. Changes take effect at the end of an iteration, as in a real engine:
completions join and leave, weights are replaced, the engine pauses. Rules of SGLang 0.5.23's
scheduler:

- A completion joins when fewer than max_running run, and the cache has room for its tokens and a
  reserve for each running completion. No completion decodes during its prefill. A recently seen
  prompt needs no prefill (prefix cache).
- When an iteration would overflow the cache, the engine retracts the completions with the fewest
  tokens. They wait at the head of the queue, keep their tokens, and prefill again.

Left out: chunked prefill mixed with decoding, and prompts shared in the cache by a group.
"""

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass, field

from megatron_rl.protocol.rollout import ConversationTurn, VersionSpan
from megatron_rl.simulation.workload import Reply

RESERVE_TOKENS = 512
"""Cache tokens reserved for each running completion when another joins. SGLang 0.5.23 estimates
about an eighth of at most 4096 tokens (schedule_policy.py)."""
SEEN_PROMPTS = 4096
"""Assumed prompts in the prefix cache; prompts are short compared with completions."""


@dataclass(frozen=True)
class EngineModel:
    """Costs of one engine in seconds, and its capacity."""

    base_s: float
    """Constant cost of an iteration: reading the weights, launching kernels."""
    per_running_s: float
    """Per running completion and iteration."""
    per_kv_token_s: float
    """Per cached token of running completions and iteration."""
    prefill_s_per_token: float
    max_running: int
    kv_tokens: int
    recomputes_cache: bool = False
    """A pause empties the KV cache and requeues running completions (weights.kv_cache)."""

    def iteration_s(self, running: int, kv: int) -> float:
        """Seconds of one iteration."""
        return self.base_s + self.per_running_s * running + self.per_kv_token_s * kv


@dataclass
class Request:
    lease_id: int
    index: int
    group: int
    """Completions of one group have the same prompt."""
    prompt_tokens: int
    tokens: int
    """Final length."""
    generated: int = 0
    """Tokens when it last joined."""
    joined_at: int = 0
    """Engine iteration at which it last joined."""
    leased_at: float = 0.0
    asked_at: float = 0.0
    """When its reply was requested of the engine."""
    cached: int = 0
    """Of `generated`: tokens in the prefix cache when it joins."""
    reply_start: int = 0
    """The first token of its reply; `tokens` is the end."""
    later: list[Reply] = field(default_factory=list)
    """Further replies."""
    turns: list[ConversationTurn] = field(default_factory=list)
    """The finished replies of a conversation."""
    starts: list[tuple[int, int]] = field(default_factory=list)
    """(policy version, its first completion token)."""

    def spans(self) -> list[VersionSpan]:
        """Policy versions of a finished completion's tokens."""
        last = {start: version for version, start in self.starts}
        edges = [start for start in sorted(last) if start < self.tokens]
        found: list[VersionSpan] = []
        for start, end in itertools.pairwise([*edges, self.tokens]):
            if found and found[-1].version == last[start]:
                found[-1] = VersionSpan(last[start], found[-1].start, end)
            else:
                found.append(VersionSpan(last[start], start, end))
        return found


@dataclass
class Counts:
    """Work of engines."""

    tokens: int = 0
    """Generated tokens."""
    iterations: int = 0
    retractions: int = 0


class Engine:
    """Waiting and running completions; the caller advances the clock. Times are seconds."""

    def __init__(
        self,
        model: EngineModel,
        *,
        reserve_tokens: int = RESERVE_TOKENS,
        counts: Counts | None = None,
    ) -> None:
        """counts: updated by the engine; other engines may share it."""
        self.model = model
        self.counts = counts if counts is not None else Counts()
        self.version = -1
        self.kv = 0
        """Tokens in the cache."""
        self.iterations = 0
        """Iterations since the engine started."""
        self.peak_kv = 0
        self._reserve = reserve_tokens
        self._clock = 0.0
        """End of the last iteration."""
        self._running: list[tuple[int, int, Request]] = []
        """Heap by final iteration."""
        self._waiting: deque[Request] = deque()
        self._order = itertools.count()
        self._seen: dict[int, None] = {}
        self._is_pausing = self._is_paused = False
        self._new_version: int | None = None
        self._finished: list[tuple[float, Request]] = []

    @property
    def in_flight(self) -> int:
        return len(self._running) + len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def is_working(self) -> bool:
        """Whether the engine computes."""
        return bool(self._running) and not self._is_paused

    @property
    def pending_version(self) -> int | None:
        """Version of the weights that the engine loads at the end of this iteration."""
        return self._new_version

    # --- events, in order of time ---------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        self.advance(now)
        self._waiting.append(request)
        if not self._running:
            self._begin(now)

    def cancel(self, lease_id: int, now: float) -> None:
        """Drop the unfinished completions of a lease."""
        self.advance(now)
        for _, _, request in self._running:
            if request.lease_id == lease_id:
                self.kv -= self._held(request)
        self._running = [entry for entry in self._running if entry[2].lease_id != lease_id]
        heapq.heapify(self._running)
        self._waiting = deque(r for r in self._waiting if r.lease_id != lease_id)
        if not self._running:
            self._begin(now)

    def pause(self, now: float) -> None:
        """Stop at the end of this iteration."""
        self.advance(now)
        self._is_pausing = True
        if not self._running:
            self._stop()

    def resume(self, version: int, now: float) -> None:
        """Resume with the weights of a version."""
        self.advance(now)
        self._is_pausing = False
        self._new_version = version
        if self._is_paused or not self._running:
            self._is_paused = False
            self._begin(now)

    def take_finished(self) -> list[tuple[float, Request]]:
        """(time, completion) finished since the last call."""
        finished, self._finished = self._finished, []
        return finished

    # --- time -----------------------------------------------------------------------------------

    def next_at(self) -> float:
        """Time of the engine's next change (a completion ends, joins or is retracted), or inf."""
        if not self.is_working:
            return math.inf
        return self._clock + self._seconds(self._until_change())

    def advance(self, now: float) -> None:
        """Complete all iterations that end by now."""
        while self.is_working:
            change = self._until_change()
            done = min(change, self._iterations_in(now - self._clock))
            if done <= 0:
                return
            self._clock += self._seconds(done)
            count = len(self._running)
            self.iterations += done
            self.kv += done * count
            self.counts.tokens += done * count
            self.counts.iterations += done
            self.peak_kv = max(self.peak_kv, self.kv)
            self._leave()
            if done < change:
                return
            self._settle()

    def _until_change(self) -> int:
        """Iterations until the running completions or their weights may change."""
        if self._is_pausing or self._new_version is not None or self._may_join():
            return 1
        ends = self._running[0][0] - self.iterations
        room = (self.model.kv_tokens - self.kv) // len(self._running)
        return max(1, min(ends, room))

    def _seconds(self, iterations: int) -> float:
        count, model = len(self._running), self.model
        growth = model.per_kv_token_s * count * iterations * (iterations - 1) / 2
        return iterations * model.iteration_s(count, self.kv) + growth

    def _iterations_in(self, seconds: float) -> int:
        """Whole iterations of the running completions in these seconds, if none ends."""
        # The rounding error of an event's time.
        seconds += 1e-9 * max(1.0, abs(self._clock))
        if seconds <= 0:
            return 0
        count, model = len(self._running), self.model
        half = model.per_kv_token_s * count / 2
        first = model.iteration_s(count, self.kv) - half
        if half > 0:
            root = math.sqrt(first * first + 4 * half * seconds)
            return int(2 * seconds / (first + root))
        return int(seconds / first)

    # --- at the end of an iteration ---------------------------------------------------------------

    def _begin(self, now: float) -> None:
        """Start after idle time."""
        self._clock = max(self._clock, now)
        self._settle()

    def _leave(self) -> None:
        while self._running and self._running[0][0] <= self.iterations:
            request = heapq.heappop(self._running)[2]
            self.kv -= request.prompt_tokens + request.tokens
            self._finished.append((self._clock, request))

    def _settle(self) -> None:
        """Between two iterations: load new weights, pause, retract, let completions join."""
        if self._new_version is not None:
            self.version, self._new_version = self._new_version, None
            for _, _, request in self._running:
                request.starts.append((self.version, self._generated(request)))
        if self._is_pausing:
            self._stop()
            return
        while self.kv + len(self._running) > self.model.kv_tokens and len(self._running) > 1:
            self._retract()
        self._prefill()

    def _prefill(self) -> None:
        """Let waiting completions join."""
        prefilled = 0
        while self._may_join():
            request = self._waiting.popleft()
            if not self._knows(request.group):
                prefilled += request.prompt_tokens
            prefilled += self._join(request)
        self._clock += prefilled * self.model.prefill_s_per_token

    def _may_join(self) -> bool:
        if not self._waiting or len(self._running) >= self.model.max_running:
            return False
        if not self._running:
            return True
        first = self._waiting[0]
        reserve = self._reserve * (len(self._running) + 1)
        return self.kv + first.prompt_tokens + first.generated + reserve <= self.model.kv_tokens

    def _join(self, request: Request) -> int:
        """Let a completion decode from the next iteration; return its tokens to prefill."""
        request.joined_at = self.iterations
        request.starts.append((self.version, request.generated))
        ends = self.iterations + request.tokens - request.generated
        heapq.heappush(self._running, (ends, next(self._order), request))
        self.kv += request.prompt_tokens + request.generated
        self.peak_kv = max(self.peak_kv, self.kv)
        prefilled, request.cached = request.generated - request.cached, 0
        return prefilled

    def _knows(self, group: int) -> bool:
        """Whether a group's prompt was in the prefix cache; adds it."""
        is_known = group in self._seen
        self._seen[group] = self._seen.pop(group, None)
        if len(self._seen) > SEEN_PROMPTS:
            del self._seen[next(iter(self._seen))]
        return is_known

    def _retract(self) -> None:
        place = min(
            range(len(self._running)),
            key=lambda i: (self._generated(self._running[i][2]), -self._running[i][1]),
        )
        request = self._running.pop(place)[2]
        heapq.heapify(self._running)
        self._put_back(request)
        self.counts.retractions += 1

    def _put_back(self, request: Request) -> None:
        self.kv -= self._held(request)
        request.generated = self._generated(request)
        self._waiting.appendleft(request)

    def _stop(self) -> None:
        self._is_paused = True
        if self.model.recomputes_cache:
            self._seen.clear()
            # Keep the order in which the completions joined.
            for _, _, request in sorted(self._running, key=lambda entry: -entry[1]):
                self._put_back(request)
            self._running.clear()

    def _generated(self, request: Request) -> int:
        return request.generated + self.iterations - request.joined_at

    def _held(self, request: Request) -> int:
        return request.prompt_tokens + self._generated(request)
