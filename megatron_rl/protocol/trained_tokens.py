"""Values of trained tokens: RUN/rollouts/trained_NNNNNN.RANK.npz.

Written by the trainer, one file per step and data-parallel rank; read by the viewer. A file has
concatenated arrays for S sequences with T completion tokens in total:

| array        |                                                                                 |
|--------------|---------------------------------------------------------------------------------|
| `rollouts`   | [S, 2] int64: group and index, as in the lines of step_NNNNNN.jsonl             |
| `ends`       | [S] int64: index after the last token of each sequence                          |
| `logprobs`   | [T] float32, nats: under the policy before the batch's first update if the      |
|              | objective recomputes them, else before the update of the minibatch              |
| `entropies`  | [T] float32, nats: of the policy's next-token distribution                      |
| `advantages` | [T] float32: as in the policy loss                                              |
"""

import os
import re
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.rollout_files import FOLDER

_NAME = re.compile(r"trained_(\d{6,})\.\d+\.npz")
_VALUES = ("logprobs", "entropies", "advantages")


class TrainedTokens(NamedTuple):
    """Values of one or more concatenated sequences: [completion tokens] float32 each."""

    logprobs: np.ndarray
    entropies: np.ndarray
    advantages: np.ndarray


def trained_path(run_dir: Path, step: int, rank: int) -> Path:
    """The file of a step and data-parallel rank."""
    return run_dir / FOLDER / f"trained_{step:06d}.{rank}.npz"


def write_trained(path: Path, rollouts: np.ndarray, ends: np.ndarray, found: TrainedTokens) -> None:
    """Write a file of `trained_path`, whole or not at all.

    rollouts: [S, 2], ends: [S]. Raises OSError.
    """
    unfinished = path.with_name(f".{path.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with unfinished.open("wb") as file:
            np.savez(file, rollouts=rollouts, ends=ends, **found._asdict())
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def trained_files(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, path) of all files of `write_trained` in a run."""
    found = ((_NAME.fullmatch(path.name), path) for path in (run_dir / FOLDER).glob("trained_*"))
    return sorted((int(match[1]), path) for match, path in found if match)


def read_trained(run_dir: Path, step: int, group: int, index: int) -> TrainedTokens | None:
    """The values of a rollout in step_NNNNNN.jsonl; None if not recorded.

    Raises InputError for a damaged file.
    """
    for path in sorted((run_dir / FOLDER).glob(f"trained_{step:06d}.*.npz")):
        try:
            found = _find(path, group, index)
        except FileNotFoundError:
            # queue.keep_tokens_of_steps may remove the file meanwhile.
            continue
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise InputError(f"{path} is damaged: {error}; move it away") from error
        if found is not None:
            return found
    return None


def _find(path: Path, group: int, index: int) -> TrainedTokens | None:
    with np.load(path, allow_pickle=False) as arrays:
        rollouts, ends = arrays["rollouts"], arrays["ends"]
        places = np.flatnonzero((rollouts == (group, index)).all(axis=1))
        if not len(places):
            return None
        place = int(places[0])
        begin = int(ends[place - 1]) if place else 0
        return TrainedTokens(*(arrays[n][begin : ends[place]] for n in _VALUES))
