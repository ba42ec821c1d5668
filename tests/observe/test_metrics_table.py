import json
import re
from pathlib import Path

from megatron_rl.observe.metrics_table import AREAS, find, is_known, markdown, zero_beside

ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(r'Metric\(\s*f?"([a-z_]+/[a-z_0-9]+)"')


def test_the_page_is_fresh() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert page == markdown(), "run: megatron-rl metrics table > docs/metrics.md"


def test_every_metric_that_the_code_names_is_documented() -> None:
    folders = ("megatron_rl", "generation", "verification")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    named = {name for path in files for name in NAME.findall(path.read_text())}
    literals = {
        name
        for path in files
        for name in re.findall(r'"(eval/[a-z_]+|launch/[a-z_]+)"', path.read_text())
    }
    assert len(named) > 50 and len(literals) > 8
    ending = {name for name in literals if name.endswith("_")}
    assert sorted(n for n in named | literals - ending if find(n) is None) == []
    assert all(find(f"{name}2") is not None for name in ending)


def test_every_documented_metric_is_in_the_code() -> None:
    folders = ("megatron_rl", "generation")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    found = (p for p in files if p.name != "metrics_table.py" and "exporters" not in p.parts)
    code = "\n".join(path.read_text() for path in found)
    names = [known.name for area in AREAS.values() for known in area]
    assert len(names) == len(set(names))
    # Some names are put together from an area and a part.
    parts = [re.split(r"[/*]", name.rstrip("*").rstrip("/"))[-1] for name in names]
    assert [n for n, part in zip(names, parts, strict=True) if part and part not in code] == []


def test_patterns_find_what_stands_for_the_star() -> None:
    found = find("queue/groups_dropped_zero_variance")
    assert found is not None and found[0].kind == "count" and found[1] == "zero_variance"
    found = find("eval/pass_at_8_se")
    assert found is not None and found[1] == "8_se"
    assert find("train/loss") is not None and find("train/nothing") is None
    assert json.dumps(markdown()).count("| count |") > 10


def test_only_counts_are_0_where_they_are_absent() -> None:
    entries = [entry for area in AREAS.values() for entry in area]
    assert {entry.kind for entry in entries if entry.zero_beside} == {"count"}
    # The metric beside which it is 0 is itself in every such row.
    besides = {entry.zero_beside for entry in entries} - {""}
    assert len(besides) == 4 and not any(zero_beside(name) for name in besides)
    assert zero_beside("task/a/b/reason/timeout") == "task/a/b/rollout/reward"
    assert is_known("queue/groups_dropped_not_graded") and is_known("activity/groups_complete")
    assert not is_known("queue/groups_dropped_not_graded_") and not is_known("reason/own")
    assert zero_beside("reward/correct") == zero_beside("own/count") == ""
