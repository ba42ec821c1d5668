"""Costs found again in the passes of an engine that are counted one by one."""

import random
from pathlib import Path

import pytest

from generation.sglang_passes import REPORT_S, PassCosts
from megatron_rl.protocol.engine_passes import PassRow, read_passes
from megatron_rl.simulation.pass_fit import fit_decoding, fit_prefill, prefilled_tokens, sizes_of

BASE, RUNNING, KV, ENDED = 2e-3, 3e-5, 1e-7, 2e-5
PREFILL_BASE, REQUEST, TOKEN, WAKE = 5e-3, 1.5e-4, 2e-5, 3e-3
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
        # A new prompt, and a token of each of the others that share it.
        work(WAKE + PREFILL_BASE + REQUEST * PLACES + TOKEN * (PROMPT - 1))
        costs.note(is_prefill=True, completions=PLACES, tokens=PLACES + PROMPT - 1, ended=0)
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
        for count, new_prompts in ((1, 1), (2, 0), (8, 8), (32, 2), (48, 0), (60, 30)):
            others = new_prompts * (PROMPT - 1)
            work(PREFILL_BASE + REQUEST * count + TOKEN * others)
            costs.note(is_prefill=True, completions=count, tokens=count + others, ended=count)
        costs.rest()
    return [row for report in read_passes(path) for row in report.rows]


def test_lengths_that_differ_tell_all_costs_apart(tmp_path: Path) -> None:
    rows = waves(tmp_path / "passes", least=50, most=1500)
    base, running, kv, _ = fit_decoding(rows)
    assert base == pytest.approx(BASE, rel=0.05)
    assert running == pytest.approx(RUNNING, rel=0.05)
    assert kv == pytest.approx(KV, rel=0.05)
    found = fit_prefill(rows)
    assert found == pytest.approx((PREFILL_BASE, REQUEST, TOKEN, WAKE), rel=0.05)
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
    assert fit_prefill(rows) == pytest.approx((WAKE + PREFILL_BASE, REQUEST, 0.0, 0.0))


def test_what_is_fitted_takes_as_long_as_all_passes_took_however_they_vary() -> None:
    # One in four takes thrice as long: in shares of its time it counts a ninth.
    rows = [
        PassRow("decode", 1, (BASE + RUNNING * count) * (3 if slow else 1), count, 0, 0)
        for count in (16, 32, 64)
        for slow in (True, False, False, False)
    ]
    base, running, _, _ = fit_decoding(rows)
    said = sum(base + running * row.completions for row in rows)
    assert said == pytest.approx(sum(row.seconds for row in rows))
    assert running / base == pytest.approx(RUNNING / BASE)


def test_of_prefilled_tokens_one_of_each_completion_is_its_own() -> None:
    rows = [PassRow("wake", 2, 0.1, 3, 43, 0), PassRow("decode", 5, 0.1, 50, 500, 0)]
    assert prefilled_tokens(rows) == 40
