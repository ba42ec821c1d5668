"""Names and signatures in the sources of a library, read without importing it.

Used by `tools.conformance`. What cannot be known by reading (a value that a call made, a base class
of another library) is taken to have every attribute and every argument: a fault is certain.
"""

import ast
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

_OPAQUE = None
_VARIABLE = re.compile(r"\b[A-Z][A-Z0-9]*_[A-Z0-9_]+\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef | ast.stmt


class Sources:
    """The modules of a library."""

    def __init__(self, folder: Path, packages: Sequence[str] = ()) -> None:
        """folder: holds the packages, and maybe others. packages: `mentions` reads these."""
        self._folder, self._packages = folder, packages

    def fault_of(self, name: str, keywords: tuple[str, ...] = ()) -> str:
        """Why the library has no such name, or takes no such keywords; "": it does."""
        module, rest = self._module_of(name.split("."))
        if not module:
            return "no such module"
        if not rest:
            return ""
        try:
            found = self._resolve(module, rest, frozenset())
        except LookupError as error:
            return str(error)
        return self._fault_of_call(found, keywords) if found is not None and keywords else ""

    def mentions(self, variable: str) -> bool:
        """Whether a file names this environment variable."""
        return variable in self._variables

    @functools.cached_property
    def _variables(self) -> set[str]:
        """All words that could name an environment variable."""
        found: set[str] = set()
        for kind, package in itertools.product(("*.py", "*.cpp", "*.h", "*.cu"), self._packages):
            for path in (self._folder / package).rglob(kind):
                found.update(_VARIABLE.findall(path.read_text(errors="replace")))
        return found

    # --- names ----------------------------------------------------------------------------------

    def _module_of(self, parts: list[str]) -> tuple[str, list[str]]:
        """The longest beginning that is a module, and the rest."""
        for count in range(len(parts), 0, -1):
            if self._file(".".join(parts[:count])) is not None:
                return ".".join(parts[:count]), parts[count:]
        return "", parts

    @functools.cache  # noqa: B019 - as long as the object, which is one run
    def _file(self, module: str) -> Path | None:
        base = self._folder.joinpath(*module.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path
        # A namespace package.
        return base if base.is_dir() and any(base.rglob("*.py")) else None

    @functools.cache  # noqa: B019
    def _tree(self, module: str) -> ast.Module:
        """Of a module; empty for a namespace package, or for none."""
        path = self._file(module)
        is_file = path is not None and path.is_file()
        return ast.parse(path.read_text(errors="replace") if path and is_file else "")

    @functools.cache  # noqa: B019
    def _bindings(self, module: str) -> dict[str, Definition]:
        """Top-level names of a module, with what binds each last; "*": star imports."""
        return dict(_bound(self._tree(module).body))

    def _resolve(
        self, module: str, names: list[str], seen: frozenset[tuple[str, str]]
    ) -> tuple[str, Definition] | None:
        """(module, definition) of a path in a module; None: it cannot be known.

        Raises LookupError when it is not there.
        """
        first, *rest = names
        if (module, first) in seen:
            raise LookupError(f"{first} in {module} imports itself")
        seen |= {(module, first)}
        bindings = self._bindings(module)
        if first not in bindings:
            if self._file(f"{module}.{first}") is not None:
                return self._resolve(f"{module}.{first}", rest, seen) if rest else None
            return self._from_stars(module, names, seen)
        node = bindings[first]
        if isinstance(node, ast.Import | ast.ImportFrom):
            return self._imported(module, node, first, rest, seen)
        return self._inside(module, node, rest, seen)

    def _from_stars(
        self, module: str, names: list[str], seen: frozenset[tuple[str, str]]
    ) -> tuple[str, Definition] | None:
        if "__getattr__" in self._bindings(module):
            return _OPAQUE
        for node in ast.walk(self._tree(module)):
            if isinstance(node, ast.ImportFrom) and any(each.name == "*" for each in node.names):
                other = self._absolute(module, node)
                if self._file(other) is None:
                    return _OPAQUE
                try:
                    return self._resolve(other, names, seen)
                except LookupError:
                    continue
        raise LookupError(f"{module} has no {names[0]}")

    def _imported(
        self, module: str, node: ast.Import | ast.ImportFrom, local: str, rest: list[str],
        seen: frozenset[tuple[str, str]],
    ) -> tuple[str, Definition] | None:  # fmt: skip
        names = {each.asname or each.name.partition(".")[0]: each for each in node.names}
        if isinstance(node, ast.ImportFrom):
            target = [*self._absolute(module, node).split("."), names[local].name, *rest]
        else:
            # `import a.b` binds a, `import a.b as c` binds a.b.
            bound = names[local].name if names[local].asname else local
            target = [*bound.split("."), *rest]
        found, left = self._module_of(target)
        # Another library.
        if not found or self._file(target[0]) is None:
            return _OPAQUE
        return self._resolve(found, left, seen) if left else _OPAQUE

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        path = self._file(module)
        parts = module.split(".")
        is_package = path is not None and (path.is_dir() or path.name == "__init__.py")
        base = parts[: len(parts) - node.level + is_package]
        return ".".join([*base, *([node.module] if node.module else [])])

    def _inside(
        self, module: str, node: Definition, rest: list[str], seen: frozenset[tuple[str, str]]
    ) -> tuple[str, Definition] | None:
        if not rest:
            return module, node
        if not isinstance(node, ast.ClassDef):
            # Attributes of functions and values are not known.
            return _OPAQUE
        for owner, each in self._with_bases(module, node, seen):
            if each is None:
                return _OPAQUE
            members = dict(_members(each))
            if rest[0] in members:
                found = members[rest[0]]
                return (owner, found) if len(rest) == 1 else _OPAQUE
        raise LookupError(f"{node.name} has no {rest[0]}")

    def _with_bases(
        self, module: str, node: ast.ClassDef, seen: frozenset[tuple[str, str]]
    ) -> Iterator[tuple[str, ast.ClassDef | None]]:
        """The class and its bases, nearest first; None for one that is not of this library."""
        yield module, node
        for base in node.bases:
            names = ast.unparse(base).partition("[")[0].split(".")
            if names[-1] in ("object", "Generic", "Protocol", "ABC", "NamedTuple", "Enum"):
                continue
            try:
                found = self._resolve(module, names, seen)
            except LookupError:
                found = _OPAQUE
            if found is None or not isinstance(found[1], ast.ClassDef):
                yield module, None
            else:
                yield from self._with_bases(found[0], found[1], seen)

    # --- calls ----------------------------------------------------------------------------------

    def _fault_of_call(self, found: tuple[str, Definition], keywords: tuple[str, ...]) -> str:
        module, node = found
        taken = self._arguments(module, node)
        if taken is None:
            return ""
        missing = [name for name in keywords if name not in taken]
        return f"takes no {', '.join(missing)}" if missing else ""

    def _arguments(self, module: str, node: Definition) -> set[str] | None:
        """Names of the arguments; None: any."""
        if isinstance(node, Function):
            return _own_arguments(node)
        if not isinstance(node, ast.ClassDef):
            return None
        fields: set[str] = set()
        for _, each in self._with_bases(module, node, frozenset()):
            if each is None:
                return None
            members = dict(_members(each))
            for name in ("__init__", "__new__"):
                if isinstance(made := members.get(name), Function) and not fields:
                    return _own_arguments(made)
            fields |= {
                entry.target.id
                for entry in each.body
                if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
            }
        return fields


def _own_arguments(node: Function) -> set[str] | None:
    if node.args.kwarg is not None:
        return None
    return {each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}


def _bound(body: list[ast.stmt]) -> Iterator[tuple[str, Definition]]:
    """Names that statements bind, also in branches. The last binding of a name counts."""
    for node in body:
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                yield name, node
            case ast.Import(names) | ast.ImportFrom(_, names):
                for each in names:
                    yield each.asname or each.name.partition(".")[0], node
            case ast.Assign(targets):
                for target in targets:
                    for each in ast.walk(target):
                        if isinstance(each, ast.Name):
                            yield each.id, node
            case ast.AnnAssign(ast.Name(name)):
                yield name, node
            case ast.If(_, inner, other):
                yield from _bound([*other, *inner])
            case ast.Try(inner, handlers, other, last):
                fallbacks = [each for handler in handlers for each in handler.body]
                yield from _bound([*fallbacks, *inner, *other, *last])
            case ast.With(_, inner) | ast.For(_, _, inner):
                yield from _bound(inner)


def _members(node: ast.ClassDef) -> Iterator[tuple[str, Definition]]:
    """Names of a class, with those that its methods set on `self`."""
    for inner in ast.walk(node):
        if (
            isinstance(inner, ast.Attribute)
            and isinstance(inner.ctx, ast.Store)
            and isinstance(inner.value, ast.Name)
            and inner.value.id in ("self", "cls")
        ):
            yield inner.attr, node
    yield from _bound(node.body)
