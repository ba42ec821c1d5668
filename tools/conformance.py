"""Whether the pinned libraries of a GPU host have what our code uses of them.

    python -m tools.conformance [--sources FOLDER]

Nothing of them is imported: no GPU is needed, and branches that only a GPU takes are checked too.
It reads our files, finds every name that comes from one of LIBRARIES with the keywords of its
calls, and looks both up in the sources of the versions in requirements/gpu.txt. A library that is
installed here in that version is read where it is; another one is downloaded into FOLDER
(.cache/conformance). Environment variables that we set for a library must occur in its text. So
must the names and arguments of the stand-in for TransformerEngine that `megatron-rl rehearse` uses.

Prints each mismatch with its place, and one JSON line. Exit code: 0 without mismatches, else 1.
"""

import argparse
import ast
import importlib.metadata
import inspect
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.rehearsal import engine_stand_in
from tools.library_sources import Sources
from tools.lock_gpu import LOCK, read_pins

ROOT = Path(__file__).parents[1]
OURS = ("megatron_rl", "generation", "verification", "tools")
_DOWNLOAD_S = 600.0


@dataclass(frozen=True)
class Library:
    """A distribution, and what of ours belongs to it."""

    distribution: str
    packages: tuple[str, ...]
    """Modules of these packages are looked up in it."""
    variables: str = ""
    """Beginning of its environment variables."""


LIBRARIES = (
    Library("megatron-core", ("megatron",)),
    Library("sglang", ("sglang",), "SGLANG_"),
    Library("transformer-engine", ("transformer_engine",), "NVTE_"),
    Library("torch-memory-saver", ("torch_memory_saver",)),
    Library("flashinfer-python", ("flashinfer",), "FLASHINFER_"),
)


@dataclass(frozen=True)
class Use:
    """A name of a library in one of our files."""

    place: str
    """FILE:LINE."""
    name: str
    """Its whole path, such as megatron.core.parallel_state.get_data_parallel_rank."""
    keywords: tuple[str, ...] = ()
    """Of a call of it."""


def uses_in(path: Path, packages: Sequence[str], root: Path = ROOT) -> Iterator[Use]:
    """Every use of these packages in a file."""
    tree = ast.parse(path.read_text())
    names = dict(_imports(tree, packages))
    place = path.relative_to(root)

    def full(node: ast.expr) -> str:
        """The path of an expression that begins with an imported name; "" for others."""
        match node:
            case ast.Name(name):
                return names.get(name, "")
            case ast.Attribute(value, name) if begin := full(value):
                return f"{begin}.{name}"
        return ""

    for name in names.values():
        yield Use(f"{place}:1", name)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute() if name := full(node):
                yield Use(f"{place}:{node.lineno}", name)
            case ast.Call(function, arguments, keywords):
                if ast.unparse(function) in ("partial", "functools.partial") and arguments:
                    function = arguments[0]
                if name := full(function):
                    given = tuple(each.arg for each in keywords if each.arg is not None)
                    yield Use(f"{place}:{node.lineno}", name, given)


