"""Links between pages lead to a file, and to a heading that is there."""

import re
import unicodedata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_HEADING = re.compile(r"^#{1,6} +(.*)$", re.MULTILINE)


def slug(heading: str) -> str:
    """The anchor of a heading: forges and the site agree on those that this keeps to."""
    text = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    text = re.sub(r"[^\w\s-]", "", text).strip().lower()
    return re.sub(r"[-\s]+", "-", text)


def broken_links(page: Path) -> list[str]:
    """Links of a page to files or headings that are not there."""
    text = _CODE.sub("", _FENCE.sub("", page.read_text()))
    return [link for link in _LINK.findall(text) if not _leads_somewhere(page, link)]


def _leads_somewhere(page: Path, link: str) -> bool:
    if link.startswith(("https://", "http://")):
        return True
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    if not target.exists() or not target.is_relative_to(ROOT):
        return False
    if not anchor:
        return True
    headings = _HEADING.findall(_FENCE.sub("", target.read_text()))
    return anchor in [slug(heading) for heading in headings]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: path.name)
def test_pages_of_the_site_link_to_pages_of_the_site(page: Path) -> None:
    # Only docs/ is on the site; on a forge a way out of it would work, and nobody would notice.
    text = _CODE.sub("", _FENCE.sub("", page.read_text()))
    assert [link for link in _LINK.findall(text) if link.startswith(("..", "/"))] == []


def test_what_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = ROOT / "docs" / "algorithms.md"
    assert not _leads_somewhere(page, "nowhere.md")
    assert not _leads_somewhere(page, "verification.md#no-such-heading")
    assert not _leads_somewhere(page, "#no-such-heading")
    assert not _leads_somewhere(page, f"../../{tmp_path.name}")
    assert _leads_somewhere(page, "verification.md#classes-of-answers")
    assert slug("Before you start: `megatron-rl plan`") == "before-you-start-megatron-rl-plan"


def test_every_page_is_in_the_navigation() -> None:
    named = re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text())
    there = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(named) == sorted(there)


def test_sizes_of_folders_are_right_within_a_tenth() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = [
        (re.findall(r"`([\w/]+)/`", cell), int(files), int(lines))
        for cell, files, lines in re.findall(
            r"^\| (`[^|]*?) (\d+) files, (\d+) lines \|", page, re.MULTILINE
        )
    ]
    owners = {folder: number for number, (folders, _, _) in enumerate(rows) for folder in folders}
    counted = [[0, 0] for _ in rows]
    for top in ("megatron_rl", "generation", "verification"):
        for path in (ROOT / top).rglob("*.py"):
            parents = [
                str(parent.relative_to(ROOT))
                for parent in path.parents[:-1]
                if parent.is_relative_to(ROOT)
            ]
            owner = next((owners[name] for name in parents if name in owners), None)
            if owner is not None:
                counted[owner][0] += 1
                counted[owner][1] += path.read_text().count("\n")
    assert len(rows) > 25
    wrong = [
        (folders, now)
        for (folders, *said), now in zip(rows, counted, strict=True)
        if any(abs(a - b) > max(1, 0.1 * b) for a, b in zip(said, now, strict=True))
    ]
    assert wrong == []
