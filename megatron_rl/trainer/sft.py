"""Supervised fine-tuning: `torchrun -m megatron_rl.trainer.sft --config FILE [--control]`.

One process a trainer rank; the same trainer as in reinforcement learning on other batches. The
cold start writes RUN/hf/cold_start. With --control it goes on from there for as much compute as
reinforcement learning used, and writes RUN/hf/control.
"""

import argparse
import logging
import math
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import megatron_rl.backend.no_compiler  # noqa: F401 - before Megatron

# isort: split
from megatron.core import parallel_state

from megatron_rl.algorithms.objective import find_objective
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.config.staging import resolve_stages
from megatron_rl.config.tree import Config
from megatron_rl.protocol.metrics import read_jsonl, without_superseded
from megatron_rl.protocol.packing import deal
from megatron_rl.protocol.process import run_main, set_up_logging
from megatron_rl.protocol.render import open_renderer
from megatron_rl.protocol.sequence_cost import TOKENS, SequenceCost, find_cost
from megatron_rl.protocol.types import MinibatchShare, TrainSequence
from megatron_rl.trainer.metrics import StepMetrics
from megatron_rl.trainer.model.policy import open_policy
from megatron_rl.trainer.step import Trainer
from megatron_rl.trainer.traces import minibatches, read_traces, tokenize

log = logging.getLogger(__name__)
# Forward and backward cost 6 FLOP a parameter and token, generation 2.
GENERATED_TOKENS_PER_TRAINED = 3


def tune(trainer: Trainer, batches: Iterator[MinibatchShare], metrics: StepMetrics) -> None:
    """One optimizer step a batch."""
    for step, batch in enumerate(batches, 1):
        metrics.add(trainer.update(batch, version=0))
        metrics.flush(step)
    trainer.gather()


def main(cfg: Config, is_control: bool) -> None:
    """Set up this rank, tune, export."""
    if cfg.sft.traces is None:
        raise InputError("sft.traces names no file: supervised fine-tuning needs one")
    renderer = open_renderer(cfg)
    sequences = tokenize(read_traces(cfg.sft.traces), renderer)
    steps = control_steps(cfg, sequences) if is_control else cfg.sft.steps
    name, source = ("control", "control") if is_control else ("cold_start", "sft")
    with open_policy(cfg) as policy:
        # Traces carry no expert choices.
        train = cfg.train.model_copy(update={"router_replay": False})
        objective = find_objective(AlgorithmConfig(preset="sft"))
        trainer = Trainer(
            policy, objective, cfg.sft.optimizer, steps, train=train, run_dir=cfg.run.dir
        )
        batches = minibatches(
            sequences,
            batch_size=cfg.sft.batch_size,
            steps=steps,
            seed=cfg.run.seed + int(is_control),
        )
        metrics = StepMetrics(cfg.run.dir / "metrics.jsonl", source)
        cost = find_cost(cfg.train.packing, cfg.model.path)
        shares = (share_of(batch, cfg.train.microbatch_tokens, cost) for batch in batches)
        tune(trainer, shares, metrics)
        policy.export(cfg, name)


def share_of(
    batch: list[TrainSequence], budget_tokens: int, cost: SequenceCost = TOKENS
) -> MinibatchShare:
    """This data-parallel rank's microbatches of a minibatch."""
    dealt = deal(
        [len(sequence.token_ids) for sequence in batch],
        budget_tokens=budget_tokens,
        dp_size=parallel_state.get_data_parallel_world_size(),
        cost=cost,
    )
    mine = dealt[parallel_state.get_data_parallel_rank()]
    return MinibatchShare([[batch[i] for i in microbatch] for microbatch in mine])


def control_steps(cfg: Config, sequences: list[TrainSequence]) -> int:
    """Steps that cost what reinforcement learning cost, counted in FLOP.

    Tokens that went through the trainer count whole, generated ones a third (forward only).
    """
    rows = without_superseded(read_jsonl(cfg.run.dir / "metrics.jsonl"))
    rows = [row for row in rows if row["source"] == "trainer"]
    trained = sum(row.get("train/padded_tokens", 0.0) for row in rows)
    groups = ("queue/groups_trained", "queue/groups_dropped_flat")
    sizes = [stage.train.group_size for stage in resolve_stages(cfg)]
    generated = sum(
        sum(row[name] for name in groups)
        * sizes[int(row.get("queue/stage", 0))]
        * row["rollout/length_tokens"]
        for row in rows
        if "rollout/length_tokens" in row
    )
    if not trained:
        raise InputError(
            f"{cfg.run.dir}/metrics.jsonl has no training step: there is no compute to match"
        )
    mean_length = sum(len(s.token_ids) for s in sequences) / len(sequences)
    budget = trained + generated / GENERATED_TOKENS_PER_TRAINED
    steps = math.ceil(budget / (mean_length * cfg.sft.batch_size))
    log.info("control: %.0f trained and %.0f generated tokens: %d steps", trained, generated, steps)
    return steps


def start() -> int:
    """Entry of a rank."""
    parser = argparse.ArgumentParser(description="supervised rank; start it with torchrun")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--control", action="store_true")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args()
    cfg = load_config(options.config, options.overrides)
    role = f"{'control' if options.control else 'sft'}-{os.environ.get('RANK', '0')}"
    set_up_logging(role, cfg.run.dir / "logs")
    return run_main(role, partial(main, cfg, options.control))


if __name__ == "__main__":
    sys.exit(start())
