"""A name or keyword that a pinned library does not have is found without importing the library."""

import re
import shutil
from pathlib import Path

import pytest

from megatron_rl.rehearsal.engine_stand_in import VERSION
from tools.conformance import (
    LIBRARIES,
    OURS,
    ROOT,
    Library,
    check,
    pinned,
    sources_of,
    stand_in_uses,
    uses_in,
)
from tools.library_sources import Sources

LIBRARY = {
    "lib/__init__.py": "from lib.calls import *\nfrom .classes import Derived as Public\n",
    "lib/calls.py": (
        "import json\n"
        "try:\n    import fast\n    HAS_FAST = True\n"
        "except ImportError:\n    HAS_FAST = False\n"
        "def call(a, b=1, *, c=2): ...\n"
        "def anything(a, **others): ...\n"
        "if HAS_FAST:\n    def only_fast(a): ...\n"
    ),
    "lib/classes.py": (
        "from dataclasses import dataclass\nimport torch\n"
        "class Base:\n    def __init__(self, size, bias=False):\n        self.size = size\n"
        "    def method(self, x): ...\n"
        "class Derived(Base):\n    KIND = 'derived'\n"
        "class Foreign(torch.nn.Module):\n    def own(self): ...\n"
        "@dataclass\nclass Settings:\n    depth: int\n    width: int = 3\n"
        "@dataclass\nclass More(Settings):\n    height: int = 4\n"
    ),
    "lib/deep/inner.py": "VALUE = 3\n",
}


@pytest.fixture
def library(tmp_path: Path) -> Sources:
    for name, text in LIBRARY.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Sources(tmp_path, ("lib",))


@pytest.mark.parametrize(
    ("name", "keywords", "fault"),
    [
        ("lib", (), ""),
        ("lib.call", ("b", "c"), ""),
        ("lib.call", ("b", "d"), "takes no d"),
        ("lib.calls.anything", ("d",), ""),
        ("lib.calls.gone", (), "lib.calls has no gone"),
        ("lib.gone", (), "lib has no gone"),
        ("lib.calls.HAS_FAST", (), ""),
        ("lib.calls.only_fast", ("a",), ""),
        ("lib.calls.json.loads", (), ""),
        ("lib.Public", ("size", "bias"), ""),
        ("lib.Public", ("shape",), "takes no shape"),
        ("lib.Public.method", (), ""),
        ("lib.classes.Derived.KIND", (), ""),
        ("lib.classes.Derived.size", (), ""),
        ("lib.classes.Derived.width", (), "Derived has no width"),
        # A base of another library may have anything.
        ("lib.classes.Foreign.forward", (), ""),
        ("lib.classes.Foreign", ("whatever",), ""),
        ("lib.classes.More", ("depth", "width", "height"), ""),
        ("lib.classes.More", ("length",), "takes no length"),
        ("lib.deep.inner.VALUE", (), ""),
        ("lib.deep.outer.VALUE", (), "lib.deep has no outer"),
        ("other.module", (), "no such module"),
    ],
)
def test_what_a_library_has_is_read_from_its_sources(
    library: Sources, name: str, keywords: tuple[str, ...], fault: str
) -> None:
    assert library.fault_of(name, keywords) == fault


def test_uses_are_found_by_every_way_of_importing(tmp_path: Path) -> None:
    ours = tmp_path / "ours.py"
    ours.write_text(
        "import importlib\nfrom functools import partial\n"
        "import lib.calls as calls\nimport lib.deep.inner\nfrom lib import classes, call as use\n"
        "def late():\n    from lib.classes import Settings\n    return Settings(depth=1)\n"
        "made = partial(use, c=3)\nvalue = lib.deep.inner.VALUE\n"
        "base = importlib.import_module('lib.classes')\nbase.Base(size=1).method(x=2)\n"
        "print(calls.HAS_FAST, classes.Derived(bias=True))\n"
    )
    found = {(use.name, use.keywords) for use in uses_in(ours, ["lib"], tmp_path)}
    assert found >= {
        ("lib.calls.HAS_FAST", ()), ("lib.deep.inner.VALUE", ()), ("lib.call", ("c",)),
        ("lib.classes.Settings", ("depth",)), ("lib.classes.Base", ("size",)),
        ("lib.classes.Derived", ("bias",)),
    }  # fmt: skip


