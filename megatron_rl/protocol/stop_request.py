"""The request to stop a run after a checkpoint: a file in the run folder, which all nodes see.

A launcher writes it at the first signal; a person may, too (`touch RUN/stop`). The rollout queue
then builds no further batch, and answers a request for one with Stop. The trainer saves a
checkpoint and writes the answer, by which the launchers tell this end from that of training.
"""

from pathlib import Path

REQUEST = "stop"
ANSWER = "stopped"


def request_stop(run_dir: Path) -> None:
    """Ask the run to stop. Raises OSError."""
    (run_dir / REQUEST).touch()


def is_stop_requested(run_dir: Path) -> bool:
    return (run_dir / REQUEST).exists()


def answer_stop(run_dir: Path, step: int) -> None:
    """Note that training stopped after `step`, and that a checkpoint holds it. Raises OSError."""
    (run_dir / ANSWER).write_text(f"{step}\n")


def has_stopped(run_dir: Path) -> bool:
    """Whether training stopped as asked."""
    return (run_dir / ANSWER).exists()


def clear_stop(run_dir: Path) -> None:
    """Remove the request and the answer of an earlier start. Raises OSError."""
    for name in (REQUEST, ANSWER):
        (run_dir / name).unlink(missing_ok=True)
