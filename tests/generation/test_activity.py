"""Seconds idle and busy, by a clock that the test moves."""

from generation.health import Activity
from megatron_rl.protocol.generator_messages import EngineActivity


def test_idle_counts_from_the_first_version_and_only_without_work() -> None:
    activity = Activity()
    activity.start(10.0)
    activity.start(11.0)  # later announcements do not restart the clock
    activity.change(13.0, 2)
    activity.change(14.0, -1, tokens=30)
    activity.change(15.5, -1, tokens=12)
    assert activity.report(16.0) == EngineActivity(3.5, 2.5, 42, 0)
    # Sums since the start, so that a heartbeat that is lost loses nothing.
    assert activity.report(17.0) == EngineActivity(4.5, 2.5, 42, 0)


def test_nothing_counts_before_the_engine_could_serve() -> None:
    assert Activity().report(99.0) == EngineActivity()
