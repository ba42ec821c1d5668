"""Classes of unit tests that a solution must know: list nodes, points, exceptions.

Runs where prompts are checked and in grading processes. Only data classes are shared: a class with
other methods may be the reference solution.
"""

import ast
import builtins

_METHODS = frozenset(
    "__init__ __post_init__ __repr__ __str__ __eq__ __hash__ __lt__ __iter__".split()
)
_IMPORTABLE = frozenset("dataclasses enum typing collections functools abc __future__".split())


def make_prelude(body: list[ast.stmt]) -> str:
    """Source of the shared classes and their imports; empty for none."""
    imports, names = _imports(body)
    classes: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.ClassDef) and _carries_data(node):
            if _free_names(node) <= names | {node.name}:
                names.add(node.name)
                classes.append(node)
    if not classes:
        return ""
    return "\n".join(ast.unparse(node) for node in [*imports, *classes]) + "\n"


def _imports(body: list[ast.stmt]) -> tuple[list[ast.stmt], set[str]]:
    """The tests' harmless imports, and the names known after them."""
    found: list[ast.stmt] = []
    names = set(dir(builtins))
    for node in body:
        if isinstance(node, ast.ImportFrom):
            modules = {node.module or ""}
        elif isinstance(node, ast.Import):
            modules = {alias.name for alias in node.names}
        else:
            continue
        if modules <= _IMPORTABLE and not any(alias.name == "*" for alias in node.names):
            found.append(node)
            names |= {alias.asname or alias.name for alias in node.names}
    return found, names


def _carries_data(node: ast.ClassDef) -> bool:
    for part in node.body:
        is_data = isinstance(part, ast.AnnAssign | ast.Assign | ast.Pass)
        is_data |= isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)
        if not is_data and not (isinstance(part, ast.FunctionDef) and part.name in _METHODS):
            return False
    text = ast.unparse(node)
    return "TestCase" not in text and not any(isinstance(n, ast.Assert) for n in ast.walk(node))


def _free_names(node: ast.ClassDef) -> set[str]:
    loaded = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    bound = {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
    stored = (n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return loaded - bound - {n.id for n in stored}
