"""`megatron-rl algorithms` and the guide name the same presets with the same costs."""

import io
import json
import re
from pathlib import Path

from rich.console import Console

from megatron_rl.cli.algorithms import AlgorithmsOptions, algorithms, describe
from megatron_rl.config.presets import PRESETS

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "algorithms.md"


def test_the_json_has_every_preset_with_all_values() -> None:
    file = io.StringIO()
    assert algorithms(AlgorithmsOptions(json=True), Console(file=file, width=80)) == 0
    rows = json.loads(file.getvalue())
    assert [row["preset"] for row in rows] == list(PRESETS)
    gspo = next(row for row in rows if row["preset"] == "gspo")
    assert gspo["values"]["policy_loss"]["eps_high"] == 4e-4
    assert gspo["parts"]["policy_loss"] == "clipped sequence -0.0003 +0.0004"


def test_the_guide_lists_the_presets_and_the_passes_that_they_need() -> None:
    table = GUIDE.read_text().partition("## Presets")[2].partition("## KL")[0]
    rows = re.findall(r"^\| (\w+) \|.*\| (\d) \|$", table, re.MULTILINE)
    assert {name: int(passes) for name, passes in rows} == {
        name: len(describe(name)["needs"]) for name in PRESETS
    }
