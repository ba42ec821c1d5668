"""Fits the model of a cluster to the records of a finished run.

Used by `megatron-rl simulate --calibrate RUN`.

| part      | fitted to                                                                           |
|-----------|-------------------------------------------------------------------------------------|
| lengths   | the run's completions, prompt by prompt; dropped groups too                         |
| verdicts  | share of right completions, and of groups dropped for zero variance                 |
| engine    | what its passes cost, where it tells; else seconds a token of each completion, by   |
|           | the completions and tokens that were with it (`engine_fit.py`)                      |
| trainer   | train/update_s by the tokens of the slowest rank; train/optimizer_s                 |
| sync      | weight_sync/s and weight_sync/pause_s                                               |
| verifiers | arrivals and scores, less the waiting for those before (`service_times.py`)          |

Where roles share cores, seconds are turned into seconds of work by the speed that the model of
sharing gives each moment (`core_use.py`). What is left open is changed, and the run is simulated,
until it fits:

- Where engines tell what their passes cost, and the last updates what the trainer takes alone: the
  share of its speed that a role keeps beside others, by the seconds of an update, and what engines
  keep of that, by the seconds from a completion's lease to its arrival. (Where no update was alone,
  the first by the latter; the trainer's costs with it.)
- Where they do not: what an engine does for a completion before its first token, which cannot be
  told from waiting for others, by the seconds from lease to arrival; the trainer's costs with it.
"""

import bisect
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.protocol.packing import deal
from megatron_rl.protocol.rollout_files import RolloutRecord
from megatron_rl.simulation.cluster import Cluster, Span
from megatron_rl.simulation.core_use import CoreUse, alone_share, update_span
from megatron_rl.simulation.engine_fit import FittedEngine, fit_engine
from megatron_rl.simulation.hand_over_fit import ending_together, fit_hand_over
from megatron_rl.simulation.hardware import Assumptions
from megatron_rl.simulation.machines import (
    ClusterModel,
    Faults,
    SharedCores,
    TrainerModel,
    VerifierModel,
    WeightSyncModel,
)
from megatron_rl.simulation.outcome import Outcome
from megatron_rl.simulation.pace_fit import engine_paces, trainer_paces
from megatron_rl.simulation.records import Measured, RunRecords, measure
from megatron_rl.simulation.service_times import fit_rounds, servers_seen, service_times
from megatron_rl.simulation.workload import PassRates, RecordedLengths, Workload

_ROUNDS = 8
_NEAR = 0.003
_KEPT_TIMES = 500
_MOST_LOST = 0.6
"""Of a role's speed to those beside it."""
_READY_S = 0.01
"""A batch that was formed so long before the trainer is free has come."""
_FAR = 1.5
"""Iterations so many times as large as those of a run are others."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A fitted model, and the run that it was fitted to."""

    fitted: ClusterModel
    workload: Workload
    measured: Measured
    simulated: Outcome
    """Of the same configuration."""
    config: Config
    """Of the run."""
    engine: FittedEngine

    def doubt(self, outcome: Outcome) -> str:
        """Why an outcome of these models may be far off, with the fix; empty: nothing is known."""
        low, high, asked = (
            self.engine.least_running, self.engine.most_running, outcome.running_mean
        )  # fmt: skip
        if low / _FAR <= asked <= high * _FAR:
            return ""
        return (
            f"its engines decode {asked:.0f} completions at a time, those of the run of "
            f"--calibrate {low:.0f} to {high:.0f} in nine of ten iterations: what an iteration "
            "costs beside its completions cannot be told from that, and step and idle shares may "
            "be far off. Fit to a run with iterations of this size too: with its "
            "generator.max_running, or with lengths that differ more"
        )

    def model(self, config: Config, assumed: Assumptions) -> ClusterModel:
        """The model of another configuration of the same machines. Raises InputError."""
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
            forgets=config.weights.kv_cache == "recompute",
        )
        sync = dataclasses.replace(
            fitted.sync,
            # Over gloo each copy serves all its engines at once.
            lanes=assumed.lanes if isinstance(assumed.lanes, int) else config.generator.replicas,
            is_overlapped=assumed.is_overlapped or config.weights.overlap,
        )
        verifier = fitted.verifier
        if assumed.verifier_servers is not None:
            verifier = dataclasses.replace(verifier, servers=assumed.verifier_servers)
        cores = fitted.cores
        if cores is not None:
            cores = dataclasses.replace(cores, trainer_threads=config.parallel.world_size)
        return dataclasses.replace(
            fitted,
            engine=engine,
            sync=sync,
            verifier=verifier,
            faults=Faults(assumed.deaths_per_engine_hour, assumed.restart_s, assumed.dead),
            cores=cores,
        )


