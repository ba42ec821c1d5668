"""Work that fitted into moments of a run whose roles shared a core, by hand; hand-overs by hand."""

import dataclasses

import msgspec
import numpy as np
import pytest

from megatron_rl.protocol.rollout_files import RolloutRecord, RolloutTimes
from megatron_rl.simulation.core_use import CoreUse, alone_share
from megatron_rl.simulation.engine_fit import fit_lease
from megatron_rl.simulation.hand_over_fit import ending_together, fit_hand_over
from megatron_rl.simulation.machines import SharedCores
from megatron_rl.simulation.records import WARM_UP, RunRecords
from tests.simulation.clusters import config_of

ROW = {"time": 12.0, "train/update_s": 4.0, "weight_sync/s": 0.0}


def record(leased: float, done: float, scored: float | None, **more: float) -> RolloutRecord:
    times = RolloutTimes(leased, done, scored, first_token_s=more.get("first_token_s", -1.0))
    return RolloutRecord(
        "p", 0, 0, "math", "", "", "", "", 1.0, {}, "correct", int(more.get("tokens", 10)), [0],
        "stop", 0, "", generator="generator-0", prompt_tokens=5, times=times,
    )  # fmt: skip


def run_of(*rollouts: RolloutRecord) -> RunRecords:
    return RunRecords(config_of(), [ROW], [ROW], list(rollouts), 0.0, 20.0)


@pytest.mark.parametrize(("hand_over_s", "work"), [(0.0, 4.0), (1.0, 4.0)])
def test_two_roles_on_two_cores_have_one_each(hand_over_s: float, work: float) -> None:
    # The engine until 9 or 10, a hand-over until 10, grading until 14; the update from 8 to 12.
    cores = SharedCores(2, trainer_threads=1, engine_threads=1)
    use = CoreUse(run_of(record(0.0, 10.0, 14.0)), cores, hand_over_s)
    assert use.update_work(ROW) == pytest.approx(work)


def test_grading_and_hand_over_take_their_share_of_the_cores() -> None:
    cores = SharedCores(2, trainer_threads=1, engine_threads=1)
    # Beside the update: two threads until 9 (engine), then three: the hand-over, from 10 on the
    # grading, and throughout the other completion's engine.
    other = record(0.0, 13.0, None)
    use = CoreUse(run_of(record(0.0, 10.0, 14.0), other), cores, 1.0)
    assert use.update_work(ROW) == pytest.approx(1.0 + 3.0 * 2 / 3)
    found = use.engines.work(np.array([0.0, 13.0]), np.array([8.0, 14.0]))
    assert found == pytest.approx([8.0, 1.0])


@pytest.mark.parametrize(
    ("trains", "engines", "hosts", "speed"),
    [(True, 1, 0, 1.0), (True, 1, 1, 2 / 3), (True, 1, 2, 0.5)],
)
def test_each_process_of_the_hosts_wants_a_core(
    trains: bool, engines: int, hosts: int, speed: float
) -> None:
    cores = SharedCores(2, trainer_threads=1, engine_threads=1)
    found = cores.speed(trains=trains, engines=engines, hosts=hosts)
    assert found == pytest.approx((speed, speed))


def test_the_hand_over_is_the_time_between_two_that_ended_together() -> None:
    wave = [record(1.0, 3.0 + 0.01 * i, None, first_token_s=0.5) for i in range(32)]
    # Others of the same lease that are longer, and one that came with nobody.
    longer = [record(1.0, 9.0 + i, None, first_token_s=0.5, tokens=20 + i) for i in range(32)]
    alone = [record(2.0, 7.0, None, first_token_s=0.1)]
    groups = ending_together([*reversed(wave), *longer, *alone])
    assert fit_hand_over(groups) == pytest.approx(0.01)


def test_a_hand_over_beside_two_others_is_two_thirds_work() -> None:
    wave = [record(1.0, 8.0 + 0.01 * i, None, first_token_s=0.5) for i in range(32)]
    beside = record(1.0, 11.0, None)
    cores = SharedCores(2, trainer_threads=1, engine_threads=1)
    # From 8.0 to 8.31 the update, an engine, and the hand-over.
    use = CoreUse(run_of(*wave, beside), cores, 0.01)
    assert fit_hand_over(ending_together(wave), use) == pytest.approx(0.01 * 2 / 3)


def test_a_lease_takes_what_an_idle_engine_waits_for_its_first_token() -> None:
    # Two leases at once to an idle engine, whose own pass takes 0.3 s; then one to a busy engine.
    first = [record(1.0, 3.0, None, first_token_s=s) for s in (0.5, 0.9)]
    first[1] = msgspec.structs.replace(first[1], group=1)
    busy = [record(2.0, 4.0, None, first_token_s=0.8)]
    assert fit_lease([*first, *busy], alone_s=0.3) == pytest.approx(0.1)
    assert fit_lease(first, alone_s=0.6) == 0.0


def test_the_last_updates_tell_how_fast_a_trainer_is_alone() -> None:
    beside = [{"time": 2.0 + 2 * i, "train/update_s": 1.0, "train/tokens_per_s": 80.0} for i in
              range(WARM_UP + 2)]  # fmt: skip
    ends = beside[-1]["time"]
    alone = {"time": ends + 2.0, "train/update_s": 1.0, "train/tokens_per_s": 100.0}
    rollouts = [record(0.0, ends, None)]
    run = RunRecords(config_of(), beside, [*beside, alone], rollouts, 0.0, ends)
    assert alone_share(run) == pytest.approx(0.8)
    assert alone_share(dataclasses.replace(run, every_step=beside)) is None


def test_completions_of_different_lengths_say_nothing_of_the_hand_over() -> None:
    apart = [record(1.0, 3.0 + i, None, first_token_s=0.5, tokens=10 + i) for i in range(64)]
    assert fit_hand_over(ending_together(apart)) == 0.0
