"""Fits the model of a cluster to the records of a finished run.

Used by `megatron-rl simulate --calibrate RUN`.

| part      | fitted to                                                                           |
|-----------|-------------------------------------------------------------------------------------|
| lengths   | the run's completions, prompt by prompt, including dropped groups                   |
| verdicts  | share of correct completions and of zero-variance groups                            |
| engine    | seconds per token of each completion, by the engine's load (`engine_fit.py`)        |
| trainer   | train/update_s by the tokens of the slowest rank; train/optimizer_s                 |
| sync      | weight_sync/s and weight_sync/pause_s                                               |
| verifiers | times of arrival and score, without the wait for earlier requests                   |
"""

import bisect
import dataclasses
import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.protocol.packing import deal
from megatron_rl.protocol.rollout_files import RolloutRecord
from megatron_rl.simulation.engine_fit import FittedEngine, fit_engine
from megatron_rl.simulation.hardware import Assumptions
from megatron_rl.simulation.machines import (
    ClusterModel,
    Faults,
    TrainerModel,
    VerifierModel,
    WeightSyncModel,
)
from megatron_rl.simulation.outcome import Outcome
from megatron_rl.simulation.records import Measured, RunRecords, measure
from megatron_rl.simulation.workload import Conversation, PassRates, RecordedLengths, Workload

_KEPT_TIMES = 500
_CERTAIN = 0.99
"""Share of requests that decides the number of servers; the rest may be retries."""
_FAR = 1.5
"""Factor between iteration sizes beyond which the fit is not trusted."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A fitted model."""

    fitted: ClusterModel
    workload: Workload
    config: Config
    """The run's configuration."""
    engine: FittedEngine

    def doubt(self, outcome: Outcome) -> str:
        """Reason why an outcome may be far off, with a fix; empty for none."""
        low, high, asked = (
            self.engine.least_running, self.engine.most_running, outcome.running_mean
        )  # fmt: skip
        if low / _FAR <= asked <= high * _FAR:
            return ""
        return (
            f"its engines decode {asked:.0f} completions at a time, those of the run of "
            f"--calibrate {low:.0f} to {high:.0f} in nine of ten iterations: step and idle shares "
            "may be far off. Fit to a run with iterations of this size: with this "
            "generator.max_running, or with lengths that differ more"
        )

    def model(self, config: Config, assumed: Assumptions) -> ClusterModel:
        """The model of another configuration on the same machines. Raises InputError."""
        mine, fitted = self.config, self.fitted
        if config.generator.colocate:
            raise InputError(
                "generator.colocate with --calibrate: what turns on a GPU cost is not found in "
                "a run; simulate them without it"
            )
        for name in ("tensor", "pipeline", "context", "expert"):
            _check_same(
                f"parallel.{name}", getattr(mine.parallel, name), getattr(config.parallel, name)
            )
        ranks = config.generator.tensor_parallel
        _check_same("generator.tensor_parallel", mine.generator.tensor_parallel, ranks)
        engine = dataclasses.replace(
            fitted.engine,
            max_running=config.generator.max_running,
            kv_tokens=config.generator.bounded_kv_tokens,
            recomputes_cache=config.weights.kv_cache == "recompute",
        )
        sync = dataclasses.replace(
            fitted.sync, is_overlapped=assumed.is_overlapped or config.weights.overlap
        )
        verifier = fitted.verifier
        if assumed.verifier_servers is not None:
            verifier = dataclasses.replace(verifier, servers=assumed.verifier_servers)
        return dataclasses.replace(
            fitted,
            engine=engine,
            sync=sync,
            verifier=verifier,
            faults=Faults(assumed.deaths_per_engine_hour, assumed.restart_s, assumed.dead),
        )


def _check_same(name: str, fitted: object, asked: object) -> None:
    if fitted != asked:
        raise InputError(
            f"{name} is {asked}, but {fitted} in the run of --calibrate: what it measured says "
            "nothing about that; give a run with the same"
        )


def calibrate(run: RunRecords) -> Calibration:
    """Fit to a run whose roles share no device.

    Raises InputError for a run of an earlier release with environments.
    """
    if run.config.reward.environments and not any(one.conversation for one in run.rollouts):
        raise InputError(
            "--calibrate: the records of this run do not say when its engines sampled the replies "
            "of conversations: give a newer run, or leave --calibrate out"
        )
    measured, engine = measure(run), fit_engine(run)
    model = ClusterModel(
        engine=engine.model,
        trainer=_trainer(run, measured),
        sync=_sync(run, measured),
        verifier=_verifier(run),
    )
    return Calibration(model, _workload(run), run.config, engine)


