"""Costs found again in the passes of an engine that are counted one by one."""

import random
from pathlib import Path

import pytest

from generation.sglang_passes import REPORT_S, PassCosts
from megatron_rl.protocol.engine_passes import PassRow, read_passes
from megatron_rl.simulation.pass_fit import fit_decoding, fit_prefill, sizes_of

BASE, RUNNING, KV, ENDED = 2e-3, 3e-5, 1e-7, 2e-5
PREFILL_BASE, REQUEST, WAKE = 5e-3, 1.5e-4, 3e-3
PROMPT, PLACES = 20, 64


class Clock:
    """Seconds of work, moved by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def waves(path: Path, *, least: int, most: int) -> list[PassRow]:
    """The rows of an engine that serves waves of completions of so many tokens, with 3 % noise."""
    clock, draw = Clock(), random.Random(5)
    costs = PassCosts(path, work_clock=clock, clock=lambda: clock.now * REPORT_S)

    def work(seconds: float) -> None:
        clock.now += seconds * draw.gauss(1.0, 0.03)

    for _ in range(60):
        clock.now += 0.5  # Idle: no part of any pass.
        costs.begin()
        work(WAKE + PREFILL_BASE + REQUEST * PLACES)
        costs.note(is_prefill=True, completions=PLACES, tokens=PLACES * PROMPT, ended=0)
        left = [draw.randint(least, most) for _ in range(PLACES)]
        held = PLACES * (PROMPT + 1)
        while left:
            count = len(left)
            left = [tokens - 1 for tokens in left if tokens > 1]
            ended = count - len(left)
            work(BASE + RUNNING * count + KV * held + ENDED * ended)
            costs.note(is_prefill=False, completions=count, tokens=held, ended=ended)
            held = held // count * len(left) + len(left)
        # Others without a rest: what a prefill costs beside its completions is to be told.
        for count in (8, 32):
            work(PREFILL_BASE + REQUEST * count)
            costs.note(is_prefill=True, completions=count, tokens=count * PROMPT, ended=count)
        costs.rest()
    return [row for report in read_passes(path) for row in report.rows]


def test_lengths_that_differ_tell_all_costs_apart(tmp_path: Path) -> None:
    rows = waves(tmp_path / "passes", least=50, most=1500)
    base, running, kv, _ = fit_decoding(rows)
    assert base == pytest.approx(BASE, rel=0.05)
    assert running == pytest.approx(RUNNING, rel=0.05)
    assert kv == pytest.approx(KV, rel=0.05)
    assert fit_prefill(rows) == pytest.approx((PREFILL_BASE, REQUEST, WAKE), rel=0.05)
    low, high = sizes_of(rows)
    assert low < 8 and high > 48


def test_few_iterations_in_which_a_wave_ends_tell_its_costs(tmp_path: Path) -> None:
    # Nine of ten iterations are of 64 completions.
    rows = waves(tmp_path / "passes", least=9, most=11)
    base, running, kv, ended = fit_decoding(rows)
    for count in (16, 64):
        held = count * (PROMPT + 10)
        expected = BASE + RUNNING * count + KV * held
        assert base + running * count + kv * held == pytest.approx(expected, rel=0.05)
    assert ended == pytest.approx(ENDED, rel=0.2)


def test_prefills_that_all_come_after_a_rest_do_not_tell_what_that_costs() -> None:
    rows = [
        PassRow("wake", 10, 10 * (WAKE + PREFILL_BASE + REQUEST * count), 10 * count, 0, 0)
        for count in (4, 32, 64)
    ]
    assert fit_prefill(rows) == pytest.approx((WAKE + PREFILL_BASE, REQUEST, 0.0))
