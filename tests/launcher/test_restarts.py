"""Which deaths are answered by a restart, worked out by hand."""

import dataclasses
from pathlib import Path

import pytest

from megatron_rl.config.files import load_config
from megatron_rl.launcher.restarts import (
    Answer,
    Death,
    Replicas,
    RestartRule,
    answer_death,
    pause_before,
    restart_rule,
    section_of,
)

KILLED = Death(
    exit_code=-9, can_start=True, restarts=0, is_run_ending=False, is_too_late=False, others=0
)
RULE = RestartRule(
    "generator-0", limit=3, window_s=3600.0, until="trainer", ready_path=Path("ready"), replicas=4,
    min_replicas=2,
)  # fmt: skip
USED_UP = (
    "its restarts are used up (expert.generator.max_restarts = 3 within "
    "expert.generator.restart_window_s = 3600)"
)


@pytest.mark.parametrize(
    ("changed", "answer", "reason"),
    [
        ({}, Answer.RESTART, ""),
        ({"exit_code": 1}, Answer.RESTART, ""),
        # A protocol error in mid run has this code too.
        ({"exit_code": 2}, Answer.RESTART, ""),
        ({"exit_code": 0}, Answer.RESTART, ""),
        ({"can_start": False}, Answer.RESTART, ""),
        ({"can_start": False, "exit_code": 2}, Answer.END_RUN, "never ready"),
        ({"can_start": False, "exit_code": 1}, Answer.END_RUN, "never ready"),
        ({"restarts": 2}, Answer.RESTART, ""),
        (
            {"restarts": 3, "others": 2},
            Answer.GIVE_UP,
            f"{USED_UP}; the run continues with 2 of 4 generators",
        ),
        (
            {"restarts": 3, "others": 1},
            Answer.END_RUN,
            f"{USED_UP}, and 1 of 4 generators are fewer than 2",
        ),
        ({"is_run_ending": True}, Answer.CONTINUE, "the run is ending"),
        ({"is_run_ending": True, "restarts": 3}, Answer.CONTINUE, "the run is ending"),
        ({"is_too_late": True}, Answer.END_RUN, "too late"),
        ({"is_too_late": True, "others": 1}, Answer.CONTINUE, "too late"),
    ],
)
def test_answer_to_a_death(changed: dict, answer: Answer, reason: str) -> None:
    given, why = answer_death(dataclasses.replace(KILLED, **changed), RULE)
    assert given is answer and reason in why


def test_without_restarts_a_death_ends_the_run_unless_enough_others_live() -> None:
    rule = dataclasses.replace(RULE, limit=0)
    assert answer_death(KILLED, rule)[0] is Answer.END_RUN
    assert answer_death(dataclasses.replace(KILLED, others=2), rule)[0] is Answer.GIVE_UP


def test_the_pause_doubles_from_a_second_up_to_a_minute() -> None:
    pauses = [pause_before(restarts, 1.0) for restarts in range(8)]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


def test_restarts_count_within_a_window_and_a_given_up_replica_gets_another_after_it() -> None:
    replicas = Replicas()
    assert [replicas.note_restart(RULE, at) for at in (0.0, 100.0, 200.0)] == [1, 2, 3]
    assert replicas.restarts(RULE, 3599.0) == 3
    assert replicas.give_up(RULE) == 3600.0  # the first restart leaves the window then
    assert replicas.given_up == {"generator": 1}
    assert replicas.restarts(RULE, 3600.0) == 2
    assert replicas.note_restart(RULE, 3600.0) == 3 and replicas.given_up == {}
    assert Replicas().give_up(dataclasses.replace(RULE, limit=0)) is None
    # It was never restarted: it died too late for that.
    assert Replicas().give_up(RULE) is None


def test_given_up_replicas_of_all_hosts_count_against_the_minimum() -> None:
    replicas = Replicas()
    second = dataclasses.replace(RULE, replica="generator-1")
    assert replicas.others(RULE) == 3
    replicas.note_restart(second, 0.0)
    replicas.give_up(second)
    assert (replicas.others(RULE), replicas.others(second)) == (2, 3)
    replicas.given_up_elsewhere = {"generator": 2, "verifier": 1}
    assert (replicas.others(RULE), replicas.others(second)) == (0, 1)


def test_a_start_that_fails_is_final_only_while_no_replica_of_its_kind_can_start() -> None:
    replicas = Replicas()
    assert not replicas.can_start(RULE, starting_here=0, of_this_node=4)
    assert replicas.can_start(RULE, starting_here=1, of_this_node=4)
    assert replicas.can_start(RULE, starting_here=0, of_this_node=2)
    replicas.given_up_elsewhere = {"generator": 2}
    assert not replicas.can_start(RULE, starting_here=0, of_this_node=2)
    replicas.note_ready("generator")
    assert replicas.can_start(RULE, starting_here=0, of_this_node=4)


def test_rules_are_what_the_configuration_says() -> None:
    config = load_config(
        None,
        ["run.dir=R", "generator.replicas=3", "generator.min_replicas=2",
         "expert.generator.max_restarts=5", "expert.generator.restart_window_s=60",
         "expert.verifier.max_restarts=7"],
    )  # fmt: skip
    rule = restart_rule(
        config, "generator", "generator-2", role="generator-2-before", until="queue"
    )
    assert (rule.replica, rule.limit, rule.window_s) == ("generator-2", 5, 60.0)
    assert (rule.replicas, rule.min_replicas) == (3, 2)
    assert rule.ready_path == Path("R/logs/generator-2-before.ready")
    rule = restart_rule(config, "verifier", "verifier-1", until="queue", replicas=4)
    assert (rule.kind, rule.limit, rule.window_s) == ("verifier", 7, 3600.0)
    assert (rule.replicas, rule.min_replicas, section_of(rule.kind)) == (4, 1, "verifier")
