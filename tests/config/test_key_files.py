"""From a key to what it does: how many product files read it, by mypy's types of expressions."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from mypy import build, nodes
from mypy.find_sources import create_source_list
from mypy.options import Options
from mypy.types import Instance, Type, UnionType, get_proper_type

from megatron_rl.config.section import Section
from megatron_rl.config.tree import Config

ROOT = Path(__file__).resolve().parents[2]
OURS = ("megatron_rl", "generation", "verification")
# These foretell, show or prepare a run; they read what its processes read.
AROUND = (
    "config",
    "plan",
    "rehearsal",
    "simulation",
    "cli",
    "observe",
    "curation",
    "sweep",
    "analysis",
)
# Commands of other rooms, which look at a run, or start a part of one that runs.
COMMANDS = {
    "megatron_rl.launcher.replay", "megatron_rl.trainer.replay", "megatron_rl.launcher.joining",
}  # fmt: skip
MOST_FILES = 4
NEARLY_ALL = 0.9
# Attributes by which a node names what is defined elsewhere.
_AWAY = {"node", "info", "type", "names", "mro", "definition", "def_var", "original_def", "related"}


def _sections(types: Type) -> Iterator[str]:
    proper = get_proper_type(types)
    if isinstance(proper, Instance):
        yield from (base.fullname for base in proper.type.mro)
    elif isinstance(proper, UnionType):
        for item in proper.items:
            yield from _sections(item)


def _expressions(tree: nodes.MypyFile) -> Iterator[nodes.MemberExpr]:
    """Every `a.b` of a file."""
    seen, open_nodes = set(), [tree]
    while open_nodes:
        node: Any = open_nodes.pop()
        if isinstance(node, (list, tuple)):
            open_nodes.extend(node)
        elif isinstance(node, nodes.Node) and id(node) not in seen:
            seen.add(id(node))
            if isinstance(node, nodes.TypeInfo) or (
                isinstance(node, nodes.MypyFile) and node is not tree
            ):
                continue
            if isinstance(node, nodes.MemberExpr):
                yield node
            names = (name for name in dir(type(node)) if not name.startswith("_"))
            open_nodes.extend(
                value
                for name in names
                if name not in _AWAY
                and isinstance(value := getattr(node, name, None), (list, tuple, nodes.Node))
            )


@pytest.fixture(scope="module")
def readers() -> dict[tuple[str, str], set[str]]:
    """Files that read an attribute of a section, by the section's class and the attribute."""
    options = Options()
    options.export_types = options.preserve_asts = options.check_untyped_defs = True
    options.incremental, options.ignore_missing_imports = False, True
    # Types of other packages are not needed to know a section of the configuration.
    options.follow_imports = "skip"
    sources = create_source_list([str(ROOT / name) for name in OURS], options)
    result = build.build(sources, options)
    found = defaultdict(set)
    for name, tree in result.files.items():
        if name.split(".")[0] in OURS:
            for expression in _expressions(tree):
                if (known := result.types.get(expression.expr)) is not None:
                    for section in _sections(known):
                        found[section, expression.name].add(name)
    return found


def _sections_in(kind: Any) -> Iterator[type[Section]]:
    """Sections of a key's type: itself, or what its lists, tables and unions hold."""
    if isinstance(kind, type) and issubclass(kind, Section):
        yield kind
    for part in get_args(kind):
        yield from _sections_in(part)


def _keys(section: type[Section]) -> Iterable[tuple[type[Section], str]]:
    """Every key of the tree that is no section, with the class that declares it."""
    for name, field in section.model_fields.items():
        inner = list(_sections_in(field.annotation))
        for kind in inner:
            yield from _keys(kind)
        if not inner:
            yield next(base for base in section.mro() if name in base.__annotations__), name


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_nearly_all_keys_are_followed_through_four_files(
    readers: dict[tuple[str, str], set[str]],
) -> None:
    keys = set(_keys(Config))
    assert len(keys) > 200
    far = {}
    for owner, name in keys:
        read = readers.get((f"{owner.__module__}.{owner.__qualname__}", name), set())
        used = {file for file in read - COMMANDS if file.split(".")[1] not in AROUND}
        if 1 + len(used) > MOST_FILES:
            far[f"{owner.__qualname__}.{name}"] = sorted(used)
    # Whatever the types are read from, these two must be found in the files that need them.
    assert (
        "megatron_rl.trainer.optimizer"
        in readers["megatron_rl.config.trainer.OptimizerConfig", "lr"]
    )
    assert len(far["RunConfig.dir"]) > MOST_FILES
    assert 1 - len(far) / len(keys) >= NEARLY_ALL, far
