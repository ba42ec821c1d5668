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
from pathlib import Path

import msgspec
from packaging.requirements import Requirement

from tools.pins import PYTHONS, Recorded, applicable, find_conflicts, parse_pin, read_pins

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


def main() -> None:
    """Command line."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    head = LOCK.read_text().partition(BELOW)[0]
    direct = [line for line in head.splitlines() if line and not line.startswith("#")]
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


if __name__ == "__main__":
    main()
