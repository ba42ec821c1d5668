"""Finds training steps whose recorded rollouts are missing from a run's folder.

Used by the audit, and by commands that would otherwise pass over the gap: report, view,
analyse lengths, simulate --calibrate.
"""

import logging
from collections.abc import Iterable
from pathlib import Path

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.metrics import Row, stream_rows
from megatron_rl.protocol.rollout_files import FOLDER, LINES

log = logging.getLogger(__name__)
TRAINED = "queue/rollouts_trained"


def step_file(run_dir: Path, step: int) -> Path:
    """The file of the rollouts of a step, which counts from 1 as in metrics.jsonl."""
    return run_dir / FOLDER / f"step_{step - 1:06d}{LINES}"


def missing_steps(rows: Iterable[Row], run_dir: Path) -> list[int]:
    """Steps with trained rollouts and no file of them; rows: of these steps."""
    steps = [row["step"] for row in rows if row.get(TRAINED)]
    return [step for step in steps if not step_file(run_dir, step).is_file()]


def packed_text(run_dir: Path) -> str:
    """What to do about packed files, which no command reads; "" without any."""
    packed = sorted((run_dir / FOLDER).glob(f"*{LINES}.*"))
    if not packed:
        return ""
    return f"packed files are not read ({len(packed)}, the first is {packed[0].name}): unpack them"


def warn_of_missing(run_dir: Path) -> None:
    """Log one warning about a run with steps whose rollouts are missing."""
    texts = [packed_text(run_dir)]
    try:
        rows = [
            {"step": row["step"], TRAINED: row[TRAINED]}
            for row in stream_rows(run_dir / "metrics.jsonl", holding=f'"{TRAINED}"')
            if TRAINED in row
        ]
    except InputError as error:
        log.warning("cannot tell which steps lack rollouts: %s", error)
        return
    if missing := missing_steps(rows, run_dir):
        first = f"step {missing[0]} ({step_file(run_dir, missing[0]).name})"
        lost = f"{len(missing)} of {len(rows)} steps have no file of rollouts, the first is {first}"
        texts.insert(0, f"{lost}; these steps are left out")
    if any(texts):
        log.warning("%s: %s", run_dir, "; ".join(filter(None, texts)))
