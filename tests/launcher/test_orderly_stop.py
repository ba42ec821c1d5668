"""What the first and the second signal to a launcher do while a run is trained."""

import signal
import time
from pathlib import Path

import pytest

from megatron_rl.launcher.orderly_stop import OrderlyStop
from megatron_rl.protocol.checkpoint_folder import CHECKPOINTS
from megatron_rl.protocol.process import Interrupted
from megatron_rl.protocol.stop_request import (
    answer_stop,
    clear_stop,
    has_stopped,
    is_stop_requested,
)
from tests.protocol.test_checkpoint_folder import write

LAST = 10


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_asks_and_the_second_ends(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with OrderlyStop(tmp_path, 60.0, LAST) as stop:
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
    with OrderlyStop(tmp_path, 60.0, LAST) as stop:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted):
            stop.check(has_trained=False)
    assert not is_stop_requested(tmp_path)


def test_a_request_of_another_node_ends_this_one_by_its_deadline(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    with OrderlyStop(tmp_path, 0.2, LAST) as stop:
        began = time.monotonic()
        assert stop.check(has_trained=True)
        with pytest.raises(Interrupted) as ended:
            while time.monotonic() < began + 60:
                stop.check(has_trained=True)
                time.sleep(0.01)
    assert 0.2 <= time.monotonic() - began < 30
    assert ended.value.code == 128 + signal.SIGTERM


def test_a_stop_that_comes_after_the_last_batch_ends_the_run_when_training_has_ended(
    tmp_path: Path,
) -> None:
    with OrderlyStop(tmp_path, 60.0, LAST) as stop:
        stop.conclude()
        signal.raise_signal(signal.SIGINT)
        assert stop.check(has_trained=True)
        # The trainer has taken its last step, so it does not answer. Its checkpoint is complete.
        write(tmp_path / CHECKPOINTS, LAST)
        with pytest.raises(Interrupted) as ended:
            stop.conclude()
    assert ended.value.code == 128 + signal.SIGINT


def test_without_a_checkpoint_of_the_last_step_the_rest_of_the_run_has_the_rest_of_the_limit(
    tmp_path: Path,
) -> None:
    with OrderlyStop(tmp_path, 0.5, LAST) as stop:
        write(tmp_path / CHECKPOINTS, LAST - 1)
        signal.raise_signal(signal.SIGTERM)
        # Nobody looked between the signal and the end of training.
        stop.conclude()
    assert stop.check(has_trained=False) == ""
    deadline = time.monotonic() + 30
    with pytest.raises(Interrupted) as ended:
        while time.monotonic() < deadline:
            stop.check(has_trained=False)
            time.sleep(0.01)
    assert ended.value.code == 128 + signal.SIGTERM


def test_an_answered_request_ends_the_run(tmp_path: Path) -> None:
    with OrderlyStop(tmp_path, 60.0, LAST) as stop:
        signal.raise_signal(signal.SIGINT)
        stop.check(has_trained=True)
        answer_stop(tmp_path, 7)
        with pytest.raises(Interrupted) as ended:
            stop.conclude()
    assert ended.value.code == 128 + signal.SIGINT
    clear_stop(tmp_path)
    assert not has_stopped(tmp_path) and not is_stop_requested(tmp_path)


def test_a_signal_between_the_last_look_and_the_end_of_training_is_not_forgotten(
    tmp_path: Path,
) -> None:
    with OrderlyStop(tmp_path, 60.0, LAST) as stop:
        stop.conclude()
        signal.raise_signal(signal.SIGHUP)
    with pytest.raises(Interrupted) as ended:
        stop.check(has_trained=False)
    assert ended.value.code == 128 + signal.SIGHUP


def test_outside_of_training_a_request_ends_the_run_at_once(tmp_path: Path) -> None:
    stop = OrderlyStop(tmp_path, 60.0, LAST)
    assert stop.check(has_trained=False) == ""
    (tmp_path / "stop").touch()
    with pytest.raises(Interrupted) as ended:
        stop.check(has_trained=False)
    assert ended.value.code == 128 + signal.SIGTERM
