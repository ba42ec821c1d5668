"""The cold start of a run: whether it is due, what an earlier attempt left, which model it gives.

Used by `run.py` and `phases.py`, in the launcher.
"""

import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.observe.choice import CHOSEN, SET, Candidate, candidates_of, choose
from megatron_rl.protocol.checkpoint_folder import (
    SFT_CHECKPOINTS,
    complete_checkpoints,
    named_in,
)
from megatron_rl.protocol.exports import COLD_START, candidate_name, candidate_step
from megatron_rl.protocol.metrics import JsonlWriter, Row, iter_jsonl
from megatron_rl.weights.folders.staging import recover, staged


def cold_start_folder(config: Config) -> Path:
    """Folder of the model that the cold start exports last."""
    return config.run.dir / "hf" / COLD_START


def is_due(config: Config, *, is_resumed: bool) -> bool:
    """Whether the cold start still has to run."""
    return bool(config.sft.steps) and not is_resumed and not cold_start_folder(config).exists()


def first_model(config: Config, *, is_resumed: bool) -> Path:
    """Folder of the model that reinforcement learning begins with, and engines until a weight sync.

    Raises InputError where a run that begins at another run's checkpoint needs that run's cold
    start, which is gone.
    """
    folder, resume = cold_start_folder(config), config.checkpoint.resume
    if not config.sft.steps:
        return config.model.path
    if is_resumed and not folder.exists() and resume not in ("auto", "never"):
        # RUN/checkpoints/step_N
        folder = Path(resume).absolute().parents[1] / "hf" / COLD_START
    if not is_resumed or folder.exists():
        return folder
    uses = {
        'algorithm.reference.policy="start"': config.algorithm.reference.policy == "start",
        "sft.baseline": config.sft.baseline,
    }
    if needing := [key for key, is_used in uses.items() if is_used]:
        named = named_in(config.run.dir)
        is_there = resume == "auto" and named not in ("", "auto", "never")
        again = f"give checkpoint.resume={shlex.quote(named)} again, or " if is_there else ""
        raise InputError(
            f"checkpoint.resume={resume}: {' and '.join(needing)} needs the model that the run of "
            f"the checkpoint began with, and there is no {folder}: {again}set model.path to that "
            "model and sft.steps=0"
        )
    # Only its shape counts.
    return config.model.path


def is_trained(config: Config) -> bool:
    """Whether the cold start has exported all its candidates."""
    steps = config.sft.candidates
    return bool(steps) and (config.run.dir / "hf" / candidate_name(steps[-1])).exists()


def steps_left_behind(config: Config) -> int:
    """Cold-start steps of an earlier attempt that are not repeated; 0: none.

    All steps if that attempt exported its models, else those of its newest complete checkpoint.
    """
    if not config.sft.steps:
        return 0
    for name in (COLD_START, *map(candidate_name, config.sft.candidates)):
        recover(config.run.dir / "hf" / name)
    if cold_start_folder(config).exists() or is_trained(config):
        return config.sft.steps
    return max(complete_checkpoints(config.run.dir / SFT_CHECKPOINTS), default=0)


def left_behind_text(config: Config, steps: int) -> str:
    """Says which part of an earlier attempt is not repeated; "": none."""
    if not steps:
        return ""
    if steps == config.sft.steps:
        return ", except for its cold start, which is complete"
    return f", except for its cold start, which resumes after step {steps} of {config.sft.steps}"


def reuse_text(config: Config) -> str:
    """Says how another run begins with the trained model; "" without one."""
    model = cold_start_folder(config)
    if not config.sft.steps or not model.exists():
        return ""
    return f". There, model.path={shlex.quote(str(model))} and sft.steps=0 begin with its model"


def is_of_cold_start(name: str) -> bool:
    """Whether a file or folder of that name belongs to the cold start alone.

    These are exported models and the records of their evaluations.
    """
    base = name.removeprefix("dropped_").removeprefix("eval_").partition(".")[0]
    is_partial = name.endswith(".partial")
    return not is_partial and (base == COLD_START or candidate_step(base) is not None)


def rows_of_cold_start(rows: Iterable[Row], steps: int) -> str:
    """Rows of `metrics.jsonl` to keep when the cold start resumes after `steps` steps."""
    kept = []
    for row in rows:
        is_step = row["source"] == "sft" and row["step"] <= steps
        is_evaluation = is_of_cold_start(str(row.get("label", "")))
        if is_step or is_evaluation or CHOSEN in row:
            kept.append(json.dumps(row) + "\n")
    return "".join(kept)


def is_evaluated(config: Config, step: int) -> bool:
    """Whether the candidate of this step was evaluated on all sets."""
    sets, rows = {config.sft.choose_by, *(one.name for one in config.eval.sets)}, _measured(config)
    return all(step in candidates_of(rows, name) for name in sets)


def choose_model(config: Config) -> Candidate:
    """The most accurate candidate. Raises InputError if one was not evaluated."""
    return choose(_measured(config), config.sft.candidates, config.sft.choose_by)


def _measured(config: Config) -> list[Row]:
    return list(iter_jsonl(config.run.dir / "metrics.jsonl", holding='"eval/accuracy"'))


def begin_with(
    config: Config, chosen: Candidate, *, after_file: Callable[[], None] = lambda: None
) -> None:
    """Record the choice and link (else copy) the chosen model to the cold start's folder.

    after_file: called after each file, because copies may take minutes.
    """

    def link_or_copy(source: str, target: str) -> str:
        try:
            os.link(source, target)
        except OSError:
            # Some shared file systems have no hard links.
            shutil.copyfile(source, target)
        after_file()
        return target

    with closing(JsonlWriter(config.run.dir / "metrics.jsonl", "launch")) as metrics:
        metrics.write(0, {CHOSEN: chosen.step, SET: config.sft.choose_by})
    source = config.run.dir / "hf" / candidate_name(chosen.step)
    with staged(cold_start_folder(config)) as staging:
        shutil.copytree(source, staging, dirs_exist_ok=True, copy_function=link_or_copy)
