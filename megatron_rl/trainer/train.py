"""The reinforcement-learning trainer: `torchrun -m megatron_rl.trainer.train --config FILE`.

One process a trainer rank. Takes batches from the rollout queue, updates the policy, and syncs
every new version to the generators, which never wait for it.
"""

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import version as package_version
from pathlib import Path

import megatron_rl.backend.no_compiler  # noqa: F401 - before Megatron

# isort: split
from megatron.core import parallel_state

from megatron_rl.algorithms.objective import find_objective
from megatron_rl.config.files import load_config
from megatron_rl.config.generator import refuse_overlap
from megatron_rl.config.staging import optimizer_steps
from megatron_rl.config.tree import Config
from megatron_rl.protocol.disk_room import write_when_room
from megatron_rl.protocol.keys import load_keys
from megatron_rl.protocol.metrics import FIRST_STEP
from megatron_rl.protocol.process import (
    RESTARTED_VARIABLE,
    failures_noted,
    note_done,
    note_started,
    run_rank,
    set_up_logging,
)
from megatron_rl.protocol.stop_request import answer_stop
from megatron_rl.protocol.stored_batches import BATCHES, stored_steps
from megatron_rl.protocol.types import RankBatch
from megatron_rl.trainer.batch_client import BatchClient, Stored
from megatron_rl.trainer.checkpoint.checkpoints import Checkpoints
from megatron_rl.trainer.leader import Leader
from megatron_rl.trainer.metrics import StepMetrics
from megatron_rl.trainer.model.build import DTYPES
from megatron_rl.trainer.model.policy import Policy, open_policy
from megatron_rl.trainer.scoring_client import open_scorer
from megatron_rl.trainer.step import Trainer
from megatron_rl.trainer.step_records import TokenRecord
from megatron_rl.weights.exchange.transport import FOLDER, IPC
from megatron_rl.weights.folders.finite import faulty_tensors
from megatron_rl.weights.folders.load import check_untrained
from megatron_rl.weights.layout.local_names import named_parameters
from megatron_rl.weights.layout.ranks import all_places
from megatron_rl.weights.sync.control import Control
from megatron_rl.weights.sync.leader import ExchangeSettings
from megatron_rl.weights.sync.link import GeneratorLink, open_router
from megatron_rl.weights.sync.reshard import Reshard
from megatron_rl.weights.sync.syncer import WeightSyncer
from megatron_rl.weights.sync.turns import MemoryTurns, end_turn_of_dead_trainer

log = logging.getLogger(__name__)


def train(
    trainer: Trainer,
    batches: BatchClient,
    weights: WeightSyncer,
    checkpoints: Checkpoints,
    metrics: StepMetrics,
    steps: range,
) -> int:
    """Train until the queue has no more batches; returns their number, with those before `steps`.

    Version k is the policy after k batches. A run that is asked to stop ends with a checkpoint.

    steps: starts at the step of the resumed checkpoint, or 0.
    """
    note_started()
    step = steps.start
    weights.sync(version=step)  # tests the path before any training
    batches.announce(step, is_final=step == steps.stop)
    metrics.flush(step, weights.metrics)
    while (batch := batches.next(step, weights.admit)) is not None:
        trainer.profile.begin_step(step + 1)
        weights.release()
        take_step(trainer, batch, metrics, join=weights.join)
        step += 1
        has_next = step < steps.stop and not checkpoints.is_due(step)
        if has_next:
            batches.request(step)  # the queue forms the batch while the weights travel
        if has_next and weights.overlaps:
            weights.start(step, partial(batches.announce_aside, step))
        else:
            weights.sync(version=step)
            batches.announce(step, is_final=step == steps.stop)
        trainer.write_record(batch.step)
        checkpoints.save_if_due(step, trainer)
        checkpoints.save_last_if_asked(step, trainer)
        metrics.add_entries(batch.metrics)
        metrics.flush(step, batches.metrics + weights.metrics + checkpoints.metrics)
    if step < steps.stop:
        weights.join()
        checkpoints.save_at_stop(step, trainer)
    return step


def take_step(
    trainer: Trainer,
    batch: RankBatch,
    metrics: StepMetrics,
    *,
    join: Callable[[], None] = lambda: None,
) -> None:
    """Train on a batch: one optimizer step a minibatch. Collective.

    join: called before the policy's weights change, or make room for a reference's.
    """
    prepared = trainer.prepare(batch.minibatches, before_swap=join)
    metrics.add(trainer.reference.metrics if trainer.reference is not None else ())
    for number, minibatch in enumerate(batch.minibatches):
        metrics.add(
            trainer.update(
                minibatch,
                version=batch.step,
                # Popped, since what was prepared for a minibatch may be large.
                prepared=prepared.pop(0),
                is_first=number == 0,
                before_step=join,
            )
        )
    trainer.gather()


