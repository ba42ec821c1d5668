"""Which deaths are answered by a restart, worked out by hand."""

import dataclasses

import pytest

from megatron_rl.launcher.restarts import Answer, Death, answer_death, pause_before

KILLED = Death(
    exit_code=-9,
    was_ready=True,
    restarts=0,
    is_run_ending=False,
    is_too_late=False,
    has_siblings=False,
)


@pytest.mark.parametrize(
    ("changed", "answer", "reason"),
    [
        ({}, Answer.RESTART, ""),
        ({"exit_code": 1}, Answer.RESTART, ""),
        # A protocol error in mid run has this code too.
        ({"exit_code": 2}, Answer.RESTART, ""),
        ({"exit_code": 0}, Answer.RESTART, ""),
        ({"was_ready": False}, Answer.RESTART, ""),
        ({"was_ready": False, "exit_code": 2}, Answer.END_RUN, "never ready"),
        ({"was_ready": False, "exit_code": 1}, Answer.END_RUN, "never ready"),
        ({"restarts": 2}, Answer.RESTART, ""),
        ({"restarts": 3}, Answer.END_RUN, "generator.max_restarts = 3"),
        ({"is_run_ending": True}, Answer.GO_ON, "the run is ending"),
        ({"is_run_ending": True, "restarts": 3}, Answer.GO_ON, "the run is ending"),
        ({"is_too_late": True}, Answer.END_RUN, "too late"),
        ({"is_too_late": True, "has_siblings": True}, Answer.GO_ON, "too late"),
    ],
)
def test_answer_to_a_death(changed: dict, answer: Answer, reason: str) -> None:
    given, why = answer_death(dataclasses.replace(KILLED, **changed), limit=3)
    assert given is answer and reason in why


@pytest.mark.parametrize("changed", [{}, {"is_run_ending": True}, {"has_siblings": True}])
def test_without_restarts_every_death_ends_the_run(changed: dict) -> None:
    assert answer_death(dataclasses.replace(KILLED, **changed), limit=0) == (Answer.END_RUN, "")


def test_the_pause_doubles_from_a_second() -> None:
    assert [pause_before(restarts, 1.0) for restarts in range(4)] == [1.0, 2.0, 4.0, 8.0]
