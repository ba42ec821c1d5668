"""A simulated engine: continuous batching in closed form between events. Pure.

Used by the simulation. One decoding iteration of B completions over a cache of K tokens takes
`base_s + per_running_s * B + per_kv_token_s * K` and adds one token to each. Between two changes of
the set of completions nothing else happens, so that n iterations take

    n (base_s + per_running_s B + per_kv_token_s K) + per_kv_token_s B n (n - 1) / 2

and no event is needed for a token; each completion that ends adds end_s to its last iteration.
Changes take effect at the end of an iteration, as in a real engine: completions join and leave,
weights are replaced, the engine pauses. Rules, from SGLang 0.5.23's scheduler:

- A completion joins when there is a place (max_running) and room in the cache for its tokens and a
  reserve for each that runs; its prefill takes time in which nobody decodes. A prompt that the
  engine has seen last costs no prefill (the prefix cache).
- Where `prefill_samples`, a prefill is a pass of its own that costs prefill_base_s and gives the
  first token, so that T tokens take T - 1 iterations after it. (A completion of one token still
  takes an iteration.) What came during a pass is prefilled in the next one, before anybody decodes;
  of a prompt that is not known one completion goes ahead, and the others follow when the prompt is
  in the prefix cache. Without it T tokens take T iterations: the same for long completions.
- When an iteration would overflow the cache, the completions with the fewest tokens are put back
  ("retracted"); they wait at the head of the line, keep their tokens, and prefill them again.

Left out: chunked prefill mixed with decoding, and that completions of a group share their prompt's
place in the cache.
"""

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass

from megatron_rl.simulation.request import Request

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
    request_s: float = 0.0
    """Of processor time around each completion, when it joins: the generator's own work."""
    hand_over_s: float = 0.0
    """Of processor time for each completion that ended, one after the other, until the queue has
    it; the engine goes on meanwhile."""
    prefill_samples: bool = False
    """Whether a prefill is a pass of its own that gives a token, as a real one is."""
    prefill_base_s: float = 0.0
    """Of such a pass, whatever it prefills."""
    wake_s: float = 0.0
    """Of such a pass beside these, where the engine had nothing to do before."""
    lease_s: float = 0.0
    """Of the generator for each lease, one after the other, until the engine has it."""
    end_s: float = 0.0
    """Of an iteration, for each completion that ends in it."""
    paces: tuple[float, ...] = (1.0,)
    """Of the trainer's steps in turn: how many times as long all of this takes. On average 1."""
    forgets: bool = False
    """Whether a pause empties the cache: all that run are put back (weights.kv_cache)."""

    def iteration_s(self, running: int, kv: int) -> float:
        """Seconds of one iteration."""
        return self.base_s + self.per_running_s * running + self.per_kv_token_s * kv


@dataclass
class IterationCount:
    """Decoding iterations, and the tokens that came of them."""

    iterations: int = 0
    tokens: int = 0