def main(cfg: Config, scorer_address: str) -> None:
    """Set up this rank, train, export. scorer_address: of the scorer's node, where there is one."""
    objective = find_objective(cfg.algorithm)
    with ExitStack() as stack:
        if RESTARTED_VARIABLE in os.environ:
            make_room(cfg)
        policy = stack.enter_context(open_policy(cfg))
        control = open_control(cfg, policy)
        timeout_s = cfg.train.collective_timeout_s
        group = policy.backend.replica_group(cfg.parallel, timeout_s)
        leader = Leader(group, control, timeout_s)
        scorer = stack.enter_context(open_scorer(cfg, leader, scorer_address))
        if cfg.weights.overlap:
            # The launcher checks this too; ranks may be started without it.
            refuse_overlap(cfg.weights, gpus=policy.device.type != "cpu")
        trainer = Trainer(
            policy,
            objective,
            cfg.optimizer,
            optimizer_steps(cfg),
            train=cfg.train,
            run_dir=cfg.run.dir,
            record=open_record(cfg),
            scorer=scorer,
        )
        with (
            open_batches(cfg, leader) as batches,
            open_checkpoints(cfg, control, policy, batches) as checkpoints,
            trainer.profile,
        ):
            steps = range(checkpoints.resume(trainer), cfg.train.steps)
            trainer.expect_steps(optimizer_steps(cfg, steps.start))
            batches.stored = find_stored(cfg, control, steps.start)
            with open_syncer(cfg, policy, control) as weights:
                if batches.stored.steps:
                    weights.wait_until_level(batches.stored.steps[-1])
                metrics = StepMetrics(
                    cfg.run.dir / "metrics.jsonl", "trainer", limit_s=cfg.train.disk_wait_s
                )
                metrics.write_start(describe(cfg, policy, weights) | {FIRST_STEP: steps.start})
                with failures_noted():
                    done = train(trainer, batches, weights, checkpoints, metrics, steps)
        if done == cfg.train.steps:
            policy.export(cfg, "final")
        elif control.rank == 0:
            write_when_room(
                cfg.run.dir,
                partial(answer_stop, cfg.run.dir, done),
                limit_s=cfg.checkpoint.write_timeout_s,
            )
        control.all(True)
        note_done()


def make_room(cfg: Config) -> None:
    """After the death of a trainer that shares its GPUs' memory: take it back, before it is used.

    The other ranks wait for rank 0 to join their process group.
    """
    if not cfg.generator.release_memory or int(os.environ["RANK"]) != 0:
        return
    limit_s = min(cfg.generator.start_timeout_s, cfg.train.collective_timeout_s / 2)
    with open_router(cfg.ports) as router:
        end_turn_of_dead_trainer(
            GeneratorLink(router),
            replicas=cfg.generator.replicas,
            limit_s=limit_s,
            deadline_s=cfg.weights.deadline_s,
        )


def open_control(cfg: Config, policy: Policy) -> Control:
    """The control group of all trainer ranks, for weight syncs, checkpoints and the wait for
    batches.

    Over gloo each rank has a socket to every other one. Collective.
    """
    # A rank may wait while two transfers of another rank exceed their deadline.
    sync_s = 3 * cfg.weights.deadline_s + cfg.weights.join_timeout_s
    if cfg.generator.release_memory:
        sync_s += cfg.generator.start_timeout_s
    # A rank may wait this long for its own writer before it joins the others.
    save_s = cfg.checkpoint.write_timeout_s + cfg.train.collective_timeout_s
    return Control(policy.backend.host_group(max(sync_s, save_s)))


@contextmanager
def open_syncer(cfg: Config, policy: Policy, control: Control) -> Iterator[WeightSyncer]:
    """Syncer to the generators, which must say hello within expert.weights.join_timeout_s.

    The policy has the weights of the run's first sync. Raises InputError as `check_untrained`.
    """
    check_untrained(policy.chunks, policy.shape, cfg.model.path)
    with ExitStack() as stack:
        link = None
        if int(os.environ["RANK"]) == 0:
            link = GeneratorLink(stack.enter_context(open_router(cfg.ports)))
        method = open_method(cfg, policy, control=control, link=link)
        syncer = make_syncer(cfg, policy, method, control=control, link=link)
        syncer.await_generators()
        yield stack.enter_context(syncer)


def make_syncer(
    cfg: Config, policy: Policy, method: Reshard, *, control: Control, link: GeneratorLink | None
) -> WeightSyncer:
    """The syncer of this run's settings."""
    return WeightSyncer(
        method,
        control,
        link,
        replicas=cfg.generator.replicas,
        min_replicas=cfg.generator.min_replicas,
        join_timeout_s=cfg.weights.join_timeout_s,
        overlaps=cfg.weights.overlap,
        turns=open_turns(cfg, policy, control=control, link=link),
        fault=lambda: faulty_tensors(*policy.weights),
    )


