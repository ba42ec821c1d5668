"""Every configuration key that a page names is one that a run accepts."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.reference import NAME, tables

ROOT = Path(__file__).resolve().parents[2]
# Generated from the tree itself, so there is nothing to hold to it.
PAGES = [
    path
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
    if path.name != "configuration.md"
]
_TABLES = tables()
_OPEN = {entry.key for table in _TABLES for entry in table.entries if "any value" in entry.kind}
_OPEN |= {e.key for table in _TABLES for e in table.entries if e.kind.startswith("table of")}
KNOWN = {entry.key for table in _TABLES for entry in table.entries}
SECTIONS = {table.key for table in _TABLES}
TOP = {key.partition(".")[0] for key in KNOWN}
_WORD = re.compile(r"(?<![\w./-])((?:[a-z]\w*)(?:\.[A-Za-z0-9_*]+)+)(?![\w/(]|\.\w)")
_BACKTICKS = re.compile(r"`([^`\n]+)`")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_OTHERS = re.compile(r"^\| here \|.*(verl|TRL|slime)", re.MULTILINE)
_FILE = re.compile(
    r"\.(py|md|toml|jsonl?|sh|txt|html|log|ftz|ready|int32|safetensors|db|yml|yaml)$"
)


def is_known(key: str) -> bool:
    """Whether a key, a section, or part of an open table is in the tree; numbers name items."""
    parts = ["0" if part.isdigit() else part for part in key.split(".")]
    if parts[-1] == "*":
        parts.pop()
    return _matches(parts) or (parts[0] != "algorithm" and _matches(["algorithm", *parts]))


def _matches(parts: list[str]) -> bool:
    for known in KNOWN | SECTIONS | TOP | _lists():
        wanted = known.split(".")
        length = len(parts) if known in _OPEN else len(wanted)
        if len(parts) < length or len(parts) > length and known not in _OPEN:
            continue
        # A word in capitals stands for any name.
        if all(w in (p, NAME) or p.isupper() for w, p in zip(wanted, parts, strict=False)):
            return True
    # A list of tables may be named without the number of an item: prompts.path.
    return any(_without_items(known) == ".".join(parts) for known in KNOWN | SECTIONS)


def _lists() -> set[str]:
    # The tables' own names, whose items or members have names: reward.tasks of reward.tasks.NAME.
    return {key.rpartition(".")[0] for key in SECTIONS if key.endswith((".0", f".{NAME}"))}


def _without_items(key: str) -> str:
    return ".".join(part for part in key.split(".") if part != "0")


def named_keys(text: str) -> Iterator[str]:
    """What looks like a key of ours: in backticks, and in overrides of commands.

    Of a table that names other systems only the first column is ours.
    """
    prose = _FENCE.sub("", text)
    if _OTHERS.search(prose):
        prose = re.sub(r"^\| (.*?) \|.*$", r"\1", prose, flags=re.MULTILINE)
    pieces = [(piece, False) for piece in _BACKTICKS.findall(prose)]
    commands = [code for kind, code in _FENCE.findall(text) if kind == "bash"]
    pieces += [(code, True) for code in commands if "megatron-rl" in code or "examples/" in code]
    for piece, is_command in pieces:
        for found in _WORD.finditer(piece):
            key = found.group(1)
            is_override = piece[found.end() : found.end() + 1] == "="
            if key.partition(".")[0] not in TOP or _FILE.search(key):
                continue
            if not is_command or is_override:
                yield key


def leaves(value: Any, place: str = "") -> Iterator[str]:
    """Dotted keys of a TOML document; items of lists are item 0."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, f"{place}.{name}" if place else name)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for inner in value:
            yield from leaves(inner, f"{place}.0")
    else:
        yield place


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_keys_that_a_page_names_exist(page: Path) -> None:
    assert [key for key in named_keys(page.read_text()) if not is_known(key)] == []


def test_enough_keys_are_named_for_the_test_to_mean_something() -> None:
    found = {key for page in PAGES for key in named_keys(page.read_text())}
    assert len(found) > 110


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_keys_of_a_page_in_toml_exist(page: Path) -> None:
    unknown = []
    for kind, code in _FENCE.findall(page.read_text()):
        if kind == "toml":
            document = tomllib.loads(code)
            if set(document) <= TOP:
                unknown += [key for key in leaves(document) if not is_known(key)]
    assert unknown == []


def test_the_checks_find_what_does_not_exist() -> None:
    text = (
        "`train.group_sizes`, `prompts.0.path=FILE`, `reward.tasks.mine.compare`, `sft.optimizer`"
    )
    assert [key for key in named_keys(text) if not is_known(key)] == ["train.group_sizes"]
    assert list(named_keys("```bash\nmegatron-rl run queue.nothing=1 eval.json\n```")) == [
        "queue.nothing"
    ]
    assert not is_known("queue.nothing")
    assert list(leaves(tomllib.loads("[[prompts]]\npaths='x'"))) == ["prompts.0.paths"]
    assert not is_known("prompts.0.paths")
    assert is_known("policy_loss.eps_low") and not is_known("policy_loss.eps_lower")
