"""Every pin has the hashes of its files, and the list of what is installed is that of the pins."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.lock_hashes import COMPILED, FOLDER, HASHES, pin_files, read_lines

LINE = re.compile(r"--hash=sha256:[0-9a-f]{64}( --hash=sha256:[0-9a-f]{64})*( # compiled)?")
WITHOUT_WHEELS = {"cellpylib", "pycosat", "transformer-engine-torch", "zss"}


def test_every_pin_has_hashes_and_no_other_line_has() -> None:
    lines = [line for line in HASHES.read_text().splitlines() if line[0] != "#"]
    hashes = {line.split()[0]: line.partition(" ")[2] for line in lines}
    assert {pin for path in pin_files() for pin in read_lines(path)} == hashes.keys()
    assert all(LINE.fullmatch(line) for line in hashes.values())
    compiled = {pin.partition("==")[0] for pin, line in hashes.items() if line.endswith(COMPILED)}
    assert compiled == WITHOUT_WHEELS


def test_a_line_without_a_hash_is_torchs_build_for_the_cpu() -> None:
    left_out = {
        line
        for path in pin_files()
        for line in path.read_text().splitlines()
        if "==" in line and not line.startswith("#") and line not in read_lines(path)
    }
    assert len(left_out) == 1 and re.fullmatch(r"torch==[\d.]+[+]cpu", left_out.pop())


def sbom_command(pins: Path, out: Path) -> list[str]:
    """As docs/install.md gives it."""
    page = (FOLDER.parent / "docs" / "install.md").read_text()
    [line] = re.findall(r"^\.venv/bin/(uv tool run .* cyclonedx-py requirements .*)$", page, re.M)
    words = line.split()
    return [str(Path(sys.prefix) / "bin" / words[0]), *words[1:-3], str(pins), "-o", str(out)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["cpu.txt", "gpu.txt"])
def test_the_bill_of_materials_lists_the_pins(name: str, tmp_path: Path) -> None:
    out = tmp_path / "sbom.json"
    done = subprocess.run(
        sbom_command(FOLDER / name, out), capture_output=True, text=True, timeout=300
    )
    if done.returncode and "cyclonedx-bom" in done.stderr:
        pytest.skip("needs a package index")
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["bomFormat"] == "CycloneDX"
    listed = {f"{one['name']}=={one['version']}" for one in found["components"]}
    pins = (FOLDER / name).read_text().splitlines()
    assert listed == {pin for pin in pins if "==" in pin and not pin.startswith("#")}
