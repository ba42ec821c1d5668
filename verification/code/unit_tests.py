"""Reads unit tests without running them and plans what to call.

Runs where prompts are checked and in grading processes. Refuses tests that can never call the
solution or that need something missing in the sandbox, before a run starts.
"""

import ast
import builtins
import functools
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import chain

import msgspec

from verification.code import used_names

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)
_DATA_METHODS = frozenset(
    "__init__ __post_init__ __repr__ __str__ __eq__ __hash__ __lt__ __iter__".split()
)
_IMPORTABLE = frozenset("dataclasses enum typing collections functools abc __future__".split())
# These functions inspect a function without calling it.
_INSPECTING = frozenset("callable hasattr isinstance print type id repr str bool".split())


class UnusableTests(ValueError):
    """Tests cannot grade anything; the text says why."""


class Plan(msgspec.Struct, frozen=True):
    """How to run tests."""

    functions: list[str]
    """Functions to call after the module ran; a single free parameter gets the candidate."""
    has_module_tests: bool
    """The module's own statements test something."""
    replaced: list[str]
    """Definitions in the tests that the solution replaces."""
    names: list[str]
    """Further names of the solution that the tests use."""
    solution_modules: list[str]
    imports: list[str]
    reading_lines: list[int]
    """Lines whose comparison reads a call's argument again."""
    callees: list[str]
    """Names of the solution in the tests."""
    captures_output: bool
    """The tests may read what the solution prints."""
    prelude: str
    """Source of the tests' classes that the solution must know."""


@functools.lru_cache(maxsize=512)
def make_plan(
    source: str, entry_point: str, *, names: tuple[str, ...] = (), packages: tuple[str, ...] = ()
) -> Plan:
    """The plan of tests. Raises UnusableTests."""
    root, method = entry_parts(entry_point)
    tree = _parse(source)
    # Tests name the last part: `f` for `Solution().f`.
    name = method or root
    callees = {name, "candidate"} | ({root} if method else set())
    defined = {node.name for node in tree.body if isinstance(node, _DEFINITIONS)}
    replaced = sorted(defined & ({root, name} if method else {root}))
    body = [node for node in tree.body if getattr(node, "name", "") not in replaced]
    prelude = _make_prelude(body)
    rest = ast.Module(body, [])
    _drop_numbers(rest)
    modules = used_names.solution_modules(rest, root=root, packages=packages)
    callees |= _aliases(rest, callees, modules)
    own = {name, "candidate", root, *names}
    problem = used_names.find_problem(
        source, rest, provided=own, solution_modules=modules, packages=packages
    )
    if problem:
        raise UnusableTests(problem)
    reader = _Reader(body, callees | set(names), set(modules))
    functions = reader.functions_to_call()
    missing = reader.missing_fixture()
    if missing:
        raise UnusableTests(f"nothing gives its arguments {missing}")
    if not reader.can_call(functions):
        raise UnusableTests(f"nothing in the tests can ever call {entry_point!r}")
    if not _checks_something(rest, set(functions)):
        raise UnusableTests("nothing in the tests checks a result")
    mentioned = {node.id for node in ast.walk(rest) if isinstance(node, ast.Name)}
    wanted = {root} if method else set()
    return Plan(
        functions=functions,
        has_module_tests=reader.has_module_tests,
        replaced=replaced,
        names=sorted((wanted | set(names)) & mentioned),
        solution_modules=sorted(modules),
        imports=sorted(used_names.imported_modules(rest)),
        reading_lines=sorted(_reading_lines(rest, callees)),
        callees=sorted(callees),
        captures_output=used_names.captures_output(source),
        prelude=prelude,
    )


def _aliases(tree: ast.Module, callees: set[str], modules: set[str]) -> set[str]:
    """Aliases under which tests import the solution."""
    return {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.level or node.module in modules)
        for alias in node.names
        if alias.asname and alias.name in callees
    }


def entry_parts(entry_point: str) -> tuple[str, str]:
    """(name, method) of an entry point. Raises UnusableTests."""
    root, dot, method = entry_point.partition(".")
    root = root.removesuffix("()") if dot else root
    if not root.isidentifier() or (dot and not method.isidentifier()):
        raise UnusableTests(
            f"entry_point = {entry_point!r}, expected a name, Class.method or Class().method"
        )
    return root, method


