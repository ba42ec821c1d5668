"""Seconds idle and busy, by a clock that the test moves."""

import pytest

from generation.activity import Activity


def test_idle_counts_from_the_first_version_and_only_without_work() -> None:
    activity = Activity()
    activity.start(10.0)
    activity.start(11.0)  # later announcements do not restart the clock
    activity.change(13.0, 2)
    activity.change(14.0, -1, tokens=30)
    activity.change(15.5, -1, tokens=12)
    values = {metric.name: metric.value for metric in activity.report(16.0)}
    assert values == pytest.approx(
        {
            "generator/idle_s": 3.5,
            "generator/busy_s": 2.5,
            "generator/tokens": 42,
            "generator/running": 0,
        }
    )
    assert {metric.value for metric in activity.report(16.0)} == {0}


def test_nothing_counts_before_the_engine_could_serve() -> None:
    assert {metric.value for metric in Activity().report(99.0)} == {0}
