"""Folders of sandboxes that cannot have a file system of their own. Used by `sandbox.py`."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from verification.sandbox import isolation

_FOLDER_PREFIX = "megatron_rl_sandbox_"


def uid_of_server() -> int | None:
    """User that the server becomes; None to stay the one it is."""
    return isolation.NOBODY if isolation.is_root() else None


def make_folder() -> str:
    """A folder for a sandbox that cannot have a file system of its own."""
    root = Path(tempfile.gettempdir())
    for stale in root.glob(f"{_FOLDER_PREFIX}*"):
        pid = stale.name.removeprefix(_FOLDER_PREFIX).partition("_")[0]
        if not os.path.exists(f"/proc/{pid}"):
            remove_folder(str(stale))
    folder = tempfile.mkdtemp(prefix=f"{_FOLDER_PREFIX}{os.getpid()}_", dir=root)
    uid = uid_of_server()
    for path in (folder, f"{folder}/build", f"{folder}/empty"):
        os.makedirs(path, mode=0o700, exist_ok=True)
        if uid is not None:
            os.chown(path, uid, uid)
    return folder


def remove_folder(folder: str) -> None:
    """Remove a folder of a sandbox that has ended, if we may; takes back rights given up in it."""
    for parent, names, _ in os.walk(folder):
        for path in (f"{parent}/{name}" for name in names):
            # A link may lead to a folder of the host.
            if not os.path.islink(path):
                with contextlib.suppress(OSError):
                    os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
