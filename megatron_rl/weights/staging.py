"""Folders that appear whole or not at all. Used by trainer ranks and by conversions."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SUFFIX = ".partial"


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """An empty folder beside `folder` that takes its name when the block ends, or else vanishes.

    What a killed process left there before is removed. Raises FileExistsError if `folder` exists.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists already")
    staging = folder.with_name(folder.name + _SUFFIX)
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    try:
        yield staging
        os.replace(staging, folder)
    except BaseException:
        shutil.rmtree(staging)
        raise
