"""What passes cost, counted in reports by kind and size."""

from pathlib import Path

import pytest

from generation.sglang_passes import REPORT_S, PassCosts, open_pass_costs
from megatron_rl.config.errors import InputError
from megatron_rl.protocol.engine_passes import PASSES_VARIABLE, PassRow, passes_path, read_passes


class Clock:
    """Seconds, moved by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_pass_lasts_from_the_end_of_the_one_before(tmp_path: Path) -> None:
    work, clock = Clock(), Clock()
    costs = PassCosts(tmp_path / "passes", work_clock=work, clock=clock)
    work.now = 1.0
    costs.begin()
    work.now = 1.25
    costs.note(is_prefill=True, completions=3, tokens=30, ended=0)
    work.now = 1.5
    costs.begin()  # The loop looks for requests again: within the next pass.
    work.now = 2.0
    costs.note(is_prefill=False, completions=3, tokens=33, ended=1)
    costs.rest()
    work.now = 7.0
    costs.begin()
    work.now = 7.5
    costs.note(is_prefill=True, completions=2, tokens=40, ended=0)
    work.now = 7.75
    costs.note(is_prefill=True, completions=2, tokens=40, ended=0)
    clock.now = REPORT_S
    work.now = 8.0
    costs.note(is_prefill=False, completions=2, tokens=42, ended=2)
    [report] = read_passes(tmp_path / "passes")
    assert report.time == REPORT_S
    assert report.rows == [
        PassRow("wake", 1, 0.25, 3, 30, 0),
        PassRow("decode", 2, 1.0, 5, 75, 3),
        PassRow("wake", 1, 0.5, 2, 40, 0),
        PassRow("prefill", 1, 0.25, 2, 40, 0),
    ]


def test_reports_hold_what_came_since_the_last_one(tmp_path: Path) -> None:
    work, clock = Clock(), Clock()
    costs = PassCosts(tmp_path / "passes", work_clock=work, clock=clock)
    costs.begin()
    for number in range(1, 4):
        work.now, clock.now = float(number), number * REPORT_S
        costs.note(is_prefill=False, completions=4, tokens=10 * number, ended=0)
    reports = list(read_passes(tmp_path / "passes"))
    assert [[row.tokens for row in report.rows] for report in reports] == [[10], [20], [30]]


def test_a_line_that_was_cut_short_is_left_out_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "passes"
    path.write_text('{"time": 1.0, "rows": []}\n{"time": 2.0, "ro')
    assert [report.time for report in read_passes(path)] == [1.0]
    path.write_text('{"rows": []}\n')
    with pytest.raises(InputError, match="passes:1: .*expected a report of passes"):
        list(read_passes(path))


def test_the_environment_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PASSES_VARIABLE, raising=False)
    assert open_pass_costs() == []
    path = passes_path(tmp_path / "sglang-0.log")
    assert path.name == "sglang-0.passes.jsonl"
    monkeypatch.setenv(PASSES_VARIABLE, str(path))
    assert len(open_pass_costs()) == 1