def _workload(run: RunRecords) -> Workload:
    by_group: defaultdict[int, list[RolloutRecord]] = defaultdict(list)
    for record in run.within():
        by_group[record.group].append(record)
    graded = [r for group in by_group.values() for r in group if r.reward is not None]
    right = sum(record.reason == "correct" for record in graded) / len(graded)
    dropped = Counter(group[0].dropped == "zero_variance" for group in by_group.values())
    zero_variance_share = dropped[True] / dropped.total()
    prompts = [record.prompt_tokens for record in graded]
    return Workload(
        RecordedLengths(tuple(tuple(r.tokens for r in group) for group in by_group.values())),
        max(1, round(float(np.mean(prompts)))),
        PassRates.of(
            min(0.999, max(0.001, right)), zero_variance_share, run.config.train.group_size
        ),
        conversation=_conversation(graded),
    )


def _conversation(records: Sequence[RolloutRecord]) -> Conversation:
    """The means of all conversations; completions without an environment count as one reply."""
    turns = [turn for record in records for turn in record.conversation]
    if not turns:
        return Conversation()
    replies = sum(max(1, len(record.conversation)) for record in records) / len(records)
    spoken = [record for record in records if record.conversation]
    given = 1 - sum(turn.end - turn.start for turn in turns) / sum(one.tokens for one in spoken)
    waits = [
        max(0.0, turn.asked_s - record.conversation[turn.follows].replied_s)
        for record in spoken
        for turn in record.conversation
        if turn.follows >= 0
    ]
    return Conversation(max(1, round(replies)), given, float(np.mean(waits or 0.0)))


def _trainer(run: RunRecords, measured: Measured) -> TrainerModel:
    """Only passes are proportional to the tokens of the slowest rank."""
    config = run.config
    lengths: defaultdict[int, list[int]] = defaultdict(list)
    for record in run.rollouts:
        if not record.dropped and record.times.trained is not None:
            lengths[round(record.times.trained * 1000)].append(record.prompt_tokens + record.tokens)
    slowest = [
        max(
            sum(sum(found[i] for i in microbatch) for microbatch in rank)
            for rank in deal(
                found, budget_tokens=config.train.microbatch_tokens, dp_size=config.parallel.data
            )
        )
        for _, found in sorted(lengths.items())
    ]
    optimizer_s = float(np.mean([row.get("train/optimizer_s", 0.0) for row in run.steps]))
    passes_s = measured.compute_s - optimizer_s
    return TrainerModel(
        token_s=passes_s / float(np.mean(slowest)),
        optimizer_s=optimizer_s / config.train.minibatches,
        step_s=measured.rest_s,
    )


def _sync(run: RunRecords, measured: Measured) -> WeightSyncModel:
    pauses = [row["weight_sync/pause_s"] for row in run.steps if "weight_sync/pause_s" in row]
    pause_s = min(measured.sync_s, float(np.mean(pauses))) if pauses else measured.sync_s
    return WeightSyncModel(pause_s, fixed_s=measured.sync_s - pause_s)


def _verifier(run: RunRecords) -> VerifierModel:
    graded = [record.times for record in run.within() if record.times.scored is not None]
    arrivals, departures = [t.done for t in graded], [t.scored for t in graded]
    given = run.config.verifier.answers.workers
    servers = max(given if isinstance(given, int) else 1, servers_seen(arrivals, departures))
    seconds = sorted(service_times(arrivals, departures, servers))
    kept = tuple(seconds[:: max(1, len(seconds) // _KEPT_TIMES)]) or (0.0,)
    return VerifierModel(servers, kept)


def servers_seen(arrivals: Sequence[float], departures: Sequence[float]) -> int:
    """The fewest servers that explain the order of departures.

    Requests begin in the order of arrival. Requests that arrived before one and leave after it
    occupied other servers when it began.
    """
    found: list[int] = []
    left: list[float] = []
    """Departures of all earlier arrivals, sorted."""
    for _, departure in sorted(zip(arrivals, departures, strict=True)):
        found.append(1 + len(left) - bisect.bisect_right(left, departure))
        bisect.insort(left, departure)
    found.sort()
    return found[math.ceil(_CERTAIN * len(found)) - 1] if found else 1


def service_times(
    arrivals: Sequence[float], departures: Sequence[float], servers: int
) -> list[float]:
    """Service seconds of each request in order of arrival, at least 0.

    Service starts at arrival or when a server becomes free (Lindley's recursion).
    """
    free = [-math.inf] * servers
    found: list[float] = []
    for arrival, departure in sorted(zip(arrivals, departures, strict=True)):
        begins = max(arrival, heapq.heappop(free))
        found.append(max(0.0, departure - begins))
        heapq.heappush(free, max(begins, departure))
    return found
