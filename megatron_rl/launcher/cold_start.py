"""The cold start of a run: whether it is due, what an earlier attempt left, its model.

Used by `run.py` and `phases.py`.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

from megatron_rl.config.tree import Config
from megatron_rl.observe.choice import CHOSEN, SET, Candidate, candidates_of, choose
from megatron_rl.protocol.checkpoint_folder import SFT_CHECKPOINTS, complete_checkpoints
from megatron_rl.protocol.exports import COLD_START, candidate_name, candidate_step
from megatron_rl.protocol.metrics import JsonlWriter, iter_jsonl
from megatron_rl.weights.folders.staging import recover, staged

Row = dict


def cold_start_folder(config: Config) -> Path:
    """The model with which the cold start ends."""
    return config.run.dir / "hf" / COLD_START


def is_due(config: Config, *, is_resumed: bool) -> bool:
    """Whether the cold start comes before reinforcement learning, or the evaluation of it."""
    return bool(config.sft.steps) and not is_resumed and not cold_start_folder(config).exists()


def first_model(config: Config, *, is_resumed: bool) -> Path:
    """Folder of the model that reinforcement learning begins with, after the cold start."""
    folder = cold_start_folder(config)
    if not config.sft.steps:
        return config.model.path
    # A checkpoint of another folder comes without its cold start: only the shape is needed.
    return config.model.path if is_resumed and not folder.exists() else folder


def is_trained(config: Config) -> bool:
    """Whether all models to choose from are there, so that no further step is needed."""
    steps = config.sft.candidates
    return bool(steps) and (config.run.dir / "hf" / candidate_name(steps[-1])).exists()


def steps_left_behind(config: Config) -> int:
    """Steps of the cold start that an earlier attempt in the run folder took for good; 0: none.

    All of them where it exported its models, else those of its newest complete checkpoint.
    """
    if not config.sft.steps:
        return 0
    for name in (COLD_START, *map(candidate_name, config.sft.candidates)):
        recover(config.run.dir / "hf" / name)
    if cold_start_folder(config).exists() or is_trained(config):
        return config.sft.steps
    return max(complete_checkpoints(config.run.dir / SFT_CHECKPOINTS), default=0)


def left_behind_text(config: Config, steps: int) -> str:
    """Says which part of an earlier attempt is not repeated."""
    if steps == config.sft.steps:
        return "but for its cold start, which is there"
    return f"but for its cold start, which resumes after step {steps} of {config.sft.steps}"


def is_of_cold_start(name: str) -> bool:
    """Whether a file or folder of that name, but for its suffix, belongs to the cold start alone.

    Exported models, and what was recorded when they were evaluated.
    """
    base = name.removeprefix("dropped_").removeprefix("eval_").partition(".")[0]
    is_partial = name.endswith(".partial")
    return not is_partial and (base == COLD_START or candidate_step(base) is not None)


def rows_of_cold_start(rows: Iterable[Row], steps: int) -> str:
    """The rows of `metrics.jsonl` that a cold start keeps when it resumes after `steps` steps."""
    kept = []
    for row in rows:
        is_step = row["source"] == "sft" and row["step"] <= steps
        is_evaluation = is_of_cold_start(str(row.get("label", "")))
        if is_step or is_evaluation or CHOSEN in row:
            kept.append(json.dumps(row) + "\n")
    return "".join(kept)


def is_evaluated(config: Config, step: int) -> bool:
    """Whether a model to choose from was evaluated on all sets."""
    sets, rows = {config.sft.choose_by, *(one.name for one in config.eval.sets)}, _measured(config)
    return all(step in candidates_of(rows, name) for name in sets)


def choose_model(config: Config) -> Candidate:
    """The most accurate model of the cold start. Raises InputError where one was not measured."""
    return choose(_measured(config), config.sft.candidates, config.sft.choose_by)


def _measured(config: Config) -> list[Row]:
    """Rows of the evaluations that have ended."""
    return list(iter_jsonl(config.run.dir / "metrics.jsonl", holding='"eval/accuracy"'))


def begin_with(
    config: Config, chosen: Candidate, *, after_file: Callable[[], None] = lambda: None
) -> None:
    """Note the choice, and make its model that of the cold start: by hard links where possible.

    after_file is called after each file: without links, copies of them may take minutes in all.
    """

    def bring(source: str, target: str) -> str:
        _link_or_copy(source, target)
        after_file()
        return target

    with closing(JsonlWriter(config.run.dir / "metrics.jsonl", "launch")) as metrics:
        metrics.write(0, {CHOSEN: chosen.step, SET: config.sft.choose_by})
    source = config.run.dir / "hf" / candidate_name(chosen.step)
    with staged(cold_start_folder(config)) as staging:
        shutil.copytree(source, staging, dirs_exist_ok=True, copy_function=bring)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        # Some shared file systems know no hard links.
        shutil.copyfile(source, target)
