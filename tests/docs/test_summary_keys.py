"""The page about run folders explains every key of summary.json, and no other."""

import re
from pathlib import Path

from megatron_rl.observe.summary import RunFacts, summarize

PAGE = Path(__file__).resolve().parents[2] / "docs" / "run-folder.md"


def explained_keys(page: str) -> list[str]:
    section = page.partition("## Figures of a run\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert all(len(row.split(" | ")[1]) > 10 for row in rows)
    return [key for row in rows for key in re.findall(r"`(\w+)`", row.split(" | ")[0])]


def test_every_key_of_a_summary_is_explained_once() -> None:
    assert sorted(explained_keys(PAGE.read_text())) == sorted(summarize([], RunFacts()))


def test_a_missing_explanation_is_found() -> None:
    page = "## Figures of a run\n| `steps`, `tp` | explained here |\n## Next\n| `dp` | another |\n"
    assert explained_keys(page) == ["steps", "tp"]
