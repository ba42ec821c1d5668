"""Runs a variant of tools.bench.end_to_end, ours or TRL, as a sub-process; returns its steps."""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.data.prompts import PromptStream, prompts_of_run
from megatron_rl.protocol.metrics import read_jsonl
from megatron_rl.protocol.render import open_renderer
from tools.bench.children import environment, run_child, run_job
from tools.bench.loops import StepMark, marks_from_metrics, marks_from_peer

RUN_TIMEOUT_S = 900.0
TRL = {
    "lr_scheduler_type": "constant_with_warmup",
    "top_p": 1.0,
    "top_k": 0,
    "beta": 0.0,
    "scale_rewards": "batch",
    "loss_type": "dapo",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}
"""TRL's settings for our algorithm: one optimizer step per generation, no reference model. Options
that would only slow TRL are off."""
OF_LOOKUP = {
    "generation_kwargs": {"max_new_tokens": 3},
    "max_tool_calling_iterations": 1,
}
"""More of TRL's settings for the task lookup: the limits that examples/agents/lookup.py sets."""


@dataclass(frozen=True)
class Workload:
    """Configuration and prompts of all variants."""

    configs: tuple[Path, ...]
    """Our configuration files; later files take precedence."""
    overrides: tuple[str, ...]
    """Overrides of all our timed runs."""
    peer_prompts: Path
    """The train prompts in the peer's format."""

    @property
    def config(self) -> Config:
        """The configuration of our timed runs."""
        return load_config(self.configs, self.overrides)


def run_ours(workload: Workload, *, max_staleness: int, run_dir: Path) -> list[StepMark]:
    """Train with our system. Raises ChildFailed."""
    overrides = [*workload.overrides, f"queue.max_staleness={max_staleness}"]
    run_cli(workload.configs, overrides, run_dir=run_dir)
    rows = read_jsonl(run_dir / "metrics.jsonl")
    return marks_from_metrics(rows, workload.config.train.group_size)


def run_cli(configs: Sequence[Path], overrides: Sequence[str], *, run_dir: Path) -> None:
    """`megatron-rl run`. Raises ChildFailed."""
    command = [sys.executable, "-m", "megatron_rl.cli.main", "run", "--run-dir", run_dir]
    for path in configs:
        command += ["--config", path]
    run_child(
        [*command, *overrides],
        log=run_dir.with_suffix(".log"),
        timeout_s=RUN_TIMEOUT_S,
        environment=environment(),
    )


def run_peer(
    workload: Workload,
    python: Path,
    *,
    threads: int,
    run_dir: Path,
    settings: Mapping[str, Any] | None = None,
) -> list[StepMark]:
    """Train with TRL's GRPOTrainer in its own environment. Raises ChildFailed."""
    run_dir.mkdir(parents=True)
    job = peer_job(
        workload.config, workload.peer_prompts, threads=threads, run_dir=run_dir, settings=settings
    )
    rows = run_job(
        python,
        "tools.bench.end_to_end_peer",
        job,
        path=run_dir / "job",
        timeout_s=RUN_TIMEOUT_S,
        environment=environment(threads=threads),
    )
    return marks_from_peer(rows)


def peer_job(
    config: Config,
    prompts: Path,
    *,
    threads: int,
    run_dir: Path,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The job of tools.bench.end_to_end_peer for `config`.

    settings: arguments of GRPOConfig that replace those of `config` and TRL.
    """
    rollouts = config.train.prompts_per_batch * config.train.group_size
    task = "open" if config.reward.extra else next(iter(config.reward.tasks), "exact")
    optimizer, loss = config.optimizer, config.algorithm.policy_loss
    grpo = TRL | {
        "output_dir": str(run_dir.resolve() / "trl"),
        "per_device_train_batch_size": rollouts,
        "num_generations": config.train.group_size,
        "max_completion_length": config.sampling.max_new_tokens,
        "max_steps": config.train.steps,
        "learning_rate": optimizer.lr,
        "warmup_steps": optimizer.warmup_steps,
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.clip_grad_norm,
        "temperature": config.sampling.temperature,
        "epsilon": loss.eps_low,
        "epsilon_high": loss.eps_high,
        "seed": config.run.seed,
        **(OF_LOOKUP if task == "lookup" else {}),
        **(settings or {}),
    }
    grpo["gradient_accumulation_steps"] = rollouts // grpo["per_device_train_batch_size"]
    return {
        "model": str(config.model.path.resolve()),
        "prompts": str(prompts.resolve()),
        "threads": threads,
        "rollouts": rollouts,
        "correct_reward": config.reward.correct,
        "format_reward": config.reward.format,
        "task": task,
        "grpo": grpo,
    }


def write_peer_prompts(config: Config, path: Path, *, task: str = "exact") -> int:
    """Write the train prompts with their text and token ids, in the queue's order; returns their
    number.

    Raises InputError when the prompts or the tokenizer cannot be read, ValueError for another task.
    """
    renderer = open_renderer(config)
    sets = prompts_of_run(config)
    stream = PromptStream(sets, config.run.seed)
    prompts = [stream.next() for part in sets.train for _ in part]
    tasks = {prompt.task for prompt in prompts}
    if tasks != {task}:
        raise ValueError(f"the peer grades the task {task!r} only; there are {sorted(tasks)}")
    with path.open("w", encoding="utf-8") as file:
        for prompt in prompts:
            limit = config.sampling.max_new_tokens
            ids = renderer.render(
                prompt.messages, limit, task=prompt.task, is_program=prompt.is_program
            )
            row = {
                "text": renderer.decode(ids),
                "token_ids": ids,
                "messages": msgspec.to_builtins(prompt.messages),
                "answer": prompt.answer,
                "entry": prompt.entry,
            }
            file.write(json.dumps(row) + "\n")
    return len(prompts)


def with_steps(workload: Workload, steps: int) -> Workload:
    """The workload with this number of optimizer steps."""
    return dataclasses.replace(workload, overrides=(*workload.overrides, f"train.steps={steps}"))
