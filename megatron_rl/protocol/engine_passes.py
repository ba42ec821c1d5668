"""What an engine's passes cost it: the files RUN/logs/ENGINE-INDEX.passes.jsonl.

Written by an engine's process every few seconds, where the engine can tell; read by the calibration
of the simulator. A pass is one run of the model: it decodes a token of each completion that runs,
or prefills those that join, which gives each its first token.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from megatron_rl.protocol.line_errors import decode_lines

PASSES_VARIABLE = "MEGATRON_RL_PASSES"
"""Variable of an engine's environment: path of its file; none: nothing is written."""

PassKind = Literal["decode", "prefill", "wake"]


class PassRow(msgspec.Struct, frozen=True):
    """Sums over passes of one kind and about one size."""

    kind: PassKind
    """wake: a prefill after a rest, when the processor's caches hold what others left there."""
    passes: int
    seconds: float
    """Of processor time of the process's main thread: waiting for a core is no part of it."""
    completions: int
    """In these passes."""
    tokens: int
    """In their cache, or prefilled."""
    ended: int
    """Completions that ended in them."""


class PassReport(msgspec.Struct, frozen=True):
    """One line: the passes since the line before."""

    time: float
    """Unix seconds."""
    rows: list[PassRow]


def passes_path(engine_log: Path) -> Path:
    """The file of an engine with this log."""
    return engine_log.with_suffix(".passes.jsonl")


def read_passes(path: Path) -> Iterator[PassReport]:
    """The lines of a file but a last one that was cut short; none without it. Raises InputError."""
    return decode_lines(path, msgspec.json.Decoder(PassReport), expected="a report of passes")
