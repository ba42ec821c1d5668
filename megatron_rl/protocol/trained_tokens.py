"""What the trainer found of each token it trained on: RUN/rollouts/trained_NNNNNN.RANK.npz.

Written by the trainer, one file a step and data-parallel rank; read by the viewer. Arrays of a file
for S sequences of T completion tokens in all, end to end:

| array        |                                                                                 |
|--------------|---------------------------------------------------------------------------------|
| `rollouts`   | [S, 2] int64: group and index, as in the lines of step_NNNNNN.jsonl             |
| `ends`       | [S] int64: one after the last token of each                                     |
| `logprobs`   | [T] float32: of the policy before the batch's first update where the objective  |
|              | recomputes them, else before the update of its minibatch; in nats               |
| `entropies`  | [T] float32: of the policy's next-token distribution there; in nats             |
| `advantages` | [T] float32: as the policy loss was given them                                    |
"""

import contextlib
import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.rollout_files import FOLDER

_NAME = re.compile(r"trained_(\d{6,})\.\d+\.npz")
_VALUES = ("logprobs", "entropies", "advantages")


class TrainedTokens(NamedTuple):
    """Of one sequence, or of several end to end: [completion tokens] float32 each."""

    logprobs: np.ndarray
    entropies: np.ndarray
    advantages: np.ndarray


def write_trained(
    run_dir: Path,
    step: int,
    rank: int,
    rollouts: np.ndarray,
    ends: np.ndarray,
    found: TrainedTokens,
) -> None:
    """Write the file of a step and data-parallel rank, whole or not at all.

    rollouts: [S, 2], ends: [S]. Raises InputError where it cannot be written.
    """
    path = run_dir / FOLDER / f"trained_{step:06d}.{rank}.npz"
    unfinished = path.with_name(f".{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            np.savez(file, rollouts=rollouts, ends=ends, **found._asdict())
        os.replace(unfinished, path)
    except OSError as error:
        raise InputError(
            f"{path}: {error}; make room, or set expert.train.record_tokens=false"
        ) from error


def trained_files(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, path) of all such files of a run."""
    found = ((_NAME.fullmatch(path.name), path) for path in (run_dir / FOLDER).glob("trained_*"))
    return sorted((int(match[1]), path) for match, path in found if match)


def read_trained(run_dir: Path, step: int, group: int, index: int) -> TrainedTokens | None:
    """Of the rollout that step_NNNNNN.jsonl of this step holds; None where nothing is recorded."""
    for path in sorted((run_dir / FOLDER).glob(f"trained_{step:06d}.*.npz")):
        # queue.keep_tokens_of_steps may remove it meanwhile.
        with contextlib.suppress(FileNotFoundError), np.load(path, allow_pickle=False) as arrays:
            rollouts, ends = arrays["rollouts"], arrays["ends"]
            places = np.flatnonzero((rollouts == (group, index)).all(axis=1))
            if len(places):
                place = int(places[0])
                begin = int(ends[place - 1]) if place else 0
                return TrainedTokens(*(arrays[n][begin : ends[place]] for n in _VALUES))
    return None
