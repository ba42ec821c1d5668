"""What is read from transformers' results; no model is needed."""

import time

import pytest

from generation.hf_manager import first_token_at


def test_first_token_is_timed_by_the_hosts_clock() -> None:
    timestamps = [time.perf_counter() - 200.0, time.perf_counter() - 100.0]
    # perf_counter may count from another moment than monotonic.
    assert first_token_at(timestamps, 2) == pytest.approx(time.monotonic() - 200.0, abs=30)


def test_first_token_of_a_request_that_was_evicted_has_no_time() -> None:
    assert first_token_at([time.perf_counter()], 2) == -1.0
    assert first_token_at(None, 2) == -1.0
