"""Names that unit tests use: modules, globals, and functions unsafe for results of a solution.

Runs where prompts are checked and in grading processes. Pure functions of a syntax tree.
"""

import ast
import builtins
import importlib
import symtable
import sys
import warnings
from collections.abc import Iterator

from verification.sandbox import stand_ins

BUILTIN_NAMES = frozenset(dir(builtins)) | {"exit", "quit", "__file__", "__path__"}
PYTEST_FIXTURES = frozenset(
    "caplog monkeypatch tmp_path tmpdir request mocker recwarn benchmark".split()
)
SET_UPS = frozenset("setup_module setUpModule setup_function".split())
HOOKS = SET_UPS | frozenset("teardown_module tearDownModule teardown_function".split())
"""Functions that pytest calls by their names, before and after tests."""
# Names of the solution's module in data sets.
_SOLUTION_MODULES = frozenset(
    "solution solutions submission candidate answer your_module my_module main module "
    "implementation my_solution your_solution student_solution".split()
)
# These modules run their arguments, start what the sandbox forbids, or hide how values are made.
_REFUSED_MODULES = frozenset(
    "pickle _pickle cPickle dill marshal shelve importlib imp runpy code codeop builtins ctypes "
    "subprocess multiprocessing pty socket antigravity this".split()
)
_RUN_TEXT = frozenset({"exec", "compile", "__import__", "breakpoint", "__builtins__", "__loader__"})
CAPTURED = frozenset({"sys.stdout", "sys.stderr"})
"""Streams that tests may replace; the solution's output during a call goes there."""
_STRING_EVALUATORS = frozenset({"sympify", "parse_expr", "parse_latex", "read_pickle"})


def imported_modules(tree: ast.AST) -> set[str]:
    """Top-level names of all imported modules."""
    return {name.partition(".")[0] for name, _ in _imports(tree)}


def solution_modules(tree: ast.AST, *, root: str, packages: tuple[str, ...]) -> set[str]:
    """Imported modules that can only be the solution."""
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    uses = {ast.unparse(node) for node in attributes if node.attr == root}
    found = set()
    for name, node in _imports(tree):
        top, last = name.partition(".")[0], name.rpartition(".")[2]
        if top in packages or (top in sys.stdlib_module_names and top != "code"):
            continue
        is_named = not _SOLUTION_MODULES.isdisjoint({top, last})
        is_used = any(f"{alias.asname}.{root}" in uses for alias in node.names if alias.asname)
        if isinstance(node, ast.ImportFrom):
            is_used |= bool(node.level) or root in {alias.name for alias in node.names}
        else:
            is_used |= f"{name}.{root}" in uses
        if is_named or is_used:
            found.add(name)
    return found


def find_problem(
    source: str,
    tree: ast.AST,
    *,
    provided: set[str],
    solution_modules: set[str],
    packages: tuple[str, ...],
) -> str:
    """A missing or unsafe name that tests use; empty for none."""
    return (
        _import_problem(tree, solution_modules, packages)
        or _unsafe_use(tree)
        or _undefined_name(source, tree, provided)
    )


