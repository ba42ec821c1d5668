"""Repeats recorded steps of a run: `torchrun -m megatron_rl.trainer.replay --config FILE ...`.

One process a trainer rank, started by `megatron-rl replay`. Needs neither queue nor generators: the
batches are in RUN/batches, the policy before them is in a checkpoint.
"""

import argparse
import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import megatron_rl.backend.no_compiler  # noqa: F401 - before Megatron

# isort: split
from megatron.core import parallel_state

from megatron_rl.algorithms.objective import find_objective
from megatron_rl.config.files import load_config
from megatron_rl.config.staging import optimizer_steps
from megatron_rl.config.tree import Config
from megatron_rl.protocol import wire
from megatron_rl.protocol.checkpoint_folder import read_queue_state
from megatron_rl.protocol.exports import step_name
from megatron_rl.protocol.process import failures_noted, note_started, run_rank, set_up_logging
from megatron_rl.protocol.stored_batches import BATCHES, state_name
from megatron_rl.protocol.types import RankBatch
from megatron_rl.trainer.batch_client import Stored
from megatron_rl.trainer.checkpoint.checkpoints import Checkpoints
from megatron_rl.trainer.checkpoint.trainer_state import restore
from megatron_rl.trainer.leader import Leader
from megatron_rl.trainer.metrics import StepMetrics
from megatron_rl.trainer.model.policy import open_policy
from megatron_rl.trainer.step import Trainer
from megatron_rl.trainer.train import open_control, open_record, take_step
from megatron_rl.weights.sync.control import Control


def main(cfg: Config, options: argparse.Namespace) -> None:
    """Repeat the steps; their metrics, records and export go to the folder `run.dir`."""
    with ExitStack() as stack:
        policy = stack.enter_context(open_policy(cfg))
        timeout_s = cfg.train.collective_timeout_s
        group = policy.backend.replica_group(cfg.parallel, timeout_s)
        control = open_control(cfg, policy)
        leader = Leader(group, control, timeout_s)
        trainer = Trainer(
            policy,
            find_objective(cfg.algorithm),
            cfg.optimizer,
            optimizer_steps(cfg),
            train=cfg.train,
            run_dir=cfg.run.dir,
            record=open_record(cfg),
        )
        first = restore(trainer, options.checkpoint) if options.checkpoint is not None else 0
        trainer.expect_steps(optimizer_steps(cfg, first))
        note_started()
        with failures_noted():
            repeat(trainer, leader, Stored.of(cfg, options.source, range(first, options.last)), cfg)
            if options.export:
                policy.export(cfg, step_name(options.last))
            if options.save:
                save(trainer, control, cfg, options)


def save(trainer: Trainer, control: Control, cfg: Config, options: argparse.Namespace) -> None:
    """Write the checkpoint after the last step, with the queue's recorded state. Collective.

    Raises InputError.
    """
    batches, last = options.source / BATCHES, options.last
    with Checkpoints(
        cfg.checkpoint,
        cfg.run.dir,
        control,
        companion=lambda step: read_queue_state(batches, state_name(step)),
        last_step=last,
    ) as checkpoints:
        checkpoints.save_at_stop(last, trainer)


def repeat(trainer: Trainer, leader: Leader, stored: Stored, cfg: Config) -> None:
    """Train on stored batches, and write a row of metrics a step. Collective."""
    metrics = StepMetrics(cfg.run.dir / "metrics.jsonl", "trainer")
    rank = parallel_state.get_data_parallel_rank()
    size = parallel_state.get_data_parallel_world_size()
    for step in stored.steps:
        frame = leader.read(partial(stored.read, step, rank, size))
        batch = wire.decode_frames(wire.split_frames(frame), RankBatch)
        take_step(trainer, batch, metrics)
        trainer.write_record(step)
        metrics.add_entries(batch.metrics)
        metrics.flush(step + 1)


def read_arguments(arguments: list[str]) -> argparse.Namespace:
    """The options; overrides: `section.key=value`."""
    parser = argparse.ArgumentParser(description="rank of a replay; start it with torchrun")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument(
        "--source", type=Path, required=True, help="the run whose steps are repeated"
    )
    parser.add_argument("--checkpoint", type=Path, help="default: the start of training")
    parser.add_argument("--last", type=int, required=True, help="the last step, counted from 1")
    parser.add_argument("--export", action="store_true", help="write hf/step_NNNNNN at the end")
    parser.add_argument("--save", action="store_true", help="write a checkpoint at the end")
    parser.add_argument("overrides", nargs="*")
    return parser.parse_args(arguments)


def start() -> int:
    """Entry of a rank."""
    options = read_arguments(sys.argv[1:])
    cfg = load_config(options.config, options.overrides)
    role = f"trainer-{os.environ.get('RANK', '0')}"
    set_up_logging(role, cfg.run.dir / "logs")
    return run_rank(role, partial(main, cfg, options))


if __name__ == "__main__":
    sys.exit(start())
