"""Minibatches in a checkpoint of supervised training; a resumed run must have the same.

Runs in trainer ranks.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.protocol.checkpoint_folder import SFT_STATE
from megatron_rl.protocol.types import TrainSequence


class SftState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of sft.json: by these and the step, all later minibatches are known."""

    sequences: int
    """SFT examples."""
    digest: str
    """BLAKE2b, 16 bytes, hexadecimal: of their tokens, in their order."""
    batch_size: int
    steps: int
    seed: int


def describe(cfg: Config, sequences: Sequence[TrainSequence]) -> SftState:
    """The state of a cold start on these sequences."""
    digest = hashlib.blake2b(digest_size=16)
    for sequence in sequences:
        ends = np.array([sequence.prompt_length, len(sequence.token_ids)], np.int64)
        digest.update(ends.tobytes() + sequence.token_ids.tobytes())
    return SftState(
        len(sequences), digest.hexdigest(), cfg.sft.batch_size, cfg.sft.steps, cfg.run.seed
    )


def check_same(mine: SftState, folder: Path) -> None:
    """Raise InputError where the checkpoint in `folder` was made with other minibatches."""
    path = folder / SFT_STATE
    try:
        saved = msgspec.json.decode(path.read_bytes(), type=SftState)
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    for name in SftState.__struct_fields__:
        there, here = getattr(saved, name), getattr(mine, name)
        if there != here:
            raise InputError(
                f"the cold start that {folder} holds had other minibatches: its {name} was "
                f"{there}, now it is {here}. Give the SFT examples (sft.dataset), the system "
                "prompt and the seed that it began with, or name another folder with --run-dir DIR"
            )
