"""Configurations of the folder examples/, by name, for `--config` of commands.

setup.py copies the folder into the package when it builds a wheel; a clone has it next to the
package.
"""

import difflib
from pathlib import Path

from megatron_rl.config.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]
_INSTALLED = _PACKAGE / "examples"
FOLDER = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "examples"


def shipped() -> dict[str, Path]:
    """Name -> file of every shipped configuration."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}


def config_path(text: str) -> Path:
    """The file of a path or of a shipped configuration's name. Raises ConfigError for neither."""
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
