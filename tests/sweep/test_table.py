"""What the command prints and writes, from run folders made by hand."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from megatron_rl.cli import main as cli
from megatron_rl.config.files import dump_toml
from megatron_rl.sweep.folders import FAILURE
from megatron_rl.sweep.plan import Plan
from megatron_rl.sweep.results import Estimate, collect
from megatron_rl.sweep.table import missing_lines, with_error
from tests.sweep.places import SWEEP, plan_of

THREE_SEEDS = SWEEP.replace("[0, 1]", "[0, 1, 2]").replace('_after"]', '_after", "reward_last10"]')
ACCURACIES = {"low": (0.50, 0.58, 0.51), "high": (0.60, 0.66, 0.63)}


def leave_runs(plan: Plan, *, but: tuple[str, int] | None = None) -> None:
    """Complete run folders, all but one, which failed."""
    for run in plan.runs:
        run.run_dir.mkdir(parents=True)
        (run.run_dir / "config.toml").write_text(dump_toml(run.config))
        if (run.variant, run.seed) == but:
            (run.run_dir / FAILURE).write_text("exit code 1: no | memory\n")
            continue
        summary = {"steps": 3, "accuracy_after": ACCURACIES[run.variant][run.seed]}
        (run.run_dir / "summary.json").write_text(json.dumps(summary))


def command(folder: Path, *arguments: str) -> list[str]:
    return ["sweep", str(folder / "rates.toml"), "--sweep-dir", str(folder / "sweep"), *arguments]


def test_report_prints_and_writes_means_and_paired_differences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_runs(plan_of(tmp_path, THREE_SEEDS))
    assert cli.main(command(tmp_path, "--report")) == 0
    text = capsys.readouterr().out
    # Worked by hand in test_estimates.py; the baseline's deviation is sqrt(0.0038 / 2).
    high = ["high", "3", "0.630 +- 0.017", "+0.100 +- 0.012", "+8.66", "3/0, p=0.25"]
    assert all(cell in text for cell in [*high, "0.530 +- 0.025", "not measured"])
    assert "All 6 runs are complete." in text
    markdown = (tmp_path / "sweep" / "sweep.md").read_text()
    assert f"| {' | '.join(high)} |" in markdown
    assert "| low | 3 | 0.530 +- 0.025 | baseline |  |  |" in markdown
    assert "## reward_last10" in markdown and "| low | 0 | not measured |" in markdown
    written = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    [figure] = [f for f in written["figures"] if f["difference"]]
    assert figure["difference"]["t"] == pytest.approx(8.660254)
    assert written["runs"][1]["metrics"] == {"accuracy_after": 0.60, "reward_last10": None}


def test_figures_of_a_diverged_run_are_null_in_json(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    plan = plan_of(tmp_path, THREE_SEEDS)
    leave_runs(plan)
    diverged = {"steps": 3, "accuracy_after": math.nan}
    (plan.runs[0].run_dir / "summary.json").write_text(json.dumps(diverged))
    assert cli.main(command(tmp_path, "--report")) == 0
    text = (tmp_path / "sweep" / "sweep.json").read_text()
    found = json.loads(text, parse_constant=refuse)
    assert found["runs"][0]["metrics"]["accuracy_after"] is None
    [estimate] = [
        figure["estimate"]
        for figure in found["figures"]
        if (figure["variant"], figure["metric"]) == (plan.runs[0].variant, "accuracy_after")
    ]
    assert estimate == {"mean": None, "standard_error": None, "n": 3}
    assert "| 3 | nan +- nan |" in (tmp_path / "sweep" / "sweep.md").read_text()


def test_equal_runs_have_no_sign_test_and_one_run_is_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of(tmp_path, SWEEP.replace("[0, 1]", "[0]"))
    leave_runs(plan)
    for run in plan.runs:
        (run.run_dir / "summary.json").write_text(json.dumps({"steps": 3, "accuracy_after": 0.5}))
    assert cli.main(command(tmp_path, "--report")) == 0
    assert "| high | 1 | 0.5 | +0 | - | 0/0 |" in (tmp_path / "sweep" / "sweep.md").read_text()
    one = collect(plan)
    assert missing_lines(dataclasses.replace(one, runs=one.runs[:1])) == ["The run is complete."]
    capsys.readouterr()


def test_figures_leave_out_what_is_missing_and_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_runs(plan_of(tmp_path, THREE_SEEDS), but=("low", 1))
    assert cli.main(command(tmp_path, "--report")) == 0
    text = capsys.readouterr().out
    assert "5 of 6 runs are complete; the figures cover only these." in text
    assert "low seed 1 failed: exit code 1: no | memory" in text
    written = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    figures = {f["variant"]: f for f in written["figures"] if f["metric"] == "accuracy_after"}
    # Seeds 0 and 2 alone are paired: 0.10 and 0.12.
    assert figures["low"]["estimate"]["n"] == 2 and figures["high"]["estimate"]["n"] == 3
    assert figures["high"]["difference"]["difference"]["n"] == 2
    assert figures["high"]["difference"]["difference"]["mean"] == pytest.approx(0.11)


def test_dry_run_prints_what_is_left_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of(tmp_path, THREE_SEEDS)
    leave_runs(plan, but=("high", 2))
    # Anywhere among the options, as for a run.
    assert cli.main(command(tmp_path, "train.steps=3", "--dry-run", "train.group_size=16")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("#")] == [
        f"# {run.label}: complete" for run in plan.runs[:-1]
    ]
    folder = tmp_path / "sweep" / "high" / "seed-2"
    assert lines[-1].endswith(
        f"-m megatron_rl.cli.main run --config {tmp_path}/base.toml --run-dir {folder} "
        "train.steps=3 train.group_size=16 optimizer.lr=0.5 run.seed=2"
    )
    assert not (folder / "logs").exists()


def test_what_a_run_would_refuse_is_refused_for_all_variants_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan_of(tmp_path, SWEEP.replace("optimizer.lr=0.5", "generator.engine=sglan"))
    assert cli.main(command(tmp_path, "model.path=nowhere")) == 2
    text = caplog.text
    assert f"variant low: model.path = {Path.cwd()}/nowhere: there is no such folder" in text
    assert "variant high: generator.engine='sglan'" in text and "mean 'sglang'" in text
    assert list((tmp_path / "sweep").iterdir()) == []


def test_report_of_no_sweep_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan_of(tmp_path)
    (tmp_path / "sweep").rmdir()
    assert cli.main(command(tmp_path, "--report")) == 2
    assert "holds no sweep" in caplog.text
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("estimate", "sign", "text"),
    [
        (Estimate(0.63, 0.0173, 3), "", "0.630 +- 0.017"),
        (Estimate(0.1, 0.01155, 3), "+", "+0.100 +- 0.012"),
        (Estimate(1234.5678, 23.4, 3), "", "1235 +- 23"),
        (Estimate(0.5, 2e-7, 3), "", "0.50000000 +- 0.00000020"),
        (Estimate(0.5, 0.0, 3), "+", "+0.5 +- 0"),
        (Estimate(0.123456, None, 1), "", "0.1235"),
        (Estimate(math.nan, math.nan, 2), "", "nan +- nan"),
        (None, "", "not measured"),
    ],
)
def test_an_error_has_two_digits_and_its_mean_as_many_decimals(
    estimate: Estimate | None, sign: str, text: str
) -> None:
    assert with_error(estimate, sign) == text
