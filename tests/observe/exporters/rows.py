"""Rows as the roles of a run write them."""

import json
from pathlib import Path
from typing import Any


def row(source: str, step: int, at: float = 1000.0, **values: Any) -> dict[str, Any]:
    """A row; of the names of values `__` stands for a slash."""
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return {"time": at + step, "source": source, "step": step, **named}


def write(path: Path, rows: list[dict[str, Any]], end: str = "") -> None:
    """Append rows, and the beginning of one more."""
    with path.open("a") as file:
        file.write("".join(json.dumps(one) + "\n" for one in rows) + end)
