"""Names of the models that a run exports: folders in RUN/hf.

Imported by trainer ranks, which write them, and by the launcher.
"""

COLD_START, CONTROL, FINAL = "cold_start", "control", "final"
_CANDIDATE = "cold_start_step_"


def candidate_name(step: int) -> str:
    """The model after so many steps of the cold start, one of those to choose from.

    Also the label of its evaluation.
    """
    return f"{_CANDIDATE}{step}"


def candidate_step(name: str) -> int | None:
    """Step of the candidate of that name; None for other names."""
    step = name.removeprefix(_CANDIDATE)
    return int(step) if step != name and step.isdecimal() else None