def _check_same(name: str, fitted: object, asked: object) -> None:
    if fitted != asked:
        raise InputError(
            f"{name} is {asked}, but {fitted} in the run of --calibrate: what it measured says "
            "nothing about that; give a run with the same"
        )


def calibrate(run: RunRecords, cores: float | None = None) -> Calibration:
    """Fit to a run. cores: that all its roles share; None: each has devices of its own."""
    config, measured = run.config, measure(run)
    workload = _workload(run)
    shared = None
    if cores is not None:
        shared = SharedCores(cores, config.parallel.world_size, config.generator.tensor_parallel)
    hand_over_s = fit_hand_over(ending_together(run.rollouts))
    use = CoreUse(run, shared, hand_over_s)
    engine = fit_engine(run, use, hand_over_s)
    paces = engine_paces(run, use, engine.model, hand_over_s)
    # With the costs of both roles known, what an update lost to others tells how much that is.
    alone = alone_share(run) if shared is not None and run.passes else None
    model = ClusterModel(
        engine=dataclasses.replace(engine.model, paces=paces),
        trainer=_trainer(run, measured, alone or use.update_share(run.steps), use),
        sync=_sync(run, measured),
        verifier=_verifier(run, use),
        cores=shared,
        batch_s=_batch_s(run),
        read_s=_read_s(run),
    )
    model, simulated = _settle(run, model, workload, use, knows_trainer=alone is not None)
    return Calibration(model, workload, measured, simulated, config, engine)


def _settle(
    run: RunRecords, model: ClusterModel, workload: Workload, use: CoreUse, *, knows_trainer: bool
) -> tuple[ClusterModel, Outcome]:
    """The model whose simulation has the times of the run, and that simulation.

    knows_trainer: its costs are known; else they are changed until an update is as long as it was.
    """
    measured = measure(run)
    span = Span(steps=measured.steps)
    simulated = Cluster(run.config, model, workload, span).run()
    unknown = _unknown_of(model, is_told=bool(run.passes))
    tried: list[tuple[float, float]] = []
    low, high = unknown.low, unknown.high
    for _ in range(_ROUNDS if high > low else 0):
        # By the token: what is drawn for the simulation has other lengths by chance.
        slower = measured.latency_s_per_token / simulated.latency_s_per_token
        update_s = (measured.compute_s + measured.rest_s) / measured.trained_tokens
        longer = update_s / (simulated.compute_s / simulated.trained_tokens)
        if abs(longer - 1) < _NEAR and abs(slower - 1) < _NEAR:
            break
        value, error = unknown.get(model), (longer if knows_trainer else slower) - 1
        tried.append((value, error))
        low, high = (value, high) if error > 0 else (low, value)
        trainer = _scaled_trainer(model.trainer, 1.0 if knows_trainer else longer)
        model = unknown.put(model, _next_guess(tried, low, high))
        if knows_trainer:
            model = _with_engines(model, slower)
        model = dataclasses.replace(model, trainer=trainer)
        if run.passes:
            model = _with_hosts(model, run, use.at(model.cores))
        simulated = Cluster(run.config, model, workload, span).run()
    return model, simulated


@dataclasses.dataclass(frozen=True)
class _Unknown:
    """A figure that makes completions slower, the larger it is; found from their times."""

    get: Callable[[ClusterModel], float]
    put: Callable[[ClusterModel, float], ClusterModel]
    low: float
    high: float
    """No higher than low: nothing tells of it."""


def _unknown_of(model: ClusterModel, *, is_told: bool) -> _Unknown:
    """is_told: engines told what their passes cost."""
    if is_told:
        cores = model.cores
        return _Unknown(
            lambda m: 1 - m.cores.kept_beside if m.cores else 0.0,
            lambda m, v: dataclasses.replace(
                m, cores=m.cores and dataclasses.replace(m.cores, kept_beside=1 - v)
            ),
            0.0,
            _MOST_LOST if cores else 0.0,
        )
    return _Unknown(
        lambda m: m.engine.request_s,
        lambda m, v: dataclasses.replace(m, engine=dataclasses.replace(m.engine, request_s=v)),
        0.0,
        2 * model.engine.request_s,
    )


def _with_engines(model: ClusterModel, slower: float) -> ClusterModel:
    """Engines lose so much more to those beside them, within reason."""
    assert model.cores is not None
    most = 1 / model.cores.kept_beside
    keep = min(most, max(1 - _MOST_LOST, model.cores.engines_keep / slower))
    return dataclasses.replace(model, cores=dataclasses.replace(model.cores, engines_keep=keep))


