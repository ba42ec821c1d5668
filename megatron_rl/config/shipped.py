"""Configurations that come with the project, by name: those of the folder examples/.

Used by the launcher, where a command takes `--config`.
"""

import difflib
from pathlib import Path

from megatron_rl.config.errors import ConfigError

FOLDER = Path(__file__).resolve().parents[2] / "examples"


def shipped() -> dict[str, Path]:
    """Name and file of every shipped configuration."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}


def config_path(text: str) -> Path:
    """The file that `--config` names: a path, or the name of a shipped configuration.

    Raises ConfigError for what is neither.
    """
    path = Path(text)
    if path.exists() or path.suffix or len(path.parts) > 1:
        return path
    known = shipped()
    if text in known:
        return known[text]
    nearest = difflib.get_close_matches(text, known, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise ConfigError(
        f"--config {text}: neither a file nor one of the shipped {', '.join(known)}{hint}"
    )
