"""Pages in a real browser, headless; tests that use it are skipped where there is none."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium")
_TIMEOUT_S = 120


def open_page(path: Path, profile: Path) -> tuple[str, list[str]]:
    """The document after its scripts have run, and what they and the browser complained of."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless", "--disable-gpu", "--enable-logging=stderr",
        f"--user-data-dir={profile}", "--virtual-time-budget=20000", "--dump-dom",
        *(["--no-sandbox"] if os.getuid() == 0 else []), path.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S)
    said = done.stderr.decode(errors="replace")
    assert done.returncode == 0, said
    return done.stdout.decode(errors="replace"), re.findall(r'CONSOLE.*?\] "(.*)', said)
