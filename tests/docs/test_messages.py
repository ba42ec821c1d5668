"""Every message that docs/troubleshooting.md quotes is one that the code can print; tables too."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
WITH_TABLES = (PAGE, ROOT / "docs" / "first-run-on-8-gpus.md", ROOT / "docs" / "slurm.md")
_BLOCK = re.compile(r"^```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
_VALUE = "..."
_PERCENT = re.compile(r"%(?:\.\d+)?[sdrgf]")


def templates(source: str) -> list[str]:
    """Texts of a Python source on one line each, with `...` for every value in them."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [
                part.value if isinstance(part, ast.Constant) else _VALUE for part in node.values
            ]
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(_PERCENT.sub(_VALUE, node.value))
    return [" ".join(text.split()) for text in found]


@functools.cache
def all_templates() -> str:
    """Those of the whole product."""
    files = [
        p
        for top in ("megatron_rl", "generation", "verification")
        for p in (ROOT / top).rglob("*.py")
    ]
    return "\n".join(text for path in files for text in templates(path.read_text()))


def quoted() -> list[str]:
    """Messages of the page, each on one line."""
    messages = [" ".join(block.split()) for block in _BLOCK.findall(PAGE.read_text())]
    tables = "\n".join(page.read_text() for page in WITH_TABLES)
    table = re.findall(r"^\| `(\S+ [^`]*)` \|", tables, re.MULTILINE)
    return messages + [message.removeprefix(f"{_VALUE} ") for message in table]


def test_there_is_something_to_hold_to_the_code() -> None:
    assert len(quoted()) >= 25
    assert len(re.findall(r"^## ", PAGE.read_text(), re.MULTILINE)) >= 11


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_is_in_the_code(message: str) -> None:
    assert message in all_templates()


def test_the_check_finds_a_message_that_nobody_prints() -> None:
    source = (
        'log.warning("lost %d of %r: once more", n, x)\nraise E(f"{a} is" f" not {b:g}. See {c}")'
    )
    found = templates(source)
    assert "lost ... of ...: once more" in found
    assert "... is not .... See ..." in found
    assert "lost of: once more" not in found
    assert "the generator is unhappy" not in all_templates()