def _parse(source: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
            compile(source, "unit_tests.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnusableTests(f"they are no Python: {error}") from error
    return tree


def _checks_something(tree: ast.Module, functions: set[str]) -> bool:
    """Whether tests contain a check that a wrong result can fail."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            # `assert True` checks nothing.
            if not isinstance(node.test, ast.Constant) or not node.test.value:
                return True
        if isinstance(node, ast.Raise):
            return True
        if isinstance(node, ast.Call):
            name = used_names.name_of(node.func)
            if name in ("raises", "fail", "exit", "_exit", "quit") or "assert" in name.lower():
                return True
        if isinstance(node, _FUNCTIONS) and node.name in functions:
            if any(isinstance(inner, ast.Return) and inner.value for inner in ast.walk(node)):
                return True
    return False


def _drop_numbers(tree: ast.Module) -> None:
    """Remove numbers from lists, tuples and sets: large tests consist of them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            node.elts = [one for one in node.elts if not _is_number(one)]


def _is_number(node: ast.expr) -> bool:
    inner = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(inner, ast.Constant) and not isinstance(inner.value, str)


class _Reader:
    """Finds which parts of the tests call the solution."""

    def __init__(self, body: list[ast.stmt], callees: set[str], modules: set[str]) -> None:
        self._callees = callees
        self._modules = {module.partition(".")[0] for module in modules}
        self._definitions = {n.name: n for n in body if isinstance(n, _DEFINITIONS)}
        self._statements = [node for node in body if not isinstance(node, _DEFINITIONS)]
        self._names_of = {name: _names(node) for name, node in self._definitions.items()}
        self._parts_with = Counter(chain.from_iterable(self._names_of.values()))
        """Number of parts of the tests that use a name."""
        self._parts_with.update(_names(ast.Module(self._statements, [])))
        self.has_module_tests = any(self._reaches(node, set()) for node in self._statements)

    def functions_to_call(self) -> list[str]:
        """Tests that no other part calls, in order; UnusableTests for an unreachable test."""
        found = []
        for name, node in self._definitions.items():
            if not isinstance(node, _FUNCTIONS) or _is_fixture(node) or self._is_used(name):
                continue
            if name in used_names.HOOKS:
                continue
            is_reaching = self._reaches(node, set())
            is_named = name.startswith("test") and not name.startswith("testing")
            if not is_reaching and not is_named:
                continue
            problem = self._parameter_problem(node)
            if problem and is_reaching:
                raise UnusableTests(f"nobody calls the test {name!r}, and {problem}")
            if not problem:
                found.append(name)
        return found

    def missing_fixture(self) -> str:
        """A pytest fixture that a fixture or method needs and the sandbox lacks; else empty."""
        classes = [n for n in self._definitions.values() if isinstance(n, ast.ClassDef)]
        for owner in [None, *classes]:
            body = owner.body if owner else self._definitions.values()
            functions = [node for node in body if isinstance(node, _FUNCTIONS)]
            fixtures = [node for node in functions if _is_fixture(node)]
            methods = [node for node in functions if owner and node.name.startswith("test")]
            for one in [*fixtures, *methods]:
                known = {node.name for node in fixtures}
                known |= {"request"} if one in fixtures else set()
                wanted = used_names.PYTEST_FIXTURES & set(self._unknown(one)) - known
                if wanted:
                    return min(wanted)
        return ""

    def can_call(self, functions: list[str]) -> bool:
        """Whether the tests can call the solution."""
        classes = [n for n in self._definitions.values() if isinstance(n, ast.ClassDef)]
        roots: list[ast.AST] = [*self._statements, *filter(self._is_test_class, classes)]
        called = [*functions, *(used_names.SET_UPS & self._definitions.keys())]
        roots += [self._definitions[name] for name in called]
        seen: set[str] = set()
        return any(self._reaches(root, seen) for root in roots)

    def _is_test_class(self, node: ast.ClassDef) -> bool:
        if node.name.startswith("Test"):
            return True
        for base in node.bases:
            name = used_names.name_of(base)
            parent = self._definitions.get(name)
            is_class = isinstance(parent, ast.ClassDef) and parent is not node
            if name.endswith("TestCase") or (is_class and self._is_test_class(parent)):
                return True
        return False

    def _is_used(self, name: str) -> bool:
        """Whether another part of the tests uses a definition."""
        return self._parts_with[name] > (name in self._names_of[name])

    def _reaches(self, node: ast.AST, seen: set[str]) -> bool:
        """Whether a part of the tests may call the solution."""
        if self._calls(node):
            return True
        for name in _names(node) & self._definitions.keys():
            if name not in seen:
                seen.add(name)
                if self._reaches(self._definitions[name], seen):
                    return True
        return False

    def _calls(self, node: ast.AST) -> bool:
        """Whether a part calls the solution itself, or passes it to a function."""
        pairs = list(used_names.with_parents(node))
        if any(self._is_calling_use(*pair) for pair in pairs):
            return True
        if not isinstance(node, _FUNCTIONS) or self._is_used(node.name):
            return False
        # A single parameter that is called or passed to the tests' functions is the candidate.
        unknown = self._unknown(node)
        return len(unknown) == 1 and any(
            isinstance(child, ast.Name)
            and child.id == unknown[0]
            and isinstance(parent, ast.Call)
            and (parent.func is child or getattr(parent.func, "id", "") in self._definitions)
            for child, parent in pairs
        )

    def _is_calling_use(self, node: ast.AST, parent: ast.AST | None) -> bool:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_part = isinstance(parent, ast.Call | ast.Subscript | ast.JoinedStr)
            return is_part and any(name in node.value for name in self._callees)
        name = node.id if isinstance(node, ast.Name) else None
        if isinstance(node, ast.Attribute):
            name = node.attr
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner in self._modules and isinstance(parent, ast.Call):
                return True
        if name not in self._callees or not isinstance(getattr(node, "ctx", None), ast.Load):
            return False
        if isinstance(parent, ast.Call) and parent.func is not node:
            return getattr(parent.func, "id", "") not in _INSPECTING
        return not isinstance(
            parent, ast.Expr | ast.Assert | ast.Compare | ast.BoolOp | ast.UnaryOp | ast.If
        )

    def _unknown(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
        """Required parameters without a fixture or `parametrize`."""
        known = {name for name, one in self._definitions.items() if _is_fixture(one)}
        known |= {"capsys", "capfd"}
        for decorator in node.decorator_list:
            call = decorator if isinstance(decorator, ast.Call) else None
            if call and getattr(call.func, "attr", "") == "parametrize" and call.args:
                texts = (n for n in ast.walk(call.args[0]) if isinstance(n, ast.Constant))
                known |= {part.strip() for text in texts for part in str(text.value).split(",")}
        arguments = [*node.args.posonlyargs, *node.args.args]
        required = arguments[: len(arguments) - len(node.args.defaults)]
        pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        required += [one for one, default in pairs if default is None]
        return [one.arg for one in required if one.arg not in known]

    def _parameter_problem(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
        """Reason why the tests' process cannot call a function; empty for none."""
        unknown = self._unknown(node)
        # The candidate is a positional argument.
        ungiven = used_names.PYTEST_FIXTURES | {one.arg for one in node.args.kwonlyargs}
        if len(unknown) > 1 or ungiven & set(unknown):
            return f"nothing gives its arguments {', '.join(unknown)}"
        return ""


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _is_fixture(node: ast.AST) -> bool:
    decorators = getattr(node, "decorator_list", [])
    return any(used_names.name_of(getattr(one, "func", one)) == "fixture" for one in decorators)


def _reading_lines(tree: ast.Module, callees: set[str]) -> Iterator[int]:
    """Lines of calls whose argument is read again in the same comparison.

    `f(x) == sorted(x)` means the passed x, even if f changes it.
    """
    for outer in ast.walk(tree):
        is_assertion = isinstance(outer, ast.Call) and "assert" in ast.unparse(outer.func).lower()
        if not is_assertion and not isinstance(outer, ast.Compare):
            continue
        for call in ast.walk(outer):
            if (
                call is outer
                or not isinstance(call, ast.Call)
                or used_names.name_of(call.func) not in callees
            ):
                continue
            inside = set(ast.walk(call))
            functions = {node.func for node in inside if isinstance(node, ast.Call)}
            passed = {n.id for n in inside - functions if isinstance(n, ast.Name)}
            outside = (n for n in ast.walk(outer) if isinstance(n, ast.Name) and n not in inside)
            if any(node.id in passed for node in outside):
                yield from range(call.lineno, (call.end_lineno or call.lineno) + 1)


def _make_prelude(body: list[ast.stmt]) -> str:
    """Source of the data classes, which a solution must know, and their imports; empty for none.

    A class with other methods may be the reference solution.
    """
    imports, names = _harmless_imports(body)
    classes: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.ClassDef) and _carries_data(node):
            if _free_names(node) <= names | {node.name}:
                names.add(node.name)
                classes.append(node)
    if not classes:
        return ""
    return "\n".join(ast.unparse(node) for node in [*imports, *classes]) + "\n"


def _harmless_imports(body: list[ast.stmt]) -> tuple[list[ast.stmt], set[str]]:
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
        if not is_data and not (isinstance(part, ast.FunctionDef) and part.name in _DATA_METHODS):
            return False
    text = ast.unparse(node)
    return "TestCase" not in text and not any(isinstance(n, ast.Assert) for n in ast.walk(node))


def _free_names(node: ast.ClassDef) -> set[str]:
    loaded = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    bound = {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
    stored = (n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return loaded - bound - {n.id for n in stored}
