"""Pins the packages of a GPU installation: `python -m tools.lock_gpu`. Needs a package index.

Run it by hand, in .venv, after a change of a pin above the line "# What those need" in
requirements/gpu.txt. It rewrites the pins below that line, with the releases of
requirements/cpu.txt where they fit, and requirements/gpu.json, the metadata for the offline check
in tests/tools/test_pins.py.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).resolve().parent.parent / "requirements"
LOCK, RECORD = FOLDER / "gpu.txt", FOLDER / "gpu.json"
BELOW = "# What those need, by `python -m tools.lock_gpu`"
PLATFORM = "x86_64-manylinux_2_39"
TIMEOUT_S = 900
BUILT_HERE = "transformer-engine-torch"
BUILT_NEEDS = (
    "torch>=2.1", "einops", "onnxscript", "onnx", "packaging", "pydantic", "nvdlfw-inspect",
    "transformer_engine_cu13=={version}",
)  # fmt: skip
"""Requirements in the setup.py of BUILT_HERE 2.12.0 with CUDA 13, which needs torch and nvcc to
run. Update when its pin changes."""

PYTHONS = ("3.11", "3.12")
"""Python versions of the GPU lock."""
_LINUX = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "sys_platform": "linux",
}


class Recorded(msgspec.Struct, frozen=True):
    """Metadata of one release of a package."""

    version: str
    requires_python: str
    requires: list[str]
    """`Requires-Dist`."""


Record = Mapping[str, Recorded]
"""Canonical name -> metadata."""


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    head = LOCK.read_text().partition(BELOW)[0]
    direct = list(_pin_lines(head))
    dev = [f"{name}=={version}" for name, version in read_pins(FOLDER / "dev.txt").items()]
    built = built_here(direct)
    with tempfile.TemporaryDirectory() as folder:
        closure = resolve([*direct, *built.requires], dev, Path(folder))
        record = {BUILT_HERE: built} | read_metadata([*closure, *dev], Path(folder))
    own = dict(parse_pin(line) for line in [*direct, *dev])
    rest = [line for line in closure if parse_pin(line)[0] not in own]
    pins = own | dict(map(parse_pin, rest))
    for python in PYTHONS:
        if conflicts := find_conflicts(own, pins, record, python):
            sys.exit("\n".join([f"Python {python}:", *conflicts]))
    LOCK.write_text("\n".join([head.rstrip(), "", BELOW, *rest, ""]))
    shown = {name: msgspec.to_builtins(record[name]) for name in sorted(record)}
    RECORD.write_text(json.dumps(shown, indent=1) + "\n")
    print(f"{LOCK}: {len(direct)} pins and {len(rest)} that they need")


def built_here(direct: list[str]) -> Recorded:
    """Metadata of BUILT_HERE, which is compiled on each host."""
    version = dict(map(parse_pin, direct))[BUILT_HERE]
    return Recorded(version, ">=3.10", [need.format(version=version) for need in BUILT_NEEDS])


def resolve(wanted: list[str], dev: list[str], folder: Path) -> list[str]:
    """Pins of `wanted` and all its dependencies, compatible with the pins of `dev`."""
    given, found = folder / "wanted.txt", folder / "found.txt"
    given.write_text("\n".join(line for line in wanted if parse_pin(line)[0] != BUILT_HERE))
    (folder / "dev.txt").write_text("\n".join(dev))
    # uv keeps fitting pins of its output file: so both installations are alike.
    cpu = (FOLDER / "cpu.txt").read_text().splitlines()
    found.write_text("\n".join(line for line in cpu if "==" in line and "+" not in line))
    command = [str(Path(sys.prefix) / "bin" / "uv"), "pip", "compile", "--quiet", str(given)]
    command += ["--no-header", "--no-annotate", "--python-platform", PLATFORM]
    command += ["--constraints", str(folder / "dev.txt"), "--python-version", PYTHONS[-1]]
    subprocess.run([*command, "--output-file", str(found)], check=True, timeout=TIMEOUT_S)
    return [line for line in found.read_text().splitlines() if "==" in line]


def read_metadata(pins: list[str], folder: Path) -> dict[str, Recorded]:
    """Metadata of each pinned package."""
    (folder / "pins.txt").write_text("\n".join(pins))
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps"]
    command += ["--ignore-installed", "--report", str(folder / "report.json")]
    command += ["-r", str(folder / "pins.txt")]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    found = json.loads((folder / "report.json").read_text())["install"]
    packages = {parse_pin(item["metadata"]["name"])[0]: item["metadata"] for item in found}
    extras = used_extras({name: data.get("requires_dist", []) for name, data in packages.items()})
    return {
        name: Recorded(
            data["version"],
            data.get("requires_python", ""),
            [
                text for text in data.get("requires_dist", [])
                if _may_apply(text, {"", *extras.get(name, ())})
            ],
        )
        for name, data in packages.items()
    }  # fmt: skip


def used_extras(requires: dict[str, list[str]]) -> dict[str, set[str]]:
    """Extras of each package that any requirement names."""
    found: dict[str, set[str]] = {}
    for texts in requires.values():
        for requirement in map(Requirement, texts):
            found.setdefault(parse_pin(requirement.name)[0], set()).update(requirement.extras)
    return found


def _may_apply(text: str, extras: set[str]) -> bool:
    return any(list(applicable([text], extra, python)) for extra in extras for python in PYTHONS)


def read_pins(path: Path) -> dict[str, str]:
    """Canonical name -> version of a file with one exact pin per line."""
    return dict(parse_pin(line) for line in _pin_lines(path.read_text()))


def parse_pin(line: str) -> tuple[str, str]:
    """("tomli-w", "1.2.0") of "tomli_w==1.2.0"."""
    name, _, version = line.partition("==")
    return canonicalize_name(name.strip()), version.strip()


def _pin_lines(text: str) -> Iterator[str]:
    return (line for line in text.splitlines() if line.strip() and not line.startswith("#"))


def find_conflicts(
    wanted: Iterable[str], pins: Mapping[str, str], record: Record, python: str
) -> list[str]:
    """A sentence per conflict of the pins; [] when they can be installed.

    wanted: names of the direct pins; they must need all others. python: such as "3.12", on Linux
    and x86-64.
    """
    found: list[str] = []
    needed: set[str] = set()
    waiting = [(canonicalize_name(name), "") for name in wanted]
    seen = set(waiting)
    while waiting:
        name, extra = waiting.pop()
        needed.add(name)
        if (what := record.get(name)) is None or what.version != pins.get(name):
            known = "none" if what is None else what.version
            found.append(f"{name}=={pins.get(name)}: metadata is recorded of {known}")
            continue
        if not SpecifierSet(what.requires_python).contains(f"{python}.0"):
            found.append(f"{name}=={what.version} needs Python {what.requires_python}")
        for requirement in applicable(what.requires, extra, python):
            found += _unmet(f"{name}=={what.version}", requirement, pins)
            target = canonicalize_name(requirement.name)
            more = {(target, other) for other in ("", *requirement.extras)} - seen
            if target in pins:
                seen |= more
                waiting += sorted(more)
    found += [f"nobody needs {name}=={pins[name]}" for name in sorted(set(pins) - needed)]
    return sorted(set(found))


def applicable(requires: Iterable[str], extra: str, python: str) -> Iterator[Requirement]:
    """The requirements for this Python and this extra; "": without extra."""
    environment = _LINUX | {"python_version": python, "python_full_version": f"{python}.0"}
    for text in requires:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or marker.evaluate(environment | {"extra": extra}):
            yield requirement


def _unmet(who: str, requirement: Requirement, pins: Mapping[str, str]) -> list[str]:
    name = canonicalize_name(requirement.name)
    wants = f"{name}{requirement.specifier}"
    if name not in pins:
        return [f"{who} needs {wants}, which is not pinned"]
    if requirement.specifier.contains(pins[name], prereleases=True):
        return []
    return [f"{who} needs {wants}, but {name}=={pins[name]} is pinned"]


if __name__ == "__main__":
    main()
