"""Which engines and verifiers live, and which were restarted: rows of the metrics, and lines.

Used by the launcher's views and `megatron-rl status`. The queue writes who is there
(`rollout_queue/peer_rows.py`), each launcher what it restarts.
"""

from contextlib import closing
from pathlib import Path
from typing import Any

from megatron_rl.launcher.restarts import Restart
from megatron_rl.observe.deaths import how_it_ended
from megatron_rl.protocol.metrics import GENERATOR_RESTARTS, JsonlWriter
from megatron_rl.rollout_queue.peer_rows import GENERATORS, MISSING, VERIFIERS, WANTED

Row = dict[str, Any]
_RESTARTS_OF = {
    "generator": GENERATOR_RESTARTS,
    "follower": "launch/follower_restarts",
    "verifier": "launch/verifier_restarts",
    "scorer": "launch/scorer_restarts",
}
"""By kind of role."""


class Roster:
    """Follows the rows of a run."""

    def __init__(self) -> None:
        self._counts = ""
        self.missing: dict[str, float] = {}
        """Name of each process that fell silent or ended -> unix seconds when the queue said so."""

    def note(self, row: Row) -> list[str]:
        """Take in a row; what is newly missing."""
        if GENERATORS not in row:
            return []
        known = self.missing
        self.missing = {name: known.get(name, row["time"]) for name in row[MISSING].split()}
        self._counts = (
            f"engines {row[GENERATORS]} of {row[GENERATORS + WANTED]}, "
            f"verifiers {row[VERIFIERS]} of {row[VERIFIERS + WANTED]}"
        )
        return [name for name in self.missing if name not in known]

    def text(self) -> str:
        """How many live of how many, and who is missing; "" before the queue has heard anybody."""
        missing = f" (missing: {', '.join(self.missing)})" if self.missing else ""
        return self._counts + missing

    def missing_line(self, name: str) -> str:
        """One plain line about a process that is newly missing."""
        return (
            f"warning: the queue hears {name} no more, its work goes to others; "
            f"{self._counts}: see logs/{name}*"
        )


def write_restart(run_dir: Path, step: int, restart: Restart) -> None:
    """Note a restart in the metrics."""
    values = {
        _RESTARTS_OF[restart.kind]: 1,
        "role": restart.role,
        "exit_code": restart.exit_code,
        "restart": restart.count,
        "max_restarts": restart.limit,
    }
    with closing(JsonlWriter(run_dir / "metrics.jsonl", "launch")) as metrics:
        metrics.write(step, values)


def is_restart(row: Row) -> bool:
    """Whether a row is about a restart."""
    return not row.keys().isdisjoint(_RESTARTS_OF.values())


def restart_line(row: Row) -> str:
    """One plain line about a process that was started again."""
    when = f"after step {row['step']}" if row["step"] >= 0 else "before the first step"
    return (
        f"warning: {row['role']} ended with {how_it_ended(row['exit_code'])} {when}; "
        f"restart {row['restart']} of {row['max_restarts']}"
    )
