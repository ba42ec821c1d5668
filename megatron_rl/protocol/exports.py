"""Folder names of exported models in RUN/hf. Imported by trainer ranks and the launcher."""

from pathlib import Path

EXPORTS = "hf"
COLD_START, SFT_BASELINE, FINAL = "cold_start", "sft_baseline", "final"
_CANDIDATE = "cold_start_step_"


def candidate_name(step: int) -> str:
    """Name of the model after `step` steps of the cold start, and label of its evaluation."""
    return f"{_CANDIDATE}{step}"


def candidate_step(name: str) -> int | None:
    """Step of a candidate; None for other names."""
    step = name.removeprefix(_CANDIDATE)
    return int(step) if step != name and step.isdecimal() else None


def step_name(step: int) -> str:
    """Name of the model after `step` batches of RL (checkpoint.export_every_steps)."""
    return f"step_{step:06d}"


def step_exports(folder: Path) -> dict[int, Path]:
    """Step -> folder of the models named by `step_name` in RUN/hf."""
    found = {path.name.removeprefix("step_"): path for path in folder.glob("step_*")}
    return {int(step): path for step, path in found.items() if step.isdecimal()}