class Engine:
    """Completions that wait and run, at a clock that the caller advances. Times are seconds."""

    def __init__(self, model: EngineModel, *, reserve_tokens: int = RESERVE_TOKENS) -> None:
        self.model = model
        self.version = -1
        self.speed = 1.0
        """Share of its full speed that it has now: others may use the same cores."""
        self.kv = 0
        """Tokens in the cache."""
        self.iterations = 0
        self.retractions = 0
        self.tokens = 0
        """Generated so far."""
        self.counted = IterationCount()
        """Since whoever looks has put another one here."""
        self.peak_kv = 0
        self._reserve = reserve_tokens
        self._clock = 0.0
        """End of the last iteration. While speeds change, a moment that gives the next end."""
        self._running: list[tuple[int, int, Request]] = []
        """Heap by the iteration that ends each."""
        self._waiting: deque[Request] = deque()
        self._order = itertools.count()
        self._seen: dict[int, None] = {}
        self._is_pausing = self._is_paused = False
        self._has_rested = False
        """Nothing ran before what joins next."""
        self._is_prefilling = False
        """A pass that gives first tokens ends at the clock."""
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

    def set_speed(self, speed: float, now: float) -> None:
        """Compute with another share of the full speed from now on."""
        self.advance(now)
        if self.is_working:
            # Such that what is done of this iteration stays done.
            self._clock = now - (now - self._clock) * self.speed / speed
        self.speed = speed

    def take_finished(self) -> list[tuple[float, Request]]:
        """(when, which) since the last call."""
        finished, self._finished = self._finished, []
        return finished

    # --- time -----------------------------------------------------------------------------------

    def next_at(self) -> float:
        """When something changes by itself: a completion ends, joins or is put back; or never."""
        if not self.is_working:
            return math.inf
        if self._is_prefilling and self._until_change() == 1:
            return self._clock
        return self._clock + self._seconds(self._until_change()) / self.speed

    def advance(self, now: float) -> None:
        """Complete all iterations that end by now."""
        while self.is_working:
            if self._is_prefilling:
                if now < self._clock - _rounding(self._clock):
                    return
                self._settle()
                continue
            change = self._until_change()
            passed = (now - self._clock) * self.speed
            done = min(change, self._iterations_in(passed))
            if self._ends_s(done) and self._seconds(done) > passed + _rounding(self._clock):
                done -= 1
            if done <= 0:
                return
            self._clock += self._seconds(done) / self.speed
            count = len(self._running)
            self.iterations += done
            self.kv += done * count
            self.tokens += done * count
            self.counted.iterations += done
            self.counted.tokens += done * count
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
        return iterations * model.iteration_s(count, self.kv) + growth + self._ends_s(iterations)

    def _ends_s(self, iterations: int) -> float:
        """Of so many iterations, at most until the first completion ends: what ending costs."""
        ends = self._running[0][0]
        if not self.model.end_s or self.iterations + iterations < ends:
            return 0.0
        # Those of a heap that equal its root hang together.
        count, places = 0, [0]
        while places:
            place = places.pop()
            if place < len(self._running) and self._running[place][0] == ends:
                count += 1
                places += (2 * place + 1, 2 * place + 2)
        return self.model.end_s * count

    def _iterations_in(self, seconds: float) -> int:
        """Whole iterations of the present completions in so many seconds at full speed, if none
        ends."""
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
        self._has_rested = True
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
        self._is_prefilling = False
        if self._is_pausing:
            self._stop()
            return
        while self.kv + len(self._running) > self.model.kv_tokens and len(self._running) > 1:
            self._retract()
        self._prefill()

    def _prefill(self) -> None:
        """Let those join that may, in one pass."""
        model = self.model
        prefilled = 0
        joined: list[Request] = []
        followers: list[Request] = []
        new_prompts: set[int] = set()
        while self._may_join():
            request = self._waiting.popleft()
            if model.prefill_samples and request.group in new_prompts:
                followers.append(request)
                continue
            if not self._knows(request.group):
                new_prompts.add(request.group)
                prefilled += request.prompt_tokens
            joined.append(request)
            prefilled += self._join(request)
        self._waiting.extendleft(reversed(followers))
        seconds = prefilled * model.prefill_s_per_token + len(joined) * model.request_s
        if joined and model.prefill_samples:
            seconds += model.prefill_base_s + model.wake_s * self._has_rested
            self._is_prefilling = True
            self._has_rested = False
        self._clock += seconds / self.speed
        for request in joined:
            request.first_token_at = min(request.first_token_at, self._clock)

    def _may_join(self) -> bool:
        if not self._waiting or len(self._running) >= self.model.max_running:
            return False
        if not self._running:
            return True
        first = self._waiting[0]
        reserve = self._reserve * (len(self._running) + 1)
        return self.kv + first.prompt_tokens + first.generated + reserve <= self.model.kv_tokens

    def _join(self, request: Request) -> int:
        """Let a completion decode from the next iteration on; its own tokens that are prefilled."""
        request.joined_at = self.iterations
        request.starts.append((self.version, request.generated))
        prefilled = request.generated
        if self.model.prefill_samples and request.tokens - request.generated > 1:
            request.generated += 1
            self.tokens += 1
        ends = self.iterations + request.tokens - request.generated
        heapq.heappush(self._running, (ends, next(self._order), request))
        self.kv += request.prompt_tokens + request.generated
        self.peak_kv = max(self.peak_kv, self.kv)
        return prefilled

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
        self.retractions += 1

    def _put_back(self, request: Request) -> None:
        self.kv -= self._held(request)
        request.generated = self._generated(request)
        self._waiting.appendleft(request)

    def _stop(self) -> None:
        self._is_paused = True
        if self.model.forgets:
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