def _with_hosts(model: ClusterModel, run: RunRecords, use: CoreUse) -> ClusterModel:
    """Hand-overs and grading take as long as they did, at the speed that is known better now."""
    hand_over_s = fit_hand_over(ending_together(run.rollouts), use)
    engine = dataclasses.replace(model.engine, hand_over_s=hand_over_s)
    return dataclasses.replace(model, engine=engine, verifier=_verifier(run, use))


def _next_guess(tried: list[tuple[float, float]], low: float, high: float) -> float:
    """Where the line through the last two (value, error) is 0; else the middle of the bounds."""
    if len(tried) > 1:
        (first, first_error), (second, second_error) = tried[-2:]
        if first_error != second_error:
            guess = second - second_error * (second - first) / (second_error - first_error)
            if low < guess < high:
                return guess
    return (low + high) / 2


def _scaled_trainer(trainer: TrainerModel, factor: float) -> TrainerModel:
    return dataclasses.replace(
        trainer,
        token_s=trainer.token_s * factor,
        optimizer_s=trainer.optimizer_s * factor,
        step_s=trainer.step_s * factor,
    )


# --- parts ------------------------------------------------------------------------------------


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
    )


def _trainer(run: RunRecords, measured: Measured, share: float, use: CoreUse) -> TrainerModel:
    """Passes are proportional to the tokens of the slowest rank; nothing else is.

    share: of an update's time that it would take with the cores to itself.
    """
    config = run.config
    lengths: defaultdict[int, list[int]] = defaultdict(list)
    for record in run.rollouts:
        if not record.dropped and record.times.trained is not None:
            lengths[round(record.times.trained * 1000)].append(record.prompt_tokens + record.tokens)
    slowest = [
        max(
            sum(sum(found[i] for i in microbatch) for microbatch in rank)
            for rank in deal(
                found,
                budget_tokens=config.train.microbatch_tokens,
                dp_size=config.parallel.data,
            )
        )
        for _, found in sorted(lengths.items())
    ]
    optimizer_s = float(np.mean([row.get("train/optimizer_s", 0.0) for row in run.steps]))
    passes_s = measured.compute_s - optimizer_s
    tokens = float(np.mean(slowest))
    return TrainerModel(
        token_s=share * passes_s / tokens,
        optimizer_s=share * optimizer_s / config.train.minibatches,
        step_s=measured.rest_s,
        paces=trainer_paces(run, use),
    )


def _sync(run: RunRecords, measured: Measured) -> WeightSyncModel:
    pauses = [row["weight_sync/pause_s"] for row in run.steps if "weight_sync/pause_s" in row]
    replicas = run.config.generator.replicas
    alone = measured.sync_s / replicas
    replica_s = min(alone, float(np.mean(pauses))) if pauses else alone
    return WeightSyncModel(replica_s, fixed_s=measured.sync_s - replicas * replica_s)


def _batch_s(run: RunRecords) -> float:
    """From a batch's forming to its update where the trainer waited for it; 0 if it never did."""
    took = [
        update_span(row)[0] - formed for row, asked_at, formed in _batches(run) if formed > asked_at
    ]
    return float(np.median(took)) if took else 0.0


def _read_s(run: RunRecords) -> float:
    """Of the trainer where the batch was there before it asked; 0 if none was."""
    took = [
        row["wait/batch_s"]
        for row, asked_at, formed in _batches(run)
        if formed < asked_at - _READY_S
    ]
    return float(np.median(took)) if took else 0.0


def _batches(run: RunRecords) -> Iterator[tuple[dict[str, Any], float, float]]:
    """(row of the step, when the trainer was free for it, when its batch was formed)."""
    formed = sorted({round(r.times.trained, 3) for r in run.rollouts if r.times.trained})
    for row, before in zip(run.every_step[1:], run.every_step, strict=False):
        place = bisect.bisect(formed, update_span(row)[0])
        if place and row in run.steps:
            yield row, before["time"], formed[place - 1]


def _verifier(run: RunRecords, use: CoreUse) -> VerifierModel:
    graded = [record.times for record in run.within() if record.times.scored is not None]
    arrivals, departures = [t.done for t in graded], [t.scored for t in graded]
    given = run.config.verifier.answers.workers
    servers = max(given if isinstance(given, int) else 1, servers_seen(arrivals, departures))
    seconds = sorted(service_times(arrivals, departures, servers))
    kept = tuple(seconds[:: max(1, len(seconds) // _KEPT_TIMES)]) or (0.0,)
    rounds = fit_rounds(arrivals, departures, use.trainer.speed) if servers == 1 else None
    return VerifierModel(servers, kept, rounds)
