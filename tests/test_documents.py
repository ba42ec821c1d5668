"""What the documents name is there: files, folders, and the functions that decide."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
# A path in backticks: with a folder of ours at its start, and no placeholder in it.
_PATH = re.compile(
    r"`((?:megatron_rl|weights|generation|verification|tools|examples|tests|docs)/[\w./-]*)`"
)
_LINK = re.compile(r"\]\(([^)#:]+)\)")
_DECIDED = re.compile(r"`([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)")


def missing_paths(text: str, folder: Path) -> list[str]:
    """Paths in backticks and links of a document in `folder` that lead nowhere."""
    named = [path for path in _PATH.findall(text)]
    found = [p for p in named if not any((b / p).exists() for b in (ROOT, ROOT / "megatron_rl"))]
    return found + [link for link in _LINK.findall(text) if not (folder / link).exists()]


def missing_names(text: str) -> list[str]:
    """Functions and classes that the text places in a file that does not define them."""
    missing = []
    for path, names in _DECIDED.findall(text):
        tree = ast.parse((ROOT / path).read_text())
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        defined = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
        missing += [f"{path}: {n}" for n in re.findall(r"\w+", names) if n not in defined]
    return missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_and_links_of_a_document_lead_somewhere(document: Path) -> None:
    assert missing_paths(document.read_text(), document.parent) == []


def test_the_functions_that_decide_are_where_the_architecture_says() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert len(_DECIDED.findall(text)) >= 10
    assert missing_names(text) == []


def test_the_checks_find_what_is_missing() -> None:
    assert missing_paths("`weights/names.py`, `tests/`, [x](nowhere.md)", ROOT) == [
        "weights/names.py",
        "nowhere.md",
    ]
    assert missing_names("`megatron_rl/algorithms/kl.py`: `kl_loss`, `lost`") == [
        "megatron_rl/algorithms/kl.py: lost"
    ]
