import json
from pathlib import Path

import pytest
from rich.console import Console

from megatron_rl.config.errors import InputError
from megatron_rl.evaluation.runs.results import read_report
from megatron_rl.evaluation.runs.tables import print_report
from tests.evaluation.runs.folders import write_results


def test_figures_follow_from_the_records(tmp_path: Path) -> None:
    verdicts = {"a": [1, 1], "b": [1, 0], "c": [0, 0], "d": [1]}
    report = write_results(tmp_path, {"": {"x": [1, 1]}, "aime": verdicts | {"lost": []}},
                           missing=("lost",))  # fmt: skip
    assert json.loads((tmp_path / "eval.json").read_text()) == report == read_report(tmp_path)
    assert list(report["sets"]) == ["held_out", "aime"]
    aime = report["sets"]["aime"]
    # Shares 1, 1/2, 0 and 1.
    assert aime["accuracy"]["value"] == 0.625
    assert (aime["prompts"], aime["problems"], aime["missing_problems"]) == (5, 4, 1)
    assert (aime["short_problems"], aime["samples"]) == (1, 2)
    # 1, 1 and 0 of the three with two completions: squared deviations add up to 2/3.
    assert aime["pass_at"]["2"] == pytest.approx(
        {"value": 2 / 3, "se": (2 / 3 / 2 / 3) ** 0.5, "problems": 3}
    )
    # One against one is a tie.
    assert aime["maj_at"]["2"]["value"] == pytest.approx(0.5)


def test_tables_show_every_figure(tmp_path: Path) -> None:
    report = write_results(tmp_path, {"aime": {"a": [1, 1], "b": [1, 0]}})
    console = Console(record=True, width=80)
    print_report(report, console)
    text = console.export_text()
    assert "accuracy" in text and "0.750 +- 0.250" in text
    assert "pass@2" in text and "maj@2" in text and "task math" in text and "…" not in text


def test_folders_without_results_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no results of `megatron-rl eval`"):
        read_report(tmp_path)
    (tmp_path / "eval.json").write_text("{")
    with pytest.raises(InputError, match="is not valid JSON"):
        read_report(tmp_path)
    (tmp_path / "eval.json").write_text("[]")
    with pytest.raises(InputError, match="was not written by"):
        read_report(tmp_path)
