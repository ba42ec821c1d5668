"""Programming languages by the tag of a code fence, and their compilers.

Runs in a grading process. To add a language, add a line to LANGUAGES; its compiler must be in one
of the folders that `isolation.py` shows to the sandbox.
"""

import contextlib
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from verification.verdict import GradingError

HEADER_TIMEOUT_S = 300.0
_HEADER_FLAGS = ("-pipe",)


class Language(NamedTuple):
    """How to build and run programs of a language; paths are relative to the build folder."""

    tags: tuple[str, ...]
    """Tags of a code fence, in lower case."""
    versions: str = ""
    """Pattern of a version after a tag: `c++17`, `python3.11`."""
    source_name: str = ""
    compiler: tuple[str, ...] = ()
    """Command; empty for Python, which the sandbox's own interpreter runs."""
    program: str = ""
    """The compiler's output."""
    header: str = ""
    """Header to precompile; empty for none."""


_GCC = ("g++", "-std=c++20", "-O2", "-pipe", "-o", "solution", "solution.cpp")

LANGUAGES: dict[str, Language] = {
    # One digit a turn: with \d+ the time would double with each digit of a tag.
    "python": Language(("python", "py", "pypy", "cpython"), versions=r"3(?:\.?\d)*|3\.x"),
    "cpp": Language(
        ("cpp", "c++", "cc", "cxx", "g++", "gnu++", "cplusplus"),
        r"98|03|0x|11|14|1y|17|1z|20|2a|23|2b|26",
        "solution.cpp", _GCC, "solution", header="bits/stdc++.h",
    ),
}  # fmt: skip
NO_PROGRAMS = frozenset(
    """text txt plain plaintext none raw bash sh shell zsh fish console terminal cmd bat powershell
    ps1 json jsonc json5 yaml yml toml ini xml html markdown md latex tex math diff patch csv tsv
    output input stdin stdout stderr out in log result example sample pseudo pseudocode algorithm
    mermaid dot http""".split()
)
"""Tags of blocks that are not programs."""
# Text around the name of a language: {.python .numberLines}, python:main.py, lang-py.
_AROUND = re.compile(r"[{.\s]*(?:lang(?:uage)?[-=:])?\"?([^\s{}(),:;=\"\[]*)")


def find_language(tag: str) -> str | None:
    """Name of the language of a fence's tag; None for an unknown tag."""
    word = plain_tag(tag)
    for name, language in LANGUAGES.items():
        for known in language.tags:
            version = word.removeprefix(known).lstrip("-_")
            is_known = word == known or (
                word.startswith(known) and language.versions and version
                and re.fullmatch(language.versions, version)
            )  # fmt: skip
            if is_known:
                return name
    return None


def plain_tag(tag: str) -> str:
    """The language's word in a fence's tag, in lower case."""
    found = _AROUND.match(tag.strip().lower())
    return found[1] if found else ""


def compile_command(language: Language, header_folder: str) -> list[str]:
    """Command line of a language's compiler. Raises GradingError if it is not installed."""
    compiler = find_compiler(language)
    include = ["-I", header_folder] if header_folder else []
    return [compiler, *include, *language.compiler[1:]]


def find_compiler(language: Language) -> str:
    """Path of a language's compiler. Raises GradingError if it is not installed."""
    name = language.compiler[0]
    path = shutil.which(name)
    if path is None:
        raise GradingError(
            f"no {name} to compile {language.source_name} with: install it (Debian: apt-get "
            "install g++), or train without prompts of this language"
        )
    return path


@functools.cache
def header_folder(name: str, cache_folder: str) -> str:
    """Folder with a language's precompiled header, made if missing; "" for no header.

    Several processes may call it at once. Raises GradingError when the compiler fails.
    """
    language, cache = LANGUAGES[name], Path(cache_folder)
    if not language.header:
        return ""
    compiler = find_compiler(language)
    flags = [flag for flag in language.compiler[1:] if flag.startswith(("-std", "-O"))]
    # A precompiled header works with one build of the compiler only.
    version = _run([compiler, "-v"], "ask the version").stderr
    key = hashlib.sha256(repr((version, compiler, flags, language.header)).encode()).hexdigest()
    folder = cache / key[:16]
    if not folder.is_dir():
        _make_private(cache)
        _compile_header(compiler, flags, language.header, folder=folder)
    return str(folder)


def _make_private(folder: Path) -> None:
    """Make a folder that all may read and only we write. Raises GradingError."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise GradingError(
            f"{folder} belongs to user {status.st_uid} with mode {status.st_mode & 0o777:o}: a "
            "folder for precompiled headers must be ours, and nobody else may write to it"
        )


def _compile_header(compiler: str, flags: list[str], header: str, *, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="making_") as unfinished:
        wrapper = Path(unfinished, "made", header)
        wrapper.parent.mkdir(parents=True)
        # If the precompiled form does not fit the program, the wrapper includes the original.
        wrapper.write_text(f"#include_next <{header}>\n")
        command = [compiler, *flags, *_HEADER_FLAGS, "-x", "c++-header", str(wrapper)]
        _run([*command, "-o", f"{wrapper}.gch"], f"precompile {header}")
        for path in Path(unfinished, "made").rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        Path(unfinished, "made").chmod(0o755)
        # Another process may have made the same folder.
        with contextlib.suppress(OSError):
            Path(unfinished, "made").rename(folder)


def _run(command: list[str], what: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=HEADER_TIMEOUT_S, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GradingError(f"cannot {what} with {command[0]}: {error}") from error
    if done.returncode:
        raise GradingError(f"cannot {what}: {command} failed: {done.stderr[-1000:]}")
    return done
