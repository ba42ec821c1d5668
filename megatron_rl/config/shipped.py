"""Configurations of the folder examples/, by name, for `--config` of commands.

setup.py copies the folder into the package when it builds a wheel; a clone has it next to the
package.
"""

from pathlib import Path

from megatron_rl.config.errors import ConfigError
from megatron_rl.config.lookup import nearest

_PACKAGE = Path(__file__).resolve().parents[1]
_INSTALLED = _PACKAGE / "examples"
FOLDER = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "examples"


def shipped() -> dict[str, Path]:
    """Name -> file of every shipped configuration; recipes are named `recipes/NAME`."""
    files = [*sorted(FOLDER.glob("*.toml")), *sorted(FOLDER.glob("recipes/*.toml"))]
    return {file.relative_to(FOLDER).with_suffix("").as_posix(): file for file in files}


def names_shipped(text: str) -> bool:
    """Whether a text names a shipped configuration.

    A file of that name goes before it, but not a folder, such as that of a run: `./NAME` is one.
    """
    return text in shipped() and not _is_there(Path(text))


def _is_there(path: Path) -> bool:
    return path.exists() and not path.is_dir()


def config_path(text: str) -> Path:
    """The file of a path or of a shipped configuration's name. Raises ConfigError for neither."""
    path, known = Path(text), shipped()
    if names_shipped(text):
        return known[text]
    if _is_there(path) or path.suffix or len(path.parts) > 1:
        return path
    raise ConfigError(
        f"--config {text}: neither a file nor one of the shipped {', '.join(known)}"
        f"{nearest(text, known)}"
    )