def ours() -> list[Path]:
    return [path for folder in OURS for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.timeout(300)
def test_the_installed_libraries_of_the_pins_have_all_that_we_use(tmp_path: Path) -> None:
    """Those that a host without GPU has in the very version; the others need a download."""
    present = [each for each in LIBRARIES if each.distribution in ("megatron-core", "sglang")]
    libraries = [
        (each, pinned(each.distribution), sources_of(each, pinned(each.distribution), tmp_path))
        for each in present
    ]
    assert not list(tmp_path.iterdir())
    found = check(libraries, ours())
    assert found.mismatches == [] and found.uses > 200


def test_the_stand_in_of_a_rehearsal_is_of_the_pinned_version() -> None:
    assert pinned("transformer-engine") == VERSION
    uses = {use.name: use.keywords for use in stand_in_uses()}
    assert "m_splits" in uses["transformer_engine.pytorch.GroupedLinear.forward"]
    assert "tp_group" in uses["transformer_engine.pytorch.Linear"]


def test_an_argument_that_the_engine_does_not_have_is_found(tmp_path: Path) -> None:
    """A package with all names of the stand-in, in one of whose layers an argument is missing."""
    for use in stand_in_uses():
        *module, name = use.name.removesuffix(".forward").split(".")
        path = tmp_path.joinpath(*module) / "__init__.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"def {name}(**others): ...\n")
    path = tmp_path / "transformer_engine" / "pytorch" / "__init__.py"
    path.write_text(path.read_text() + "class RMSNorm:\n    def __init__(self, hidden_size): ...\n"
                    "    def forward(self, inputs): ...\n")  # fmt: skip
    library = Library("transformer-engine", ("transformer_engine",))
    found = check([(library, VERSION, tmp_path)], [])
    assert [line for line in found.mismatches if "takes no" in line] == [
        line for line in found.mismatches if "pytorch.RMSNorm:" in line
    ]
    [line] = [line for line in found.mismatches if "takes no" in line]
    assert "takes no eps" in line


@pytest.mark.timeout(300)
def test_a_renamed_function_and_a_dropped_argument_are_found_wherever_they_are_used(
    tmp_path: Path,
) -> None:
    library = next(each for each in LIBRARIES if each.distribution == "megatron-core")
    version = pinned(library.distribution)
    source = sources_of(library, version, tmp_path) / "megatron"
    copy = tmp_path / "copy"
    shutil.copytree(
        source, copy / "megatron", ignore=shutil.ignore_patterns("*.pyc", "*.so", "*.cpp")
    )
    changed = copy / "megatron" / "core" / "parallel_state.py"
    text, renamed = re.subn(
        r"^def get_data_parallel_rank\(", "def get_data_rank(", changed.read_text(), flags=re.M
    )
    text, dropped = re.subn(r"^    create_gloo_process_groups: .*\n", "", text, flags=re.M)
    assert (renamed, dropped) == (1, 1)
    changed.write_text(text)
    wanted = re.compile(r"\bparallel_state\.get_data_parallel_rank\(|create_gloo_process_groups=F")
    users = {path for path in ours() if wanted.search(path.read_text())}
    found = check([(Library("megatron-core", ("megatron",)), version, copy)], ours())
    assert len(users) >= 3
    for line in found.mismatches:
        assert line.endswith(
            (
                "megatron.core.parallel_state has no get_data_parallel_rank",
                "takes no create_gloo_process_groups",
            )
        ), line
    assert {ROOT / line.partition(":")[0] for line in found.mismatches} == users
