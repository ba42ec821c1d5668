"""The tree keeps to docs/architecture.md: who imports whom, where devices are named, file sizes."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("megatron_rl", "generation", "verification")
PACKAGES = (*PRODUCT, "tools")
MAX_LINES = 400

# Folder -> folders that its files may import, beside itself. A folder speaks for the folders in it
# that are not named here. The order matters to people alone: what is imported comes first.
CONFIG, PROTOCOL, ALGORITHMS = (f"megatron_rl/{n}" for n in ("config", "protocol", "algorithms"))
BACKEND, QUEUE = "megatron_rl/backend", "megatron_rl/rollout_queue"
KERNELS, CPU_SGLANG = f"{BACKEND}/cpu/kernels", f"{BACKEND}/cpu/sglang"
DATA, EVALUATION = "megatron_rl/data", "megatron_rl/evaluation"
LAYOUT, EXCHANGE, FOLDERS, WEIGHT_SYNC = (
    f"megatron_rl/weights/{name}" for name in ("layout", "exchange", "folders", "sync")
)
MODEL, TRAINER = "megatron_rl/trainer/model", "megatron_rl/trainer"
PLAN, OBSERVE = "megatron_rl/plan", "megatron_rl/observe"
REHEARSAL = "megatron_rl/rehearsal"
ENVIRONMENTS = "verification/environments"
COMMAND_LINE, LAUNCHER = "megatron_rl/cli/command_line", "megatron_rl/launcher"
ALLOWED: dict[str, set[str]] = {
    CONFIG: set(),
    PROTOCOL: {CONFIG},
    ALGORITHMS: {CONFIG},
    KERNELS: set(),
    CPU_SGLANG: {PROTOCOL, KERNELS},
    BACKEND: {CONFIG, PROTOCOL, KERNELS, CPU_SGLANG},
    LAYOUT: {CONFIG},
    EXCHANGE: {PROTOCOL, LAYOUT},
    FOLDERS: {CONFIG, PROTOCOL, BACKEND, LAYOUT},
    WEIGHT_SYNC: {CONFIG, PROTOCOL, LAYOUT, EXCHANGE},
    EVALUATION: {CONFIG, PROTOCOL, ALGORITHMS},
    "verification": {CONFIG, PROTOCOL},
    DATA: {CONFIG, PROTOCOL, "verification"},
    QUEUE: {CONFIG, PROTOCOL, ALGORITHMS, DATA, EVALUATION},
    MODEL: {CONFIG, PROTOCOL, KERNELS, BACKEND, LAYOUT, FOLDERS},
    TRAINER: {
        CONFIG, PROTOCOL, ALGORITHMS, KERNELS, BACKEND, LAYOUT, EXCHANGE, FOLDERS, WEIGHT_SYNC,
        MODEL,
    },
    ENVIRONMENTS: {CONFIG, PROTOCOL, "verification"},
    "generation": {CONFIG, PROTOCOL, CPU_SGLANG, LAYOUT, EXCHANGE, ENVIRONMENTS},
    "megatron_rl/analysis": {CONFIG, PROTOCOL, LAYOUT, FOLDERS},
    PLAN: {CONFIG, LAYOUT, COMMAND_LINE},
    REHEARSAL: {
        CONFIG, PROTOCOL, ALGORITHMS, BACKEND, LAYOUT, EXCHANGE, WEIGHT_SYNC, MODEL, TRAINER, PLAN,
        "generation", COMMAND_LINE,
    },
    "megatron_rl/simulation": {CONFIG, PROTOCOL, ALGORITHMS, LAYOUT, DATA, QUEUE, PLAN},
    "megatron_rl/curation": {CONFIG, PROTOCOL, DATA, TRAINER, "verification"},
    COMMAND_LINE: {CONFIG, PROTOCOL},
    OBSERVE: {CONFIG, PROTOCOL, DATA, QUEUE, COMMAND_LINE},
}  # fmt: skip
ALLOWED[LAUNCHER] = set(ALLOWED)
ALLOWED["megatron_rl/evaluation/runs"] = set(ALLOWED)
ALLOWED["megatron_rl/sweep"] = {CONFIG, PROTOCOL, COMMAND_LINE, OBSERVE, LAUNCHER}
ALLOWED["megatron_rl/cli"] = set(ALLOWED)
ALLOWED["tools"] = set(ALLOWED)
OUR_TOP_LEVELS = {*PACKAGES, "tests", "examples"}
HEAVY = {"torch", "transformers", "megatron", "sglang", "tokenizers"}


TOP = {
    *PACKAGES, "examples", "tests", "docs", "requirements", ".ci", ".devcontainer",
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "Dockerfile", "Dockerfile.cpu",
    "setup.py", "pyproject.toml", "mkdocs.yml", ".gitignore", ".pre-commit-config.yaml",
}  # fmt: skip
"""Files and folders at the root of the repository."""


def source_files(packages: tuple[str, ...] = PACKAGES) -> list[Path]:
    """Python files of the product and its tools."""
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    """Dotted name of a file; of a folder for its `__init__.py`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def folder_of(module: str) -> str:
    """The folder of ALLOWED to which a dotted name belongs; "" where none does."""
    path = module.replace(".", "/") + "/"
    return max((folder for folder in ALLOWED if path.startswith(f"{folder}/")), key=len, default="")


