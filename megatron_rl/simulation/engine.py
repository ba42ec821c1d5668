"""A simulated engine: continuous batching in closed form between events. Pure.

Used by the simulation. One decoding iteration of B completions over a cache of K tokens takes
`base_s + per_running_s * B + per_kv_token_s * K` and adds one token to each. Between two changes of
the set of completions nothing else happens, so that n iterations take

    n (base_s + per_running_s B + per_kv_token_s K) + per_kv_token_s B n (n - 1) / 2

and no event is needed for a token.
Changes take effect at the end of an iteration, as in a real engine: completions join and leave,
weights are replaced, the engine pauses. Rules, from SGLang 0.5.23's scheduler:

- A completion joins when there is a place (max_running) and room in the cache for its tokens and a
  reserve for each that runs; its prefill takes time in which nobody decodes. A prompt that the
  engine has seen last costs no prefill (the prefix cache).
- When an iteration would overflow the cache, the completions with the fewest tokens are put back
  ("retracted"); they wait at the head of the line, keep their tokens, and prefill them again.

Left out: chunked prefill mixed with decoding, and that completions of a group share their prompt's
place in the cache.
"""

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass, field

from megatron_rl.protocol.types import VersionSpan

RESERVE_TOKENS = 512
"""Kept free in the cache for each running completion when another joins, at most what it may
generate. SGLang 0.5.23 estimates about an eighth of at most 4096 tokens (schedule_policy.py)."""
SEEN_PROMPTS = 4096
"""Prompts that the prefix cache is taken to hold; prompts are short beside completions."""


@dataclass(frozen=True)
class EngineModel:
    """What one engine costs, in seconds, and what it holds."""

    base_s: float
    """Of an iteration, whatever it decodes: reading the weights, launching kernels."""
    per_running_s: float
    """For each completion of an iteration."""
    per_kv_token_s: float
    """For each token in the cache of the completions of an iteration."""
    prefill_s_per_token: float
    max_running: int
    kv_tokens: int
    recomputes_cache: bool = False
    """Whether a pause empties the KV cache and puts all running completions back
    (weights.kv_cache)."""

    def iteration_s(self, running: int, kv: int) -> float:
        """Seconds of one iteration."""
        return self.base_s + self.per_running_s * running + self.per_kv_token_s * kv


@dataclass
class Request:
    """A completion that an engine is asked for."""

    lease_id: int
    index: int
    group: int
    """Completions with the same number have the same prompt."""
    prompt_tokens: int
    tokens: int
    """How long it will be."""
    generated: int = 0
    """Until it joined last."""
    joined_at: int = 0
    """Iteration after which it decodes."""
    leased_at: float = 0.0
    starts: list[tuple[int, int]] = field(default_factory=list)
    """(policy version, completion token from which on it sampled)."""

    def spans(self) -> list[VersionSpan]:
        """Which version sampled which tokens, once it is finished."""
        last: dict[int, int] = {}
        for version, start in self.starts:
            last[start] = version
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
    """What engines have done."""

    tokens: int = 0
    """Generated."""
    iterations: int = 0
    retractions: int = 0


class Engine:
    """Completions that wait and run, at a clock that the caller advances. Times are seconds."""

    def __init__(
        self,
        model: EngineModel,
        *,
        reserve_tokens: int = RESERVE_TOKENS,
        counts: Counts | None = None,
    ) -> None:
        """counts: what the engine adds to; other engines may share it."""
        self.model = model
        self.counts = counts if counts is not None else Counts()
        self.version = -1
        self.kv = 0
        """Tokens in the cache."""
        self.iterations = 0
        """Of this engine since it started."""
        self.peak_kv = 0
        self._reserve = reserve_tokens
        self._clock = 0.0
        """End of the last iteration."""
        self._running: list[tuple[int, int, Request]] = []
        """Heap by the iteration that ends each."""
        self._waiting: deque[Request] = deque()
        self._order = itertools.count()
        self._seen: dict[int, None] = {}
        self._is_pausing = self._is_paused = False
        self._new_version: int | None = None
        self._finished: list[tuple[float, Request]] = []

    @property
    def in_flight(self) -> int:
        """Completions that run or wait."""
        return len(self._running) + len(self._waiting)

    @property
    def running(self) -> int:
        """Completions that run."""
        return len(self._running)

    @property
    def is_working(self) -> bool:
        """Whether it computes."""
        return bool(self._running) and not self._is_paused

    @property
    def pending_version(self) -> int | None:
        """Of the weights that it takes at the end of this iteration."""
        return self._new_version

    # --- what happens to it; each at a time not before that of the call before ----------------

    def add(self, request: Request, now: float) -> None:
        """A completion arrives."""
        self.advance(now)
        self._waiting.append(request)
        if not self._running:
            self._begin(now)

    def cancel(self, lease_id: int, now: float) -> None:
        """Forget what is left of a lease."""
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
        """Go on with the weights of a version."""
        self.advance(now)
        self._is_pausing = False
        self._new_version = version
        if self._is_paused or not self._running:
            self._is_paused = False
            self._begin(now)

    def take_finished(self) -> list[tuple[float, Request]]:
        """(when, which) since the last call."""
        finished, self._finished = self._finished, []
        return finished

    # --- time -----------------------------------------------------------------------------------

    def next_at(self) -> float:
        """When something changes by itself: a completion ends, joins or is put back; or never."""
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
        """Iterations until the set of completions, or their weights, may change."""
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
        """Whole iterations of the present completions in these seconds, if none ends."""
        seconds += _rounding(self._clock)
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
        """Nothing ran until now."""
        self._clock = max(self._clock, now)
        self._settle()

    def _leave(self) -> None:
        while self._running and self._running[0][0] <= self.iterations:
            request = heapq.heappop(self._running)[2]
            self.kv -= request.prompt_tokens + request.tokens
            self._finished.append((self._clock, request))

    def _settle(self) -> None:
        """Between two iterations: pause, take new weights, put back, let join."""
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
        """Let the waiting completions join that may."""
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
        """Let a completion decode from the next iteration on; return its tokens to prefill."""
        request.joined_at = self.iterations
        request.starts.append((self.version, request.generated))
        ends = self.iterations + request.tokens - request.generated
        heapq.heappush(self._running, (ends, next(self._order), request))
        self.kv += request.prompt_tokens + request.generated
        self.peak_kv = max(self.peak_kv, self.kv)
        return request.generated

    def _knows(self, group: int) -> bool:
        """Whether its prompt is in the prefix cache, where it is from now on."""
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
            # Who joined first is the first again.
            for _, _, request in sorted(self._running, key=lambda entry: -entry[1]):
                self._put_back(request)
            self._running.clear()

    def _generated(self, request: Request) -> int:
        return request.generated + self.iterations - request.joined_at

    def _held(self, request: Request) -> int:
        return request.prompt_tokens + self._generated(request)


def _rounding(clock: float) -> float:
    """Seconds that a sum of floats may lack of the moment for which an event was set."""
    return 1e-9 * max(1.0, abs(clock))
