"""Supervised fine-tuning: `torchrun -m megatron_rl.trainer.sft --config FILE [--sft-baseline]`.

One process per trainer rank; the same trainer as in reinforcement learning, on other batches. The
cold start writes RUN/hf/cold_start, or candidates RUN/hf/cold_start_step_N at intervals. It resumes
from its checkpoints in RUN/checkpoints/sft. With --sft-baseline training continues from the cold
start for as much compute as reinforcement learning used, and writes RUN/hf/sft_baseline.
"""

import argparse
import logging
import math
import os
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import megatron_rl.backend.no_compiler  # noqa: F401 - before Megatron

# isort: split
from megatron.core import parallel_state

from megatron_rl.algorithms.objective import find_objective
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.protocol.checkpoint_folder import folder_name
from megatron_rl.protocol.exports import COLD_START, SFT_BASELINE, candidate_name
from megatron_rl.protocol.metrics import stream_rows
from megatron_rl.protocol.packing import deal
from megatron_rl.protocol.process import note_started, run_rank, set_up_logging
from megatron_rl.protocol.render import open_renderer
from megatron_rl.protocol.sequence_cost import TOKENS, SequenceCost, find_cost
from megatron_rl.protocol.types import MinibatchShare, TrainSequence
from megatron_rl.trainer.checkpoint.checkpoints import OF_SFT, Checkpoints
from megatron_rl.trainer.metrics import StepMetrics
from megatron_rl.trainer.model.collate import check_fits
from megatron_rl.trainer.model.policy import Policy, open_policy
from megatron_rl.trainer.sft_dataset import (
    SftState,
    check_same,
    describe_sft,
    minibatches,
    read_sft_dataset,
)
from megatron_rl.trainer.sft_rendering import tokenize_lines
from megatron_rl.trainer.step import Trainer
from megatron_rl.trainer.step_records import StepProfile
from megatron_rl.weights.layout.rope import check_length
from megatron_rl.weights.sync.control import Control

log = logging.getLogger(__name__)
# Forward and backward cost 6 FLOP a parameter and token, generation 2.
GENERATED_TOKENS_PER_TRAINED = 3


def tune(
    cfg: Config, trainer: Trainer, batches: Iterable[tuple[int, MinibatchShare]], source: str
) -> Iterator[tuple[int, StepMetrics]]:
    """One optimizer step per batch; yields its number, and metrics before they are written.

    source: "sft" or "sft_baseline", the name in metrics and profiles.
    """
    metrics = StepMetrics(cfg.run.dir / "metrics.jsonl", source, limit_s=cfg.train.disk_wait_s)
    note_started()
    with StepProfile(cfg.sft.profile_steps, cfg.run.dir / "profile" / source) as profile:
        for step, batch in batches:
            profile.begin_step(step)
            metrics.add(trainer.update(batch, version=0))
            yield step, metrics
            metrics.flush(step)
    trainer.gather()


def main(cfg: Config, is_baseline: bool) -> None:
    """Set up this rank, tune, export."""
    if cfg.sft.dataset is None:
        raise InputError("sft.dataset names no file: supervised fine-tuning needs one")
    renderer = open_renderer(cfg)
    examples = dict(enumerate(read_sft_dataset(cfg.sft.dataset)))
    sequences = tokenize_lines(cfg.sft.dataset, examples, renderer)
    if cfg.train.pad_microbatches:
        check_fits(max(len(s.token_ids) for s in sequences), cfg.train.microbatch_tokens)
    steps = baseline_steps(cfg, sequences) if is_baseline else cfg.sft.steps
    with open_policy(cfg) as policy:
        longest = max(len(s.token_ids) for s in sequences)
        check_length(policy.shape.rope_scaling, longest, "the longest example of sft.dataset")
        # SFT examples carry no expert choices; `tune` records its own profile.
        train = cfg.train.model_copy(update={"router_replay": False, "profile_steps": None})
        objective = find_objective(AlgorithmConfig(preset="sft"))
        trainer = Trainer(
            policy, objective, cfg.sft.optimizer, steps, train=train, run_dir=cfg.run.dir
        )
        if is_baseline:
            run_baseline(cfg, trainer, sequences, steps)
        else:
            run_cold_start(cfg, trainer, sequences)