def imported_modules(source: str) -> Iterator[str]:
    """Dotted names that a file imports, anywhere in it: `from a import b` counts as a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def forbidden_imports(module: str, source: str) -> list[str]:
    """Imports of ours that the architecture does not allow to a module with this source."""
    folder = folder_of(module)
    allowed = ALLOWED.get(folder, set()) | {folder}
    return [
        name
        for name in imported_modules(source)
        if name.split(".")[0] in OUR_TOP_LEVELS
        and name not in ("megatron_rl", "megatron_rl.__version__")
        and folder_of(name) not in allowed
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


def test_every_folder_of_the_product_has_its_place() -> None:
    assert [str(path) for path in source_files() if not folder_of(module_name(path))] == [
        str(ROOT / "megatron_rl" / "__init__.py"),
        str(ROOT / "megatron_rl" / "weights" / "__init__.py"),
    ]


def test_the_root_holds_what_is_known() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert {name.split("/")[0] for name in listed.stdout.splitlines()} == TOP


def test_imports_follow_the_architecture() -> None:
    found = {
        module_name(path): forbidden_imports(module_name(path), path.read_text())
        for path in source_files()
    }
    assert {module: names for module, names in found.items() if names} == {}


def test_no_folder_imports_another_in_a_circle() -> None:
    graphlib.TopologicalSorter(ALLOWED).prepare()


def test_no_module_imports_another_in_a_circle() -> None:
    modules = {module_name(path): path.read_text() for path in source_files()}

    def nearest(name: str) -> str:
        # `from a.b import f` imports the module a.b when there is no module a.b.f.
        return name if name in modules else name.rpartition(".")[0]

    graph = {
        module: {nearest(name) for name in imported_modules(source)} - {module}
        for module, source in modules.items()
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_every_package_says_what_it_is_for() -> None:
    folders = {path.parent for path in source_files(PRODUCT) if path.parent.name != "site"}
    silent = [
        str(folder)
        for folder in sorted(folders)
        if "cpu/sglang/site" not in str(folder)
        and not (
            (folder / "__init__.py").exists()
            and ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        )
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("megatron_rl.protocol.wire", "from megatron_rl.backend import device"),
        ("megatron_rl.rollout_queue.server", "import megatron_rl.trainer.step"),
        ("megatron_rl.trainer.train", "from generation import worker"),
        ("megatron_rl.algorithms.kl", "from megatron_rl.launcher import run"),
        ("megatron_rl.trainer.model.build", "from megatron_rl.trainer import step"),
        ("generation.worker", "def f():\n    from verification.score import score"),
        ("generation.hf_engine", "from megatron_rl.weights.sync import link"),
        ("megatron_rl.weights.folders.export", "from megatron_rl.trainer.step import Trainer"),
        ("megatron_rl.launcher.run", "import tools.versions"),
        ("megatron_rl.config.tree", "from megatron_rl.protocol import wire"),
    ],
)
def test_the_import_check_finds_violations(module: str, source: str) -> None:
    assert len(forbidden_imports(module, source)) == 1


def test_devices_are_named_only_in_the_backend() -> None:
    # Memory serves engines, too, which cannot load the backend; benchmarks measure devices, and
    # gpu_day is of GPUs alone; a rehearsal stands in for them.
    exempt = (
        ROOT / "megatron_rl" / "backend",
        ROOT / "megatron_rl" / "rehearsal",
        ROOT / "megatron_rl" / "weights" / "exchange" / "memory.py",
        ROOT / "tools" / "bench",
        ROOT / "tools" / "gpu_day",
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


def test_one_function_makes_consoles() -> None:
    # rich's default writes an emoji for `:100:` in a path with a line number.
    makers = [
        (str(path.relative_to(ROOT)), ast.unparse(node))
        for path in source_files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "Console"
    ]
    place = "megatron_rl/cli/command_line/printing.py"
    assert makers == [(place, "Console(stderr=stderr, emoji=False)")]


def test_files_are_short() -> None:
    files = [*source_files(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "tools").rglob("*.sh")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {name: count for name, count in lengths.items() if count >= MAX_LINES} == {}


@pytest.mark.parametrize(
    ("entry", "forbidden"),
    [
        ("megatron_rl.rollout_queue.server", HEAVY),
        ("verification.worker", HEAVY),
        ("generation.worker", {"megatron", "sglang"}),
        ("megatron_rl.cli.main", {"torch", "megatron", "sglang"}),
        ("megatron_rl.weights.folders.conversion", {"transformers", "megatron", "sglang"}),
        # Loaded by SGLang inside each of its ranks.
        ("megatron_rl.weights.exchange.engine_rank", HEAVY - {"torch"}),
    ],
)
def test_a_process_loads_no_foreign_heavy_library(entry: str, forbidden: set[str]) -> None:
    program = f"import sys, {entry}; print(*(set(sys.modules) & {forbidden!r}))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
