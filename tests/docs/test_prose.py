"""Pages, help, key texts and error messages use the field's words and plain English.

proselint applies our word list (docs/glossary.md decides) and some of its own checks.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from proselint.registry import CheckRegistry
from proselint.registry.checks import Check, types
from proselint.tools import LintFile

from megatron_rl.config.reference import tables
from megatron_rl.observe.metrics_table import AREAS

ROOT = Path(__file__).resolve().parents[2]
# The changelog says what former names are.
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
GENERATED = ("configuration.md", "metrics.md")
SOURCES = ("megatron_rl", "generation", "verification", "tools")

# Former words of ours, and the field's. A page may say what another system calls a thing.
WORDS = {
    "flat groups?": "zero-variance group",
    "ill-formed": "a format failure",
    "surrogates?": "policy loss",
    "cures?": "fix",
    "so many": "the number of",
    "so long": "that long",
    "beside": "next to, besides, or with",
    "goes on": "resumes, or continues",
    "go on": "resume, or continue",
    "going on": "resuming, or running",
    "came to": "was",
    "of its own": "its own, before the noun",
    "of their own": "their own, before the noun",
    "held against": "compared with",
    "hold against": "compare with",
    "the former": "the noun",
    "the latter": "the noun",
}
OURS = "megatron_rl.words"
ENABLED = {
    OURS: True,
    "redundancy": True,
    "cliches": True,
    "nonwords": True,
    "hedging": True,
}
_CODE = re.compile(r"```.*?```|`[^`\n]*`|<[^>\n]*>|\]\([^)]*\)|https?://\S+", re.DOTALL)


@pytest.fixture(scope="module", autouse=True)
def checks() -> None:
    import proselint.checks

    registry = CheckRegistry()
    if not registry.checks:
        registry.register_many(proselint.checks.__register__)
    registry.register(
        Check(
            check_type=types.PreferredForms(items=WORDS),
            path=OURS,
            message="write {0} for {1!r}",
        )
    )


def faults(name: str, text: str) -> list[str]:
    """What proselint finds, as "name: line: what"."""
    plain = _CODE.sub(lambda found: " x " + "\n" * found[0].count("\n"), text)
    file = LintFile(name, plain + "\n")
    config = {"max_errors": 1000, "checks": ENABLED}
    return [
        f"{name}:{file.line_col_of(found.check_result.span[0])[0]}: {found.check_result.message}"
        for found in file.lint(config)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_pages_use_plain_words(page: Path) -> None:
    if page.name not in GENERATED:
        assert faults(page.name, page.read_text()) == []


def test_keys_and_metrics_use_plain_words() -> None:
    found = []
    for table in tables():
        for entry in table.entries:
            found += faults(entry.key, entry.meaning)
    for metric in (known for area in AREAS.values() for known in area):
        found += faults(metric.name, f"{metric.meaning}. {metric.healthy}. {metric.fix}")
    assert found == []


def test_errors_and_help_use_plain_words() -> None:
    found = []
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line, text in spoken(ast.parse(path.read_text())):
                found += faults(f"{path.relative_to(ROOT)}:{line}", text)
    assert found == []


def spoken(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each message that is raised, and of each help of an option."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args:
                yield from _texts(argument)
        if isinstance(node, ast.keyword) and node.arg == "help":
            yield from _texts(node.value)
        if isinstance(node, ast.ClassDef) and node.name.endswith("Options"):
            for field in node.body:
                if isinstance(field, ast.Expr):
                    yield from _texts(field.value)


def _texts(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.JoinedStr):
        parts = [
            part.value if isinstance(part, ast.Constant) else "x"
            for part in node.values
            if isinstance(part, ast.Constant | ast.FormattedValue)
        ]
        yield node.lineno, "".join(map(str, parts))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.lineno, node.value
    elif isinstance(node, ast.BinOp | ast.Call | ast.IfExp):
        for child in ast.iter_child_nodes(node):
            yield from _texts(child)


def test_the_list_finds_its_words() -> None:
    text = "The run goes on beside it. `goes on` is code, and\n\nso many of them are not."
    assert faults("page", text) == [
        "page:1: write resumes, or continues for 'goes on'",
        "page:1: write next to, besides, or with for 'beside'",
        "page:3: write the number of for 'so many'",
    ]
    assert faults("page", "The trainer drops a zero-variance group.") == []
    raised = ast.parse('raise ValueError(f"{n} groups: " + "lower the former")')
    assert [text for _, text in spoken(raised)] == ["x groups: ", "lower the former"]