def run_cold_start(cfg: Config, trainer: Trainer, sequences: list[TrainSequence]) -> None:
    """Train the cold start, from its newest checkpoint if it has one, and export it."""
    mine, candidates = describe_sft(cfg, sequences), cfg.sft.candidates
    with open_checkpoints(cfg, trainer.policy, mine) as checkpoints:
        done = checkpoints.resume(trainer)
        if done:
            check_same(mine, cfg.run.dir / OF_SFT.folder / folder_name(done))
        batches = batches_of(cfg, sequences, cfg.sft.steps, seed=cfg.run.seed, done=done)
        for step, metrics in tune(cfg, trainer, batches, "sft"):
            # Before the checkpoint, so that none is resumed whose earlier exports are missing.
            if step in candidates:
                trainer.gather()
                trainer.policy.export(cfg, candidate_name(step))
            checkpoints.save_if_due(step, trainer)
            metrics.add(checkpoints.metrics)
    if not candidates:
        trainer.policy.export(cfg, COLD_START)


def run_baseline(cfg: Config, trainer: Trainer, sequences: list[TrainSequence], steps: int) -> None:
    """Train the SFT baseline, and export it."""
    batches = batches_of(cfg, sequences, steps, seed=cfg.run.seed + 1)
    for _ in tune(cfg, trainer, batches, "sft_baseline"):
        pass
    trainer.policy.export(cfg, SFT_BASELINE)


def open_checkpoints(cfg: Config, policy: Policy, mine: SftState) -> Checkpoints:
    """Checkpoints of the cold start; collective over all ranks."""
    settings = {"every_steps": cfg.sft.checkpoint_every_steps, "keep_every": 0, "resume": "auto"}
    return Checkpoints(
        cfg.checkpoint.model_copy(update=settings),
        cfg.run.dir,
        # A rank may wait this long for its own writer before it joins the others.
        Control(
            policy.backend.host_group(
                cfg.checkpoint.write_timeout_s + cfg.train.collective_timeout_s
            )
        ),
        companion=lambda step: mine,
        # The export follows the last step.
        last_step=0,
        place=OF_SFT,
    )


def batches_of(
    cfg: Config, sequences: list[TrainSequence], steps: int, *, seed: int, done: int = 0
) -> Iterator[tuple[int, MinibatchShare]]:
    """(number of the step from 1, this rank's share of its minibatch) of each step after `done`."""
    found = minibatches(
        sequences,
        batch_size=cfg.sft.batch_size,
        steps=steps,
        seed=seed,
        done=done,
    )
    cost = find_cost(cfg.train.packing, cfg.model.path)
    for step, batch in enumerate(found, done + 1):
        yield step, share_of(batch, cfg.train.microbatch_tokens, cost)


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


def baseline_steps(cfg: Config, sequences: list[TrainSequence]) -> int:
    """Steps with the FLOPs of reinforcement learning.

    A trained token counts once, a generated token a third (forward only).
    """
    trained = generated = 0.0
    for row in stream_rows(cfg.run.dir / "metrics.jsonl", holding='"trainer"'):
        if row["source"] != "trainer":
            continue
        trained += row.get("train/padded_tokens", 0.0)
        if "rollout/length_tokens" in row:
            # Each rollout of the mean has one reason, also before a change of train.group_size.
            rollouts = sum(row[name] for name in row if name.startswith("reason/"))
            generated += rollouts * row["rollout/length_tokens"]
    if not trained:
        raise InputError(
            f"{cfg.run.dir}/metrics.jsonl has no training step, so its compute is unknown: train "
            "the run first"
        )
    mean_length = sum(len(s.token_ids) for s in sequences) / len(sequences)
    budget = trained + generated / GENERATED_TOKENS_PER_TRAINED
    steps = math.ceil(budget / (mean_length * cfg.sft.batch_size))
    log.info(
        "baseline: %.0f trained and %.0f generated tokens: %d steps", trained, generated, steps
    )
    return steps


def start() -> int:
    """Entry of a rank."""
    parser = argparse.ArgumentParser(description="supervised rank; start it with torchrun")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--sft-baseline", action="store_true")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args()
    cfg = load_config(options.config, options.overrides)
    role = f"{'sft-baseline' if options.sft_baseline else 'sft'}-{os.environ.get('RANK', '0')}"
    set_up_logging(role, cfg.run.dir / "logs")
    return run_rank(role, partial(main, cfg, options.sft_baseline))


if __name__ == "__main__":
    sys.exit(start())
