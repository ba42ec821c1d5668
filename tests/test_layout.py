"""The tree keeps to docs/architecture.md: who imports whom, where devices are named, file sizes."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("megatron_rl", "generation", "verification", "tools")
MAX_LINES = 400

# Modules of megatron_rl that start the other processes, so may import anything but tools and tests.
SUPERVISORS = {
    "activity_text",
    "awaited",
    "cli",
    "convert_command",
    "cluster",
    "deaths",
    "doctor",
    "facts",
    "launch",
    "live_view",
    "placement",
    "plan_weights",
    "ports",
    "preflight",
    "process_tree",
    "restarts",
    "run_folder",
    "session",
    "sizing",
    "summary",
    "supervisor",
    "verify_command",
}
OUR_TOP_LEVELS = {"megatron_rl", "generation", "verification", "tools", "tests", "examples"}

# Part of the tree -> parts it may import, beside itself. "trainer" is the rest of megatron_rl.
ALLOWED = {
    "protocol": set(),
    "rollout_queue": {"protocol"},
    "generation": {"protocol"},
    "verification": {"protocol"},
    "backend": {"protocol"},
    "weights": {"protocol", "backend"},
    "convert": {"protocol", "weights"},
    "trainer": {"protocol", "weights", "backend"},
    "supervisors": {
        "protocol",
        "rollout_queue",
        "generation",
        "verification",
        "backend",
        "weights",
        "convert",
        "trainer",
    },
    "tools": {
        "protocol",
        "rollout_queue",
        "generation",
        "verification",
        "backend",
        "weights",
        "convert",
        "trainer",
        "supervisors",
    },
}
# Both ends of an exchange need the same lines; these modules need torch and messages alone.
EXCEPTIONS = {
    ("generation.hf_engine", "megatron_rl.weights.group"),
    ("generation.hf_engine", "megatron_rl.weights.receiver"),
    ("generation.sglang_loader", "megatron_rl.weights.receiver"),
}
HEAVY = {"torch", "transformers", "megatron", "sglang", "tokenizers"}


def source_files() -> list[Path]:
    """Python files of the product."""
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def part_of(module: str) -> str:
    """Part of the tree to which a dotted module name belongs."""
    names = module.split(".")
    if names[0] != "megatron_rl":
        return names[0]
    if len(names) == 1 or names[1] == "__init__":
        return "root"
    if names[1] in SUPERVISORS:
        return "supervisors"
    return names[1] if names[1] in ALLOWED else "trainer"


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a file imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            module = node.module or ""
            # `from megatron_rl import loss` imports a module too.
            is_package = module in OUR_TOP_LEVELS
            yield from (f"{module}.{alias.name}" if is_package else module for alias in node.names)


def module_name(path: Path) -> str:
    """Dotted name of a file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def forbidden_imports(module: str, source: str) -> list[str]:
    """Imports of ours that the architecture does not allow to a module with this source."""
    part = part_of(module)
    allowed = ALLOWED.get(part, set()) | {part, "root"}
    return [
        name
        for name in imported_modules(ast.parse(source))
        if name.split(".")[0] in OUR_TOP_LEVELS
        and part_of(name) not in allowed
        and (module, name) not in EXCEPTIONS
    ]


def device_names(source: str) -> list[str]:
    """Lines of code, not of prose, that name a device or a collective backend."""
    found = []
    for node in ast.walk(_without_docstrings(ast.parse(source))):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.cuda", "torch.npu"):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "cuda":
            found.append(f"{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Constant) and node.value in ("nccl", "gloo", "cuda"):
            found.append(f"{node.lineno}: {node.value!r}")
        elif isinstance(node, ast.If | ast.IfExp) and ast.unparse(node.test).startswith("device"):
            found.append(f"{node.lineno}: if {ast.unparse(node.test)}")
    return found


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [
                item
                for item in node.body
                if not (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant))
            ] or [ast.Pass()]
    return tree


@pytest.mark.parametrize("path", source_files(), ids=module_name)
def test_imports_follow_the_architecture(path: Path) -> None:
    assert forbidden_imports(module_name(path), path.read_text()) == []


@pytest.mark.parametrize("shared", sorted({shared for _, shared in EXCEPTIONS}))
def test_a_module_shared_with_engines_loads_no_framework_but_torch(shared: str) -> None:
    program = f"import sys, {shared}; print(*({HEAVY - {'torch'}!r} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("megatron_rl.protocol.wire", "from megatron_rl.backend import device"),
        ("megatron_rl.rollout_queue.server", "import megatron_rl.loss"),
        ("megatron_rl.train", "from generation import worker"),
        ("megatron_rl.loss", "from megatron_rl import launch"),
        ("generation.worker", "def f():\n    from verification.score import score"),
        ("megatron_rl.weights.export", "from megatron_rl.trainer import update"),
        ("megatron_rl.launch", "import tools.versions"),
    ],
)
def test_the_import_check_finds_violations(module: str, source: str) -> None:
    assert len(forbidden_imports(module, source)) == 1


def test_devices_are_named_only_in_the_backend() -> None:
    # generation/sglang_cpu holds the flags of SGLang's own CPU mode.
    # megatron_rl/weights/memory serves engines, too, which cannot load the backend; benchmarks
    # measure devices.
    exempt = (
        ROOT / "megatron_rl" / "backend",
        ROOT / "megatron_rl" / "weights" / "memory",
        ROOT / "generation" / "sglang_cpu",
        ROOT / "tools" / "bench",
    )
    found = {
        module_name(path): device_names(path.read_text())
        for path in source_files()
        if not any(path.is_relative_to(folder) for folder in exempt)
    }
    assert {module: lines for module, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line", ["torch.cuda.synchronize()", "x.cuda()", "f('nccl')", "if device == 1: pass"]
)
def test_the_device_check_finds_violations(line: str) -> None:
    assert device_names(f'"""Prose about nccl."""\n{line}') != []


@pytest.mark.parametrize(
    "line", ["x.to(backend.device)", "# torch.cuda", "device = backend.device"]
)
def test_the_device_check_allows_other_lines(line: str) -> None:
    assert device_names(f'"""Prose about nccl."""\n{line}') == []


def test_files_are_short() -> None:
    files = [*source_files(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "tools").rglob("*.sh")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {name: count for name, count in lengths.items() if count >= MAX_LINES} == {}


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("megatron_rl.rollout_queue.server", HEAVY),
        ("verification.worker", HEAVY),
        ("generation.worker", {"megatron", "sglang"}),
        ("megatron_rl.launch", {"torch", "megatron", "sglang"}),
        ("megatron_rl.convert.conversion", {"transformers", "megatron", "sglang"}),
    ],
)
def test_a_process_loads_no_foreign_heavy_library(module: str, forbidden: set[str]) -> None:
    program = f"import sys, {module}; print(*(set(sys.modules) & {forbidden!r}))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