def _imports(tree: ast.AST) -> Iterator[tuple[str, ast.Import | ast.ImportFrom]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "solution", node


def _import_problem(tree: ast.AST, own: set[str], packages: tuple[str, ...]) -> str:
    # A module may be missing where tests handle the error.
    optional = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.Try) and any("Error" in ast.unparse(h) for h in node.handlers)
        for inner in ast.walk(node)
    }
    for name, node in _imports(tree):
        top = name.partition(".")[0]
        if name in own or any(part.startswith(f"{name}.") for part in own):
            continue
        if top in _REFUSED_MODULES:
            return f"they import {name}, which could run what a solution returns"
        if top == "pytest" or top in packages or node in optional:
            continue
        if top not in sys.stdlib_module_names:
            return f"they import {name}, which the sandbox does not have (see packages)"
        names = {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()
        if "mock" in name and "patch" in names and not _patches_output_alone(tree):
            return "they patch what a solution in another process uses"
        if "*" in names and not _star_names(name):
            return f"they import all of {name}, whose names are not known"
    return ""


def _star_names(module: str) -> set[str]:
    """Names of `from module import *`, for the standard library only."""
    if module.partition(".")[0] not in sys.stdlib_module_names:
        return set()
    try:
        found = importlib.import_module(module)
    except ImportError:
        return set()
    return set(getattr(found, "__all__", None) or [n for n in vars(found) if n[0] != "_"])


def _unsafe_use(tree: ast.AST) -> str:
    constant_calls = {
        node.func
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)
    }
    for node in ast.walk(tree):
        is_open = node not in constant_calls
        if isinstance(node, ast.Name) and node.id in _RUN_TEXT and is_open:
            return f"line {node.lineno} uses {node.id}, which could run what a solution returns"
        if not isinstance(node, ast.Attribute):
            continue
        owner, name = ast.unparse(node.value), node.attr
        if name in _STRING_EVALUATORS and is_open:
            return f"line {node.lineno} uses {name}, which evaluates text"
        if owner == "sys" and name == "stdin" and isinstance(node.ctx, ast.Store):
            return f"line {node.lineno} replaces sys.stdin, which a solution has its own of"
        if name == "patch" and "mock" in owner and not _patches_output_alone(tree):
            return "they patch what a solution in another process uses"
        if owner == "pytest" and name not in stand_ins.NAMES:
            return f"line {node.lineno} uses pytest.{name}, which the sandbox does not have"
        if owner == "pytest.mark" and name not in stand_ins.MARKS:
            return f"line {node.lineno} uses pytest.mark.{name}, which is not supported"
        if name == "expectedFailure":
            return "they expect a failure, which any wrong solution has"
    return _unsupported_pytest(tree)


def _unsupported_pytest(tree: ast.AST) -> str:
    """A use of pytest that the sandbox would pass over; empty for none."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and "pytestmark" in map(name_of, node.targets):
            marks = {name_of(inner) for inner in ast.walk(node.value)}
            if not marks.isdisjoint(stand_ins.OBEYED_MARKS):
                return f"line {node.lineno} sets pytestmark, which the sandbox does not read"
        if not isinstance(node, ast.Call):
            continue
        given = {one.arg: one.value for one in node.keywords}
        if name_of(node.func) == "fixture" and "name" in given:
            return f"line {node.lineno} gives a fixture another name, which is not supported"
        indirect = given.get("indirect")
        is_off = isinstance(indirect, ast.Constant) and indirect.value is False
        if name_of(node.func) == "parametrize" and indirect is not None and not is_off:
            return f"line {node.lineno} uses parametrize with indirect, which is not supported"
    return ""


def _patches_output_alone(tree: ast.AST) -> bool:
    """Whether every use of `patch` replaces standard output or error by its name."""
    uses = [node for node in ast.walk(tree) if name_of(node) == "patch"]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.func in uses]
    targets = [call.args[0] if call.args else None for call in calls]
    return len(calls) == len(uses) and all(
        isinstance(target, ast.Constant) and target.value in CAPTURED for target in targets
    )


def captures_output(source: str) -> bool:
    """Whether tests may read printed output."""
    return any(word in source for word in ("stdout", "stderr", "capsys", "capfd"))


def name_of(node: ast.AST) -> str:
    """Last part of a dotted name."""
    return getattr(node, "id", "") or getattr(node, "attr", "")


def with_parents(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST | None]]:
    """All nodes of a tree, each with its parent."""
    stack: list[tuple[ast.AST, ast.AST | None]] = [(node, None)]
    while stack:
        child, parent = stack.pop()
        yield child, parent
        stack += [(inner, child) for inner in ast.iter_child_nodes(child)]


def _undefined_name(source: str, tree: ast.AST, provided: set[str]) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        top = symtable.symtable(source, "unit_tests.py", "exec")
    known = {*BUILTIN_NAMES, *provided, "__annotations__"}
    for name, node in _imports(tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            known |= _star_names(name)
    tables = [top]
    for table in tables:
        tables += table.get_children()
    symbols = [(table, symbol) for table in tables for symbol in table.get_symbols()]
    for table, symbol in symbols:
        is_bound = symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
        if is_bound and (table is top or symbol.is_declared_global()):
            known.add(symbol.get_name())
    for table, symbol in symbols:
        is_global = symbol.is_global() or (table is top and not symbol.is_local())
        if symbol.is_referenced() and is_global and symbol.get_name() not in known:
            return f"they use the name {symbol.get_name()!r}, which nobody defines"
    return ""
