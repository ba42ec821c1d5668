"""How to resume a run that ended early. Used by the commands that start launchers."""

import os
from pathlib import Path

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.launcher.cold_start import left_behind_text, steps_left_behind
from megatron_rl.launcher.run_folder import CONFIG, SUMMARY, second_text
from megatron_rl.observe.deaths import SAME_COMMAND
from megatron_rl.observe.heartbeat import find_living
from megatron_rl.protocol.checkpoint_folder import (
    CHECKPOINTS,
    find_resume,
    has_begun,
    is_checkpoint_of,
    step_of,
)


def last_words(config: Config, nodes: int = 0) -> str:
    """How to resume a run that ended early; "" for one that is complete or never started.

    nodes: --nodes of `megatron-rl node`; 0: another command started the run.
    """
    run_dir = config.run.dir
    if not (run_dir / CONFIG).exists() or (run_dir / SUMMARY).exists():
        return ""
    # Watching one on another host would take seconds.
    if (other := find_living(run_dir, watch_s=0.0)) and other.pid != os.getpid():
        return f"Another launcher has the folder: {second_text(run_dir)}."
    command = SAME_COMMAND
    if is_evaluation(config):
        return f"The completions of finished problems are kept. {command} resumes the evaluation."
    if nodes:
        node = f"megatron-rl node {run_dir} --nodes {nodes} --node N"
        command = f"Run `megatron-rl prepare` again, then `{node}` on each node: that"
    place, named = config.checkpoint, Path(config.checkpoint.resume)
    is_named = place.resume not in ("auto", "never")
    is_others = is_named and not is_checkpoint_of(named, run_dir / CHECKPOINTS)
    is_refused = is_others and not has_begun(place, run_dir)
    # The folder holds a run now, and is refused with "never" and with where another one begins.
    if is_refused or place.resume == "never":
        place = place.model_copy(update={"resume": "auto"})
        command += " without checkpoint.resume"
    try:
        checkpoint = find_resume(place, run_dir)
    except InputError as error:
        return str(error)
    if checkpoint is not None and is_checkpoint_of(checkpoint, run_dir / CHECKPOINTS):
        step = f"step {step_of(checkpoint)} of {config.train.steps}"
        return f"{command} resumes the run after {step}, from {checkpoint}."
    every = config.checkpoint.every_steps
    why = f"no checkpoint is complete yet (checkpoint.every_steps={every})"
    if not every:
        why = "no checkpoints are made (checkpoint.every_steps=0)"
    if is_others:
        again = "Another folder (run.dir)" if is_refused else command
        return f"Nothing is saved: {why}. {again} begins at {named} again."
    steps = steps_left_behind(config)
    if steps < config.sft.steps:
        every = config.sft.checkpoint_every_steps
        why = f"the cold start is not over (sft.checkpoint_every_steps={every})"
    saved = f"Only the cold start is saved, up to step {steps} of {config.sft.steps}"
    return (
        f"{saved if steps else 'Nothing is saved'}: {why}. {command} starts the run again"
        f"{left_behind_text(config, steps)}."
    )


def is_evaluation(config: Config) -> bool:
    """Whether the run is one of `megatron-rl eval`: it trains nothing and resumes no checkpoint."""
    return config.train.steps == 0 and config.checkpoint.resume == "never"