def _imports(tree: ast.Module, packages: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(local name, whole path) of everything that a file imports from these packages."""

    def is_theirs(module: str | None) -> bool:
        return module is not None and module.partition(".")[0] in packages

    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module, found, 0) if is_theirs(module):
                for each in found:
                    yield each.asname or each.name, f"{module}.{each.name}"
            case ast.Import(found):
                for each in found:
                    if is_theirs(each.name):
                        first = each.name.partition(".")[0]
                        yield each.asname or first, each.name if each.asname else first
            case ast.Assign(
                [ast.Name(local)],
                ast.Call(ast.Attribute(_, "import_module"), [ast.Constant(str(module))]),
            ) if is_theirs(module):
                yield local, module


def stand_in_uses() -> Iterator[Use]:
    """What a rehearsal's stand-in for TransformerEngine has, which the package must have too."""
    place = str(Path(engine_stand_in.__file__).relative_to(ROOT))
    for table in (engine_stand_in.NAMED_ALONE, engine_stand_in.STAND_INS):
        for module, names in table.items():
            for name in names:
                yield Use(place, f"transformer_engine.{module}.{name}".replace("..", "."))
    for module, names in engine_stand_in.STAND_INS.items():
        for name, value in names.items():
            whole = f"transformer_engine.{module}.{name}"
            yield Use(place, whole, _keywords(value))
            if isinstance(value, type) and hasattr(value, "forward"):
                yield Use(place, f"{whole}.forward", _keywords(value.forward))


def _keywords(function: Callable[..., object]) -> tuple[str, ...]:
    named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    found = inspect.signature(function).parameters.values()
    return tuple(each.name for each in found if each.kind in named and each.name != "self")


def variables_in(paths: Iterable[Path], beginning: str) -> dict[str, str]:
    """Environment variables with this beginning in our files, each with its place."""
    pattern = re.compile(rf"[\"']({beginning}[A-Z0-9_]+)[\"']")
    found = {}
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for name in pattern.findall(line):
                found.setdefault(name, f"{path.relative_to(ROOT)}:{number}")
    return found


@dataclass
class Findings:
    uses: int = 0
    mismatches: list[str] = field(default_factory=list)


def check(libraries: Sequence[tuple[Library, str, Path]], paths: Sequence[Path]) -> Findings:
    """Compare our files with libraries. libraries: each with its version and its sources."""
    found = Findings()
    packages = [package for library, _, _ in libraries for package in library.packages]
    uses = {use for path in paths for use in uses_in(path, packages)} | set(stand_in_uses())
    for library, version, folder in libraries:
        sources = Sources(folder, library.packages)
        theirs = (use for use in uses if use.name.partition(".")[0] in library.packages)
        for use in sorted(theirs, key=lambda use: (use.place, use.name)):
            found.uses += 1
            if fault := sources.fault_of(use.name, use.keywords):
                found.mismatches.append(
                    f"{use.place}: {library.distribution} {version}: {use.name}: {fault}"
                )
        if library.variables:
            for name, place in variables_in(paths, library.variables).items():
                found.uses += 1
                if not sources.mentions(name):
                    found.mismatches.append(
                        f"{place}: {library.distribution} {version}: no file mentions {name}"
                    )
    return found


# --- where the sources are ----------------------------------------------------------------------


def pinned(distribution: str) -> str:
    """The version in requirements/gpu.txt. Raises SystemExit where there is none."""
    if version := read_pins(LOCK).get(distribution):
        return version
    raise SystemExit(f"{LOCK} does not pin {distribution}")


def sources_of(library: Library, version: str, cache: Path) -> Path:
    """Folder with the library's packages; downloaded where this version is not installed."""
    try:
        installed = importlib.metadata.distribution(library.distribution)
    except importlib.metadata.PackageNotFoundError:
        installed = None
    if installed is not None and installed.version == version:
        return Path(str(installed.locate_file("")))
    folder = cache / f"{library.distribution}-{version}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        _download(f"{library.distribution}=={version}", folder)
    return folder


def _download(requirement: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        # Nothing that would have to be built: a source archive runs its own code.
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
             "--only-binary=:all:", "--dest", place, requirement],
            check=True, timeout=_DOWNLOAD_S,
        )  # fmt: skip
        [archive] = Path(place).iterdir()
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(Path(place) / "sources")
        (Path(place) / "sources").rename(folder)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tools.conformance")
    parser.add_argument("--sources", type=Path, default=ROOT / ".cache" / "conformance")
    options = parser.parse_args(argv)
    paths = [path for folder in OURS for path in sorted((ROOT / folder).rglob("*.py"))]
    libraries = []
    for library in LIBRARIES:
        version = pinned(library.distribution)
        libraries.append((library, version, sources_of(library, version, options.sources)))
    found = check(libraries, paths)
    for line in found.mismatches:
        print(line)
    versions = {library.distribution: version for library, version, _ in libraries}
    print(json.dumps({"uses": found.uses, "mismatches": len(found.mismatches), "pins": versions}))
    return 1 if found.mismatches else 0


if __name__ == "__main__":
    raise SystemExit(main())