def open_method(
    cfg: Config, policy: Policy, *, control: Control, link: GeneratorLink | None
) -> Reshard:
    """The method of weight sync of this run."""
    name = control.share(f"weights-{time.time_ns()}", str)
    settings = settings_of(cfg, policy.backend.collectives, name)
    place = all_places(policy.chunks[0].config)[control.rank]
    parameters = named_parameters(policy.chunks)
    return Reshard(parameters, place, policy.shape, control=control, link=link, settings=settings)


def settings_of(cfg: Config, collectives: str, name: str) -> ExchangeSettings:
    """Settings of the exchange, as `ExchangeSettings` says. collectives: the device's backend."""
    return ExchangeSettings(
        host=cfg.ports.host,
        backend={"ipc": IPC, "folder": FOLDER}.get(cfg.weights.method, collectives),
        dtype=DTYPES[cfg.model.dtype],
        bucket_bytes=cfg.weights.bucket_bytes,
        deadline_s=cfg.weights.deadline_s,
        grace_s=cfg.weights.grace_s,
        name=name,
        groups=cfg.weights.groups,
        folder=cfg.weights_folder,
        keeps=not cfg.generator.release_memory,
    )


def open_turns(
    cfg: Config, policy: Policy, *, control: Control, link: GeneratorLink | None
) -> MemoryTurns | None:
    """Turns of engines and trainer on their GPUs' memory; None where they share none."""
    if not cfg.generator.release_memory:
        return None
    return MemoryTurns(
        control,
        link,
        deadline_s=cfg.weights.deadline_s,
        start_timeout_s=cfg.generator.start_timeout_s,
        free_cache=policy.backend.free_cache,
    )


def open_batches(cfg: Config, leader: Leader) -> BatchClient:
    """Client of the queue for this data-parallel rank."""
    return BatchClient(
        f"{cfg.ports.host}:{cfg.ports.batches}",
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        leader=leader,
        timeout_s=cfg.train.batch_timeout_s + cfg.eval_delay_s,
        keys=load_keys(cfg.ports.keys_dir),
        label=cfg.ports.label,
    )


def find_stored(cfg: Config, control: Control, step: int) -> Stored:
    """The batches from `step` on that an earlier session of this trainer got. Collective."""
    stored = stored_steps(cfg.run.dir / BATCHES) if control.rank == 0 else []
    end = step
    while end in stored:
        end += 1
    end = control.share(end, int)
    if end > step:
        log.info("the trainer was restarted: it repeats the steps %d to %d", step + 1, end)
    return Stored.of(cfg, cfg.run.dir, range(step, end))


def open_record(cfg: Config) -> TokenRecord | None:
    """The record of single tokens' values, if the run keeps one."""
    if not cfg.train.record_tokens:
        return None
    dp_rank = parallel_state.get_data_parallel_rank()
    return TokenRecord(cfg.run.dir, dp_rank, limit_s=cfg.train.disk_wait_s)


def open_checkpoints(
    cfg: Config, control: Control, policy: Policy, batches: BatchClient
) -> Checkpoints:
    """Checkpoints of this run."""
    checkpoints = Checkpoints(
        cfg.checkpoint,
        cfg.run.dir,
        control,
        companion=partial(batches.queue_state, timeout_s=cfg.checkpoint.queue_timeout_s),
        last_step=cfg.train.steps,
    )
    checkpoints.export = partial(policy.export, cfg)
    return checkpoints


def describe(cfg: Config, policy: Policy, weights: WeightSyncer) -> dict[str, str | int]:
    """Facts for the first row of the metrics."""
    engines = weights.engines
    return {
        "model/parameters": policy.parameters,
        "trainer/world_size": cfg.parallel.world_size,
        "trainer/tp": cfg.parallel.tensor,
        "trainer/pp": cfg.parallel.pipeline,
        "trainer/cp": cfg.parallel.context,
        "trainer/dp": cfg.parallel.data,
        "engine": ",".join(sorted({hello.engine for hello in engines})),
        "engine_version": ",".join(sorted({hello.engine_version for hello in engines})),
        "megatron_core_version": package_version("megatron-core"),
    }


def read_arguments(arguments: list[str]) -> tuple[Config, str]:
    """Config and scorer's address: --config FILE [--scorer ADDRESS] [section.key=value ...]."""
    parser = argparse.ArgumentParser(description="trainer rank; start it with torchrun")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--scorer", default="", help="address of the scorer's node")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args(arguments)
    config = load_config(options.config, options.overrides)
    return config, options.scorer or config.ports.host


def start() -> int:
    """Entry of a rank."""
    cfg, scorer_address = read_arguments(sys.argv[1:])
    role = f"trainer-{os.environ.get('RANK', '0')}"
    set_up_logging(role, cfg.run.dir / "logs")
    return run_rank(role, partial(main, cfg, scorer_address))


if __name__ == "__main__":
    sys.exit(start())
