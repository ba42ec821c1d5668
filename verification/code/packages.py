"""Installed packages that a task may allow to its solutions: the table PACKAGES.

Runs wherever prompts are checked and in grading processes. Everything else that is installed stays
hidden from tested code.
"""

import functools
import importlib.util
from pathlib import Path

from verification.verdict import GradingError

PACKAGES: dict[str, tuple[str, ...]] = {
    "numpy": ("numpy",),
    "sympy": ("sympy", "mpmath"),
    "mpmath": ("mpmath",),
}
"""Name in the tests -> modules that come with it."""


@functools.cache
def package_folders(packages: tuple[str, ...]) -> tuple[str, ...]:
    """Folders of the modules of these packages, with the libraries that wheels put beside them.

    GradingError for a package that is not installed.
    """
    found: list[str] = []
    for package in packages:
        for module in PACKAGES[package]:
            folder = _folder(module)
            libraries = folder.with_name(f"{folder.name}.libs")
            found += [str(path) for path in (folder, libraries) if path.is_dir()]
    return tuple(dict.fromkeys(found))


def _folder(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise GradingError(f"a code prompt allows {module}, which is not installed: pip install it")
    return Path(spec.submodule_search_locations[0])
