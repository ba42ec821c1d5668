"""What the first and the second signal to a launcher do while a run is trained."""

import signal
import time
from pathlib import Path

import pytest

from megatron_rl.launcher.orderly_stop import OrderlyStop
from megatron_rl.protocol.process import Interrupted
from megatron_rl.protocol.stop_request import (
    answer_stop,
    clear_stop,
    has_stopped,
    is_stop_requested,
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_asks_and_the_second_ends(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with OrderlyStop(tmp_path, 60.0) as stop:
        assert stop.check(has_trained=True) == "" and not is_stop_requested(tmp_path)
        signal.raise_signal(number)
        assert "for at most 60 s" in stop.check(has_trained=True)
        assert is_stop_requested(tmp_path)
        assert stop.check(has_trained=True) == ""
        with pytest.raises(Interrupted) as ended:
            signal.raise_signal(number)
        assert ended.value.code == 128 + number
    assert signal.getsignal(number) is before


def test_a_run_without_a_step_has_nothing_to_save(tmp_path: Path) -> None:
    with OrderlyStop(tmp_path, 60.0) as stop:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted):
            stop.check(has_trained=False)
    assert not is_stop_requested(tmp_path)


def test_a_request_of_another_node_ends_this_one_by_its_deadline(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    with OrderlyStop(tmp_path, 0.2) as stop:
        began = time.monotonic()
        assert stop.check(has_trained=True)
        with pytest.raises(Interrupted) as ended:
            while time.monotonic() < began + 5:
                stop.check(has_trained=True)
                time.sleep(0.01)
    assert 0.2 <= time.monotonic() - began < 1.0
    assert ended.value.code == 128 + signal.SIGTERM


def test_only_an_answered_request_ends_a_run_whose_trainer_ended(tmp_path: Path) -> None:
    with OrderlyStop(tmp_path, 60.0) as stop:
        signal.raise_signal(signal.SIGINT)
        stop.check(has_trained=True)
        # The trainer had taken its last step.
        stop.conclude()
        answer_stop(tmp_path, 7)
        with pytest.raises(Interrupted) as ended:
            stop.conclude()
    assert ended.value.code == 128 + signal.SIGINT
    clear_stop(tmp_path)
    assert not has_stopped(tmp_path) and not is_stop_requested(tmp_path)


def test_outside_of_training_a_request_changes_nothing(tmp_path: Path) -> None:
    stop = OrderlyStop(tmp_path, 60.0)
    (tmp_path / "stop").touch()
    assert stop.check(has_trained=True) == ""
