"""Checks exact pins for conflicts by the packages' metadata.

Used by tools/lock_gpu.py, which records the metadata, and by offline tests.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

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
