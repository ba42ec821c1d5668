"""Records the hashes of all pinned packages: `python -m tools.lock_hashes`. Needs a package index.

Run it by hand, in .venv, after a change of a pin in requirements/. It rewrites
requirements/hashes.txt: a line for each pin, with the SHA-256 of each file of the release that
Linux on x86-64 may install. `tools/install.sh` adds the hashes to the pins that it installs.
"""

import argparse
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.utils import canonicalize_name

from tools.lock_gpu import FOLDER, PLATFORM, parse_pin

HASHES = FOLDER / "hashes.txt"
PYTHONS = {"gpu.txt": ("3.11.9", "3.12.9"), "vllm.txt": ("3.11.9",)}
"""Versions of Python for which a file of pins is installed, if fewer than EVERY."""
EVERY = ("3.11.9", "3.12.9", "3.13.9")
COMPILED = "# compiled"
"""At the end of the line of a package without wheels: tools/fetch_wheels.sh compiles it, so that a
folder of wheels holds a file with another hash."""
TIMEOUT_S = 600
Pin = tuple[str, str]
"""As by `parse_pin`."""


def read_lines(path: Path) -> list[str]:
    """The pins of a file, as they are written. A local build, such as torch's +cpu, is none.

    Its file comes from an index of its own, or from a folder of the user.
    """
    lines = path.read_text().splitlines()
    return [line for line in lines if "==" in line and "+" not in line and line[0] != "#"]


def pin_files() -> list[Path]:
    """The files with pins."""
    return [path for path in sorted(FOLDER.glob("*.txt")) if path != HASHES]


def find_files(pins: list[str], python: str) -> dict[Pin, tuple[list[str], bool]]:
    """By pin: hashes of the files for a version of Python, and if one is a wheel."""
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder) / "given.txt", Path(folder) / "pylock.toml"
        given.write_text("\n".join(pins))
        command = [str(Path(sys.prefix) / "bin" / "uv"), "pip", "compile", "--quiet", "--no-deps"]
        command += ["--format", "pylock.toml", "--python-platform", PLATFORM]
        command += ["--python-version", python, "--output-file", str(found), str(given)]
        subprocess.run(command, check=True, timeout=TIMEOUT_S)
        packages = tomllib.loads(found.read_text())["packages"]
    files = {}
    for one in packages:
        wheels, source = one.get("wheels", []), one.get("sdist")
        digests = [file["hashes"]["sha256"] for file in [*wheels, source] if file]
        files[canonicalize_name(one["name"]), one["version"]] = digests, bool(wheels)
    return files


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    hashes: dict[str, set[str]] = {}
    with_wheel: set[str] = set()
    for path in pin_files():
        pins = read_lines(path)
        for python in PYTHONS.get(path.name, EVERY):
            files = find_files(pins, python)
            for pin in pins:
                found, has_wheel = files[parse_pin(pin)]
                hashes.setdefault(pin, set()).update(found)
                with_wheel |= {pin} if has_wheel else set()
    lines = ["# By `python -m tools.lock_hashes`; tools/install.sh adds them to the pins."]
    for pin in sorted(hashes, key=str.lower):
        words = [pin, *(f"--hash=sha256:{digest}" for digest in sorted(hashes[pin]))]
        lines.append(" ".join(words if pin in with_wheel else [*words, COMPILED]))
    HASHES.write_text("\n".join([*lines, ""]))
    print(f"{HASHES}: {len(hashes)} pins, {sum(map(len, hashes.values()))} files")


if __name__ == "__main__":
    main()
